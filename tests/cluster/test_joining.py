"""Workers that connect over TCP, and workers that join by hand."""

import itertools
import signal

import pytest
from harness import GOLDENS, free_port, wait_for
from streams import Streams

QWEN3 = ("--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init")
ASK = dict(prompt=[5, 6, 7], max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)


@pytest.fixture
def secret(tmp_path):
    """Returns a file with the secret, and a file with a wrong secret."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("open sesame\n")
    wrong.write_text("open barley\n")
    return right, wrong


@pytest.fixture
def open_cluster(start, secret):
    """Returns a cluster with one spawned worker, and the address at which others may join."""
    address = f"127.0.0.1:{free_port()}"
    return start("--workers", 1, "--worker-listen", address, "--join-token-file", secret[0], *QWEN3), f"http://{address}"


def workers_ready(cluster):
    return cluster.metrics().get("tutti_workers_ready")


def join(spawn, url, token, rank):
    return spawn("worker", "--conductor", url, "--rank", rank, "--join-token-file", token)


def test_spawned_workers_over_tcp(start):
    cluster = start("--workers", 2, "--worker-listen", f"127.0.0.1:{free_port()}", *QWEN3)
    assert len(cluster.complete(**ASK)["choices"][0]["token_ids"]) == 8
    assert workers_ready(cluster) == 2


def test_a_worker_joins_by_hand_and_may_leave(open_cluster, spawn, secret):
    cluster, url = open_cluster
    worker = join(spawn, url, secret[0], 1)
    wait_for("two workers", lambda: workers_ready(cluster) == 2)
    alone = cluster.complete(**ASK)["choices"][0]["token_ids"]
    answers = [cluster.complete(**ASK, n=4)["choices"] for _ in range(4)]
    assert all(choice["token_ids"] == alone for choices in answers for choice in choices)
    worker.signal(signal.SIGKILL)
    wait_for("one worker", lambda: workers_ready(cluster) == 1)
    assert cluster.complete(**ASK)["choices"][0]["token_ids"] == alone


LONG = ASK | dict(max_tokens=1500)


def long_streams(cluster, count):
    """Opens streams that run for a while."""
    streams = [cluster.stream("/v1/completions", **LONG) for _ in range(count)]
    return [itertools.chain([next(stream)], stream) for stream in streams]


def token_ids(stream):
    return [token for event in stream for choice in event["choices"] for token in choice["token_ids"]]


def test_sigterm_drains_a_worker_that_joined(open_cluster, spawn, secret):
    cluster, url = open_cluster
    worker = join(spawn, url, secret[0], 1)
    wait_for("two workers", lambda: workers_ready(cluster) == 2)
    streams = long_streams(cluster, 4)
    worker.signal(signal.SIGTERM)
    wait_for("it takes nothing new", lambda: workers_ready(cluster) == 1)
    assert [len(token_ids(stream)) for stream in streams] == [1500] * 4
    assert cluster.metrics().get("tutti_request_replays_total", 0) == 0
    assert worker.wait() == 0, worker.explain("exit code")


def test_sigterm_ends_a_worker_that_waits_for_a_conductor(spawn, secret):
    worker = join(spawn, f"http://127.0.0.1:{free_port()}", secret[0], 1)
    wait_for("it tries", lambda: "cannot join yet" in worker.log())
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0, worker.explain("exit code")


def test_a_worker_that_joined_serves_the_next_conductor_at_the_address(start, spawn, secret):
    address = f"127.0.0.1:{free_port()}"
    conductor = lambda: start("--workers", 1, "--worker-listen", address, "--join-token-file", secret[0], *QWEN3)
    first = conductor()
    joined, waiting = join(spawn, f"http://{address}", secret[0], 1), None
    wait_for("two workers", lambda: workers_ready(first) == 2)
    alone = first.complete(**ASK)["choices"][0]["token_ids"]
    first.signal(signal.SIGKILL)
    first.wait()
    waiting = join(spawn, f"http://{address}", secret[0], 2)
    wait_for("both wait", lambda: all("cannot join yet" in w.log() for w in (joined, waiting)))
    second = conductor()
    wait_for("three workers", lambda: workers_ready(second) == 3)
    answers = [c["token_ids"] for c in second.complete(**ASK, n=6)["choices"]]
    assert answers == [alone] * 6


def test_a_stopped_worker_that_joined_does_no_harm_when_it_continues(start, spawn, secret):
    address = f"127.0.0.1:{free_port()}"
    args = ("--workers", 1, "--worker-listen", address, "--join-token-file", secret[0], "--heartbeat-timeout", 2)
    cluster = start(*args, *QWEN3)
    worker = join(spawn, f"http://{address}", secret[0], 1)
    wait_for("two workers", lambda: workers_ready(cluster) == 2)
    alone = cluster.complete(**LONG)["choices"][0]["token_ids"]
    streams = Streams(cluster, "/v1/completions", [LONG] * 4, stopped=[worker.child.pid])
    streams.stop_in_the_middle([worker.child.pid], 4)
    wait_for("it is taken for dead", lambda: cluster.metrics().get("tutti_workers_fenced_total") == 1)
    worker.signal(signal.SIGCONT)
    assert [answer["choices"][0]["token_ids"] for answer in streams.results()] == [alone] * 4
    assert cluster.metrics()["tutti_request_replays_total"] >= 1
    # The conductor cannot kill this worker, so the worker joins again with a new identity.
    wait_for("two workers", lambda: workers_ready(cluster) == 2)
    cluster.wait_until_idle()


def test_a_wrong_secret_is_refused(open_cluster, spawn, secret):
    cluster, url = open_cluster
    worker = join(spawn, url, secret[1], 1)
    assert worker.wait() == 64, worker.explain("exit code")
    assert "join" in worker.log() and "barley" not in worker.log() + cluster.log()
    assert workers_ready(cluster) == 1


def test_a_rank_that_is_taken_is_refused(open_cluster, spawn, secret):
    cluster, url = open_cluster
    worker = join(spawn, url, secret[0], 0)
    assert worker.wait() == 64, worker.explain("exit code")
    assert "rank" in worker.log()
    assert workers_ready(cluster) == 1 and len(cluster.complete(**ASK)["choices"][0]["token_ids"]) == 8


def test_a_joined_rank_and_an_unknown_rank_are_refused_by_name(open_cluster, spawn, secret):
    cluster, url = open_cluster
    join(spawn, url, secret[0], 1)
    wait_for("two workers", lambda: workers_ready(cluster) == 2)
    # A worker whose rank is taken keeps trying for a while, because the other worker may be dead without the conductor
    # knowing it yet.
    second = join(spawn, url, secret[0], 1)
    wait_for("refused", lambda: "rank 1 is taken by the worker with pid" in second.log())
    beyond = join(spawn, url, secret[0], 1024)
    assert beyond.wait() == 64 and "rank: is 1024, the limit is 1023" in beyond.log(), beyond.log()
    assert workers_ready(cluster) == 2
