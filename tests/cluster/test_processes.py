"""Start and end of the processes: running processes, Ctrl-C, and the death of the conductor."""

import http.client
import json
import os
import pathlib
import signal
import subprocess
import time

import grpc
import httpx
import pytest
from harness import ANSWER_S, CLUSTER_TOKEN, GOLDENS, cpu_paths, free_port, run_to_exit, wait_for

QWEN3 = ("--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init")
# A request that fills the context, so that it still runs when the test needs it.
LONG = dict(prompt=[1, 2, 3], max_tokens=4000, ignore_eos=True, temperature=1, seed=1, return_token_ids=True)


def open_stream(cluster, **body):
    """Opens a stream and reads its first token. Returns the iterator over the rest."""
    stream = cluster.stream("/v1/completions", **LONG | body)
    next(stream)
    return stream


def status(server, path):
    """Returns the status of a path; None if the server does not listen."""
    try:
        return server.client.get(path).status_code
    except httpx.TransportError:
        return None


def wait_until_draining(cluster):
    wait_for("draining", lambda: status(cluster, "/ready") != 200, every=0.005)


def test_ps_shows_the_conductor_and_two_workers(start):
    cluster = start("--workers", 2, *QWEN3)
    listed = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout
    commands = {int(line.split()[0]): line.split()[1] for line in listed.splitlines()}
    ours = sorted(os.path.basename(commands[pid]) for pid in cluster.processes())
    assert ours == ["conductor", "worker", "worker"]


def test_workers_have_their_own_process_group(start):
    cluster = start("--workers", 2, *QWEN3)
    groups = {os.getpgid(pid) for pid in cluster.workers()}
    # Ctrl-C in a terminal reaches only the conductor, because the workers are in other process groups. The conductor
    # then drains the workers.
    assert os.getpgid(cluster.pid) not in groups


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM), ids=("ctrl-c", "sigterm"))
def test_an_idle_cluster_ends_with_0_and_leaves_nothing(start, number):
    cluster = start("--workers", 2, *QWEN3)
    cluster.signal(number)
    assert cluster.wait() == 0, cluster.explain("exit code")
    cluster.wait_until_all_gone()


def test_the_first_ctrl_c_lets_running_requests_finish(start):
    cluster = start("--workers", 2, *QWEN3)
    stream = open_stream(cluster, max_tokens=2000)
    cluster.signal(signal.SIGINT)
    wait_until_draining(cluster)
    *_, last = (event for event in stream if event["choices"])
    assert last["choices"][0]["finish_reason"] == "length"
    assert cluster.wait() == 0, cluster.explain("exit code")
    cluster.wait_until_all_gone()


def test_the_second_ctrl_c_ends_at_once(start):
    cluster = start("--workers", 2, *QWEN3)
    streams = [open_stream(cluster, seed=seed) for seed in range(4)]
    cluster.signal(signal.SIGINT)
    wait_until_draining(cluster)
    began = time.monotonic()
    cluster.signal(signal.SIGINT)
    cluster.wait()
    cluster.wait_until_all_gone()
    assert time.monotonic() - began < 3
    del streams


@pytest.mark.parametrize("stopped", (False, True), ids=("", "with a stopped worker"))
def test_workers_die_with_a_killed_conductor(start, stopped):
    cluster = start("--workers", 2, *QWEN3)
    if stopped:
        os.kill(cluster.workers()[0], signal.SIGSTOP)
    cluster.signal(signal.SIGKILL)
    cluster.wait()
    cluster.wait_until_all_gone(5)


def test_a_stopped_worker_does_not_outlive_two_ctrl_cs(start):
    cluster = start("--workers", 2, *QWEN3)
    os.kill(cluster.workers()[0], signal.SIGSTOP)
    cluster.signal(signal.SIGINT)
    wait_until_draining(cluster)
    cluster.signal(signal.SIGINT)
    cluster.wait()
    cluster.wait_until_all_gone()


def test_a_killed_worker_is_replaced(start):
    cluster = start("--workers", 2, *QWEN3)
    killed, _ = cluster.workers()
    os.kill(killed, signal.SIGKILL)
    assert cluster.complete(prompt=[1, 2, 3], max_tokens=3)["usage"]["completion_tokens"] == 3
    wait_for("a replacement", lambda: killed not in cluster.workers() and len(cluster.workers()) == 2)
    wait_for("ready", lambda: cluster.metrics()["tutti_workers_ready"] == 2)


def test_old_sockets_go(start, tmp_path):
    """The next conductor removes the socket of a killed one. This test's name is short, because the path has it."""
    sockets = lambda: {path.parent.name for path in tmp_path.glob("tutti-*/workers.sock")}
    killed = start("--workers", 1, *QWEN3, env={"TMPDIR": str(tmp_path)})
    left = sockets()
    killed.signal(signal.SIGKILL)
    killed.wait()
    assert sockets() == left and len(left) == 1
    start("--workers", 1, *QWEN3, env={"TMPDIR": str(tmp_path)})
    assert len(sockets()) == 1 and not sockets() & left


def drain(cluster, worker):
    """Drains a worker. Returns the phase in the conductor's answer: 4 is draining, 6 is drained."""
    # The request and the answer each consist of one varint.
    return control(cluster.cluster, "DrainWorker", bytes([8, worker]))[1]


def control(address, method, request=b"", token=CLUSTER_TOKEN):
    """Calls the service of routers and operators at this address. Returns the answer's bytes."""
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/tutti.cluster.v1.Conductor/{method}")
        return call(request, metadata=[("authorization", f"Bearer {token}")] if token else None, timeout=ANSWER_S)


def test_clients_do_not_reach_the_cluster_s_control(start):
    cluster = start("--workers", 1, *QWEN3)
    for method in ("DrainWorker", "Submit", "ReadCheckpointFile", "GetCluster", "Describe"):
        with pytest.raises(grpc.RpcError) as refused:
            control(cluster.grpc, method)
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED, method
        for token in (None, "a guess"):
            with pytest.raises(grpc.RpcError) as refused:
                control(cluster.cluster, method, token=token)
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED, method
    # The worker must be named explicitly, even if its rank is 0.
    with pytest.raises(grpc.RpcError, match="worker") as refused:
        control(cluster.cluster, "DrainWorker")
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert len(control(cluster.cluster, "GetCluster")) > 0
    assert cluster.complete(prompt=[1, 2, 3], max_tokens=3)["usage"]["completion_tokens"] == 3
    assert cluster.metrics()["tutti_workers_ready"] == 1


def test_a_router_without_the_secret_gets_no_requests(start, tmp_path):
    conductor = start("--workers", 1, "--no-router", *QWEN3, ready=False)
    stranger = tmp_path / "stranger"
    stranger.write_text("a guess")
    router = start("--conductor", f"http://{conductor.cluster}", "--cluster-token-file", stranger, name="router", ready=False)
    wait_for("the reason in /ready", lambda: status(router, "/ready") == 503 and "secret" in router.client.get("/ready").text)


@pytest.mark.parametrize("name", ("conductor", "router"))
def test_new_requests_are_served_while_load_balancers_notice_the_end(start, name):
    conductor = start("--workers", 1, *QWEN3, *(["--lame-duck", 5] if name == "conductor" else ["--no-router"]), ready=name == "conductor")
    server = conductor
    if name == "router":
        server = start("--conductor", f"http://{conductor.cluster}", "--skip-tokenizer-init", "--lame-duck", 5, name="router")
    model = server.model
    server.signal(signal.SIGTERM)
    wait_for("not ready", lambda: httpx.get(f"{server.url}/ready").status_code == 503)
    # This uses a new connection, like a client that does not know of the drain yet.
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": model, "prompt": [1, 2, 3], "max_tokens": 3}, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    assert server.wait() == 0, server.explain("exit code")


@pytest.mark.parametrize("name", ("conductor", "router"))
def test_a_drain_turns_late_clients_away_and_serves_connections_that_are_open(start, name):
    conductor = start("--workers", 1, "--device", "sim", *([] if name == "conductor" else ["--no-router"]), ready=name == "conductor", env={"TUTTI_SIM__FIXED_US": "5000"})
    server = conductor
    if name == "router":
        server = start("--conductor", f"http://{conductor.cluster}", name="router")
    body = dict(model=server.model, prompt=[1, 2, 3], ignore_eos=True)
    ask = lambda to, **more: to.request("POST", "/v1/completions", json.dumps(body | more), {"content-type": "application/json"})
    early = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=ANSWER_S)
    ask(early, max_tokens=600, stream=True)
    stream = early.getresponse()
    assert stream.readline()
    server.signal(signal.SIGTERM)
    late = lambda: httpx.post(f"{server.url}/v1/completions", json=body | dict(max_tokens=1), timeout=ANSWER_S)
    refused = wait_for("a refusal", lambda: (answer := late()).status_code == 503 and answer)
    assert "draining" in refused.json()["error"]["message"] and refused.headers["retry-after"] == "1"
    assert "tutti_draining 1" in httpx.get(f"{server.url}/metrics").text
    # The client of the stream does not know of the drain, and sends its next request over the same connection.
    assert b'"finish_reason":"length"' in stream.read()
    ask(early, max_tokens=3)
    assert early.getresponse().status == 200
    assert server.wait() == 0, server.explain("exit code")


def test_a_drained_worker_finishes_its_streams_and_is_not_replaced(start):
    cluster = start("--workers", 2, *QWEN3)
    streams = [open_stream(cluster, seed=seed, max_tokens=1500) for seed in range(4)]
    drained, stays = cluster.workers()
    assert drain(cluster, 0) == 4
    ended = [[e for e in stream if e["choices"]][-1]["choices"][0]["finish_reason"] for stream in streams]
    assert ended == ["length"] * 4
    assert cluster.metrics().get("tutti_request_replays_total", 0) == 0
    wait_for("it is gone", lambda: len(cluster.workers()) == 1)
    assert cluster.workers()[0] in (drained, stays) and drain(cluster, 0) == 6
    assert cluster.complete(prompt=[1, 2, 3], max_tokens=3)["usage"]["completion_tokens"] == 3
    assert cluster.client.get("/ready").status_code == 200
    with pytest.raises(grpc.RpcError, match="no worker 7"):
        drain(cluster, 7)


def test_a_stand_alone_router_serves_a_conductor(start):
    conductor = start("--workers", 2, "--no-router", *QWEN3, ready=False)
    router = start("--conductor", f"http://{conductor.cluster}", "--skip-tokenizer-init", name="router")
    ask = dict(prompt=[5, 6, 7], max_tokens=8, temperature=0, return_token_ids=True)
    alone = router.complete(**ask)["choices"][0]["token_ids"]
    streamed = [t for e in router.stream("/v1/completions", **ask) for c in e["choices"] for t in c["token_ids"]]
    assert len(alone) == 8 and streamed == alone


def test_a_router_waits_for_its_conductor(start):
    port = free_port()
    router = start("--conductor", f"http://127.0.0.1:{port}", "--skip-tokenizer-init", name="router", ready=False)
    wait_for("live", lambda: status(router, "/health") == 200)
    assert status(router, "/ready") == 503
    answer = router.client.post("/v1/completions", json={"model": "any", "prompt": [1]})
    assert answer.status_code == 503 and "error" in answer.json()


def test_the_settings_in_force_are_printed(spawn):
    variables = {"TUTTI_MAX_STEP_TOKENS": "77", "TUTTI_CPU_ISA": "avx512-vnni"}
    process = spawn("conductor", "--workers", 3, "--print-config", env=variables)
    assert process.wait() == 0
    assert '"max_step_tokens": 77' in process.log() and '"workers": 3' in process.log()
    assert '"cpu_isa": "avx512-vnni"' in process.log()


def test_workers_compute_on_the_requested_instruction_path(start, spawn, tmp_path):
    secret, file, address = tmp_path / "secret", tmp_path / "tutti.toml", f"127.0.0.1:{free_port()}"
    secret.write_text("open sesame\n")
    file.write_text('cpu_isa = "portable"\n')
    joining = ("--worker-listen", address, "--join-token-file", secret)
    cluster = start("--workers", 2, "--config", file, *joining, *QWEN3)
    # A worker that joins by hand uses the same instruction path.
    by_hand = spawn("worker", "--conductor", f"http://{address}", "--rank", 2, "--join-token-file", secret)
    wait_for("three workers", lambda: cluster.metrics().get("tutti_workers_ready") == 3)
    assert cluster.says("on cpu, portable, ", 2) and by_hand.says("on cpu, portable, ")
    best = start("--config", file, *QWEN3, env={"TUTTI_CPU_ISA": "auto"})
    assert best.says(f"on cpu, {cpu_paths()[-1]}, ")


CORES = os.sched_getaffinity(0)


def cores_by_thread(pid):
    """Returns {name: allowed cores} of a process's threads."""
    cores = {}
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
        cores[status["Name"]] = status["Cpus_allowed_list"]
    return cores


@pytest.mark.skipif(len(CORES) < 2, reason="one core is everybody's")
@pytest.mark.parametrize(("workers", "threads"), ((2, 1), (1, 2)))
def test_compute_threads_have_their_own_cores(start, workers, threads):
    cluster = start("--workers", workers, "--threads", threads, "--pin-threads", *QWEN3)
    response = cluster.client.post("/v1/completions", json=dict(prompt=[1, 2, 3], max_tokens=4))
    assert response.status_code == 200
    taken = []
    for pid in cluster.workers():
        threads_of = cores_by_thread(pid)
        compute = [cores for name, cores in threads_of.items() if name == "engine" or name.startswith("kernel-")]
        assert len(compute) == threads, threads_of
        taken += compute
        # The threads that communicate with the conductor may run on any core.
        assert threads_of["worker"] not in compute
    assert len(set(taken)) == workers * threads, taken
    assert {int(core) for core in taken} <= CORES


def test_more_compute_threads_than_cores_are_refused(tmp_path):
    flags = ("--workers", len(CORES) + 1, "--threads", 1, "--pin-threads", "--http=127.0.0.1:0", "--grpc=127.0.0.1:0")
    code, log = run_to_exit("conductor", [*flags, *QWEN3], tmp_path, None)
    assert code == 64, log
    assert f"pin_threads: {len(CORES) + 1} workers of 1 threads want {len(CORES) + 1} cores, there are {len(CORES)}" in log
