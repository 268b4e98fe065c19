"""Operators: request ids and the access log in the lines of all processes, times that run, commands that
find their conductor, and the resources of processes."""

import json
import re
import shutil
import signal
import tempfile

import httpx
import pytest
from api_keys import line
from harness import free_port, run_to_exit, wait_for

SIM = ("--device", "sim")
# Steps take 20 ms, so that a stream of a thousand tokens lasts twenty seconds.
SLOW = {"TUTTI_SIM__FIXED_US": "20000"}
JSON = ("--log-format", "json")
ASK = dict(prompt=[1, 2, 3], ignore_eos=True)


@pytest.fixture
def private():
    """A temporary directory of this test's own, with a path short enough for sockets. Commands with it find the
    conductors of this test alone."""
    folder = tempfile.mkdtemp(prefix="operator-", dir="/tmp")
    yield {"TMPDIR": folder}
    shutil.rmtree(folder)


def lines(process):
    """The log's lines, each of which must be JSON and name its process. The last one may be half written."""
    found = [json.loads(text) for text in process.log().splitlines(keepends=True) if text.endswith("\n")]
    assert all({"timestamp", "level", "process", "message"} <= entry.keys() for entry in found), found
    # Names of fields say what is a number.
    numbers = re.compile(r"(_ms|_s|_bytes|^worker|^rank|^pid|^port|^status|_tokens)$")
    for entry in found:
        wrong = {name: value for name, value in entry.items() if numbers.search(name) and not isinstance(value, (int, float))}
        assert not wrong, entry
    return found


def access(process, **match):
    return [entry for entry in lines(process) if entry["target"] == "tutti_router::access" and match.items() <= entry.items()]


def test_a_request_has_one_id_in_all_logs_and_a_line_when_it_ends(start, tmp_path, private):
    keys = tmp_path / "keys"
    keys.write_text(line("alice", "one") + line("carol", "three", "operator") + line("bob", "two", "requests-per-minute=1"))
    loud = (*JSON, "--log", "info,tutti_conductor=debug,tutti_worker=debug")
    cluster = start(*SIM, "--workers", 1, "--no-router", *loud, env=SLOW | private)
    router = start("--conductor", f"http://{cluster.cluster}", "--api-key-file", keys, "--access-log", "all", *JSON, name="router")
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    router.client.headers.update(alice)
    body = dict(ASK, model=router.model, max_tokens=3)

    answer = router.client.post("/v1/completions", json=body, headers={"x-request-id": "client-1"})
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "client-1"
    made = router.client.get("/v1/models").headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", made)
    bad = router.client.get("/v1/models", headers={"x-request-id": "two words"}).headers["x-request-id"]
    assert re.fullmatch("[0-9a-f]{32}", bad) and bad != made

    # Refusals have the id in their headers and bodies.
    refused = {
        401: httpx.get(f"{router.url}/v1/models", headers={"x-request-id": "no-key"}),
        404: router.client.get("/nowhere", headers={"x-request-id": "no-route"}),
        405: router.client.get("/v1/completions", headers={"x-request-id": "no-method"}),
        400: router.client.post("/v1/completions", json=body | {"temperature": -1}, headers={"x-request-id": "bad"}),
    }
    assert httpx.get(f"{router.url}/v1/models", headers=bob).status_code == 200
    refused[429] = httpx.get(f"{router.url}/v1/models", headers=bob | {"x-request-id": "too-many"})
    for status, answer in refused.items():
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"] == answer.request.headers["x-request-id"]

    # A client that leaves in the middle of a stream.
    asked = body | {"stream": True, "max_tokens": 2000}
    with router.client.stream("POST", "/v1/completions", json=asked, headers={"x-request-id": "leaves"}) as stream:
        assert next(stream.iter_lines()).startswith("data: ")
    (left,) = wait_for("the line of a client that left", lambda: access(router, request_id="leaves"))
    assert (left["status"], left["outcome"], left["key"]) == (200, "cancelled", "alice")
    assert left["output_tokens"] >= 1 and left["first_token_ms"] <= left["duration_ms"]

    # An operator's cancel is named in the conductor's log like its request.
    carol = {"authorization": "Bearer three"}
    with router.client.stream("POST", "/v1/completions", json=asked, headers={"x-request-id": "unwanted"}) as stream:
        # The iterator is kept, because its end closes the stream.
        events = stream.iter_lines()
        assert next(events).startswith("data: ")
        recent = router.client.get("/cluster/requests", headers=carol).json()["requests"]
        (number,) = [it["request"] for it in recent if it["request_id"] == "unwanted"]
        answer = router.client.post(f"/cluster/requests/{number}/cancel", headers=carol)
        assert answer.status_code == 204, answer.text
    wait_for("the line of the cancel", lambda: [entry for entry in lines(cluster) if entry.get("request_id") == "unwanted"
                                               and entry["message"] == "an operator has cancelled the request"])

    (whole,) = access(router, request_id="client-1")
    expected = dict(level="INFO", process="router", method="POST", route="/v1/completions", status=200, outcome="finished",
                    key="alice", peer="127.0.0.1", prompt_tokens=3, output_tokens=3, cached_tokens=0)
    assert expected.items() <= whole.items() and whole["answer_bytes"] > 100, whole
    ids = {401: "no-key", 404: "no-route", 405: "no-method", 400: "bad", 429: "too-many"}
    for status, name in ids.items():
        (refusal,) = wait_for("the line of a refusal", lambda: access(router, request_id=name))
        assert (refusal["status"], refusal["outcome"]) == (status, "refused"), refusal
    (limited,) = access(router, request_id="too-many")
    assert (limited["key"], limited["error"]) == ("bob", "rate_limited")
    # The conductor names the request as its client does. So does the worker, in what it logs of the graph.
    said = lambda: {(entry["process"], entry["message"]) for entry in lines(cluster) if entry.get("request_id") == "client-1"}
    wait_for("the lines of both", lambda: said() >= {("conductor", "launched"), ("worker", "took a graph")})
    # Only an operator's key shows the ids of others' requests.
    shown = lambda key: [it["request_id"] for it in router.client.get(
        "/cluster/requests", headers={"authorization": f"Bearer {key}"}).json()["requests"]]
    assert "client-1" in shown("three") and not any(shown("one"))
    code, text = run_to_exit("conductor", ["trace"], tmp_path, private)
    assert code == 0 and re.search(r"^ *1  finished +3 +3 +\S+ m?s  client-1$", text, re.M), text
    started = [entry for entry in lines(cluster) if entry["message"] == "loaded and warm"]
    assert [(entry["process"], entry["rank"]) for entry in started] == [("worker", 0)]
    lines(router)


def test_times_run_and_commands_find_the_only_conductor(start, tmp_path, private):
    command = lambda *args: run_to_exit("conductor", args, tmp_path, private)
    code, text = command("status")
    assert code == 2 and "no conductor of this user runs on this machine" in text and len(text.splitlines()) == 1, text
    cluster = start(*SIM, "--workers", 1, env=SLOW | private)
    assert "ready" in command("status")[1]
    asked = dict(ASK, model=cluster.model, stream=True, max_tokens=4000)
    with cluster.client.stream("POST", "/v1/completions", json=asked) as stream:
        events = stream.iter_lines()
        assert next(events).startswith("data: ")
        took = lambda: cluster.client.get("/cluster/requests").json()["requests"][0]["took_us"]
        first = took()
        # The request decodes, so no transition happens meanwhile.
        wait_for("a time that runs", lambda: took() > first + 300_000)

        def shown():
            number, unit = re.search(r"in progress, .* output tokens, ([\d.]+) (ms|s)", command("trace", "1")[1]).groups()
            return float(number) * {"ms": 1, "s": 1000}[unit]

        before = shown()
        wait_for("a time that runs in the command", lambda: shown() > before)
        assert re.search(r"^decode +\S+ m?s +[\d.]+ m?s\+", command("trace", "1")[1], re.M)
        # The error says which kind of address was given.
        for flag, what in ((f"http://{cluster.url.removeprefix('http://')}", "it serves HTTP, as a port of --http"),
                           (f"http://{cluster.grpc}", "it serves other calls, as a port of --grpc")):
            code, text = command("status", "--conductor", flag)
            assert code == 1 and f"{flag} is not a conductor's --cluster-grpc: {what}" in text, text

    metrics = cluster.metrics()
    assert metrics["process_resident_memory_bytes"] > 1 << 20 and metrics["process_cpu_seconds_total"] > 0
    assert 3 <= metrics["process_open_fds"] < metrics["process_max_fds"] and metrics["process_start_time_seconds"] > 1.7e9
    assert wait_for("a heartbeat", lambda: cluster.metrics().get("tutti_worker_resident_memory_bytes", 0) > 1 << 20)
    used, total = (wait_for("the device's memory", lambda: cluster.metrics().get(f"tutti_worker_device_memory_{what}_bytes"))
                   for what in ("used", "total"))
    assert 1 << 20 < used < total, (used, total)
    assert cluster.metrics()["tutti_worker_start_time_seconds"] >= metrics["process_start_time_seconds"]
    assert not any(name.startswith("vllm") for name in cluster.client.get("/metrics").text.split())

    other = start(*SIM, "--workers", 1, "--vllm-metrics", env=private)
    code, text = command("status")
    assert code == 2 and "2 conductors run on this machine" in text and str(cluster.cluster) in text and str(other.cluster) in text, text
    other.complete(**ASK, max_tokens=3)
    scraped = other.client.get("/metrics").text
    label = f'{{model_name="{other.model}"'
    for sample in (f"vllm:generation_tokens_total{label}}} 3", f'vllm:request_success_total{label},finished_reason="length"}} 1',
                   f"vllm:num_requests_running{label}}}", f"vllm:time_to_first_token_seconds_count{label}}} 1"):
        assert f"\n{sample}" in scraped, (sample, scraped)
    # A killed conductor leaves its note, which does not count.
    other.signal(signal.SIGKILL)
    wait_for("its end", lambda: other.child.poll() is not None)
    assert "ready" in command("status")[1]
    other.wait_until_all_gone()
    assert command("drain", "--all") == (0, "the conductor is drained\n")
    assert cluster.wait() == 0
    # The note goes with its conductor.
    assert "no conductor of this user" in command("status")[1]


def test_a_start_that_fails_says_so_in_json(tmp_path):
    port = free_port()
    usage = run_to_exit("conductor", ["--nonsense", *JSON], tmp_path)
    unknown = run_to_exit("conductor", ["--workers", 0, *JSON, "--http", f"127.0.0.1:{port}"], tmp_path)
    by_variable = run_to_exit("router", ["--max-replays", "many"], tmp_path, {"TUTTI_LOG_FORMAT": "json"})
    for (code, text), process, word in ((usage, "conductor", "--nonsense"), (unknown, "conductor", "workers"), (by_variable, "router", "many")):
        entries = [json.loads(part) for part in text.splitlines()]
        assert code == 64 and entries[-1]["level"] == "ERROR" and entries[-1]["process"] == process, text
        assert word in entries[-1]["message"], text
