"""`conductor status`, `conductor drain` and `conductor trace` against running clusters."""

import itertools
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from certificates import Authority
from harness import free_port, run_to_exit, wait_for
from topologies import DISAGGREGATED

SIM = ("--device", "sim")
# Steps take 5 ms, so that a stream of a thousand tokens lasts five seconds.
SLOW = {"TUTTI_SIM__FIXED_US": "5000"}
ASK = dict(prompt=[1, 2, 3], ignore_eos=True)


@pytest.fixture
def operate(tmp_path):
    """Returns a function that runs a command against a cluster, with the cluster's secret. It returns (exit code,
    output). """

    def operate(cluster, *args, env=None):
        flags = ("--conductor", f"http://{cluster.cluster}", "--cluster-token-file", tmp_path / "cluster-token")
        return run_to_exit("conductor", [*args, *flags], tmp_path, env)

    return operate


def open_stream(cluster, **body):
    stream = cluster.stream("/v1/completions", **(ASK | body))
    return itertools.chain([next(stream)], stream)


def finish(stream):
    return [event for event in stream if event["choices"]][-1]["choices"][0]["finish_reason"]


def state(operate, cluster):
    code, text = operate(cluster, "status", "--json")
    assert code == 0, text
    return json.loads(text)


def test_status_tells_of_workers_and_of_the_queue(start, operate):
    cluster = start("--workers", 2, *SIM, env=SLOW)
    stream = open_stream(cluster, max_tokens=400)
    report = wait_for("a running request", lambda: (seen := state(operate, cluster))["requests"]["in_flight"] == 1 and sum(w["running"] for w in seen["workers"]) == 1 and seen)
    assert report["ready"] and not report["draining"] and report["model"] == cluster.model
    assert report["build"] in cluster.client.get("/metrics").text
    assert report["requests"]["limit"] == 1024 + 2 * 128
    assert {(w["worker"], w["role"], w["state"], w["device"]) for w in report["workers"]} == {(r, "whole", "ready", "sim") for r in (0, 1)}
    assert {w["worker"]: w["pid"] for w in report["workers"]} == cluster.workers_by_rank()
    assert sum(w["kv_pages_used"] for w in report["workers"]) > 0 and all(w["heard_ms"] < 5000 for w in report["workers"])
    code, text = operate(cluster, "status")
    assert code == 0 and re.search(r"^WORKER +ROLE +STATE +GROUP +KV ", text, re.M), text
    rows = [line.split() for line in text.splitlines() if re.match(r" +\d+  whole", line)]
    assert [row[:3] for row in rows] == [["0", "whole", "ready"], ["1", "whole", "ready"]], text
    assert "requests  1 in flight, 0 waiting, limit 1280" in text, text
    assert finish(stream) == "length"


def test_drain_of_a_worker_waits_for_its_streams(start, operate):
    cluster = start("--workers", 2, *SIM, "--heartbeat-timeout", 60, env=SLOW)
    streams = [open_stream(cluster, max_tokens=1000) for _ in range(4)]
    # The worker is stopped, so that the drain cannot end. It continues after the command.
    worker = cluster.workers_by_rank()[0]
    os.kill(worker, signal.SIGSTOP)
    code, text = operate(cluster, "drain", "--worker", 0, "--timeout", 1)
    os.kill(worker, signal.SIGCONT)
    assert code == 1 and re.search(r"worker 0 still has \d+ requests after 1s", text), text
    assert operate(cluster, "drain", "--worker", 0) == (0, "worker 0 is drained\n")
    assert [finish(stream) for stream in streams] == ["length"] * 4
    assert cluster.metrics().get("tutti_request_replays_total", 0) == 0
    assert [w["state"] for w in state(operate, cluster)["workers"]] == ["drained", "ready"]
    assert len(cluster.workers()) == 1
    # The worker is already drained, so a second drain succeeds at once.
    assert operate(cluster, "drain", "--worker", 0) == (0, "worker 0 is drained\n")


def test_drain_of_a_conductor_ends_it_after_its_streams(start, operate):
    cluster = start("--workers", 1, *SIM, "--heartbeat-timeout", 60, env=SLOW)
    stream = open_stream(cluster, max_tokens=1000)
    worker = cluster.workers_by_rank()[0]
    os.kill(worker, signal.SIGSTOP)
    # A stopped conductor cannot be drained. When it has logged the request to drain, it has answered the command's
    # first calls.
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(operate, cluster, "drain", "--all", "--timeout", 3)
        wait_for("the drain", lambda: "an operator asks for it" in cluster.log())
        assert state(operate, cluster)["draining"]
        cluster.signal(signal.SIGSTOP)
        try:
            code, text = waiting.result()
        finally:
            cluster.signal(signal.SIGCONT)
    assert code == 1 and "the conductor does not answer, and its port is not closed after 3s" in text, text
    code, text = operate(cluster, "drain", "--all", "--timeout", 1)
    assert code == 1 and "the conductor still has 1 requests after 1s" in text, text
    os.kill(worker, signal.SIGCONT)
    # Unlike a second signal, a second drain request does not end the process at once.
    assert operate(cluster, "drain", "--all") == (0, "the conductor is drained\n")
    assert finish(stream) == "length"
    assert cluster.wait() == 0, cluster.explain("exit code")


def test_trace_draws_the_life_of_a_disaggregated_request(start, operate):
    cluster = start("--topology", DISAGGREGATED, "--max-step-tokens", 512, *SIM)
    # The first call makes the conductor record the chunks of prefills from then on.
    assert operate(cluster, "trace")[0] == 0
    answer = cluster.complete(**ASK | dict(prompt=[index % 1000 for index in range(1500)], max_tokens=20))
    assert answer["usage"]["completion_tokens"] == 20
    code, text = operate(cluster, "trace")
    newest = text.splitlines()[1].split()
    assert code == 0 and newest[1:4] == ["finished", "1500", "20"], text
    code, text = operate(cluster, "trace", newest[0])
    assert code == 0 and text.startswith(f"request {newest[0]}: finished, 1500 prompt tokens, 20 output tokens, "), text
    rows = [line for line in text.splitlines() if "|" in line]
    chunks = [int(tokens) for row in rows for tokens in re.findall(r"chunk of (\d+) tokens, worker 0", row)]
    assert sum(chunks) == 1500 and len(chunks) > 1, text
    for phase in ("queue ", "queue and prefill, worker 0", "room for decode, worker 1", "transfer done", "decode "):
        assert any(row.strip().startswith(phase) for row in rows), (phase, text)
    assert len({row.index("|") for row in rows}) == 1 and all(len(row) - row.index("|") == 42 for row in rows), text
    code, text = operate(cluster, "trace", 4_000_000)
    assert (code, text) == (1, "conductor trace: request 4000000 is not among the last requests of the conductor\n")


def test_what_cannot_be_done_is_one_line(start, operate, tmp_path):
    cluster = start("--workers", 1, *SIM)
    wrong, nobody = tmp_path / "wrong", f"http://127.0.0.1:{free_port()}"
    wrong.write_text("a guess")
    run = lambda *args, env=None: run_to_exit("conductor", args, tmp_path, env)
    url = ("--conductor", f"http://{cluster.cluster}")
    failures = {
        "no conductor answers at": run("status", "--conductor", nobody),
        "cluster_token_file: the call does not show the secret": run("trace", *url, "--cluster-token-file", wrong),
        "cluster_token_file: cannot read": run("status", *url, "--cluster-token-file", tmp_path / "missing"),
        "there is no worker 7": operate(cluster, "drain", "--worker", 7),
        "is not on this machine's loopback": run("status", "--conductor", "http://10.255.255.1:1"),
    }
    misuses = {
        "conductor: is missing": run("status", env={"TMPDIR": str(tmp_path)}),
        "worker: is missing": operate(cluster, "drain"),
        "all: contradicts": operate(cluster, "drain", "--all", "--worker", 0),
        "--nonsense": run("status", "--nonsense"),
        "invalid value 'first'": run("trace", "first", *url),
        "timeout: is 0": operate(cluster, "drain", "--all", "--timeout", 0),
    }
    for words, (code, text) in failures.items():
        assert code == 1 and words in text and len(text.splitlines()) == 1, (words, code, text)
    for words, (code, text) in misuses.items():
        assert code == 2 and words in text, (words, code, text)
    # The settings of a conductor in the same environment are ignored by the command.
    assert operate(cluster, "status", env={"TUTTI_MODEL": "other", "TUTTI_SIM__FIXED_US": "1"})[0] == 0


def test_commands_call_an_encrypted_conductor_as_a_router(start, tmp_path):
    authority = Authority(tmp_path)
    cluster = start("--workers", 1, *SIM, *authority.inside("conductor", "worker"))
    url = ("--conductor", f"https://{cluster.cluster}", "--cluster-token-file", tmp_path / "cluster-token")
    code, text = run_to_exit("conductor", ["status", *url, *authority.inside("router")], tmp_path)
    assert code == 0 and "ready" in text, text
    code, text = run_to_exit("conductor", ["status", *url, *authority.inside("worker", name="stranger")], tmp_path)
    assert code == 1 and "no encrypted connection" in text and len(text.splitlines()) == 1, text
    cluster.signal(signal.SIGTERM)
    assert cluster.wait() == 0, cluster.explain("exit code")
