"""Workers that dial in over TCP, and workers that join by hand."""

import os
import signal

import pytest
from harness import GOLDENS, free_port, wait_for

QWEN3 = ("--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init")
ASK = dict(prompt=[5, 6, 7], max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)


@pytest.fixture
def secret(tmp_path):
    """A file with the secret, and one with another."""
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("open sesame\n")
    wrong.write_text("open barley\n")
    return right, wrong


@pytest.fixture
def gate(start, secret):
    """A cluster of one spawned worker, and where others may join it."""
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


def test_a_worker_joins_by_hand_and_may_leave(gate, spawn, secret):
    cluster, url = gate
    worker = join(spawn, url, secret[0], 1)
    wait_for("two workers", lambda: workers_ready(cluster) == 2)
    alone = cluster.complete(**ASK)["choices"][0]["token_ids"]
    answers = [cluster.complete(**ASK, n=4)["choices"] for _ in range(4)]
    assert all(choice["token_ids"] == alone for choices in answers for choice in choices)
    worker.signal(signal.SIGKILL)
    wait_for("one worker", lambda: workers_ready(cluster) == 1)
    assert cluster.complete(**ASK)["choices"][0]["token_ids"] == alone


def test_a_worker_that_joined_ends_with_its_conductor(gate, spawn, secret):
    cluster, url = gate
    worker = join(spawn, url, secret[0], 1)
    wait_for("two workers", lambda: workers_ready(cluster) == 2)
    os.kill(cluster.pid, signal.SIGKILL)
    cluster.wait()
    worker.wait()


def test_a_wrong_secret_is_refused(gate, spawn, secret):
    cluster, url = gate
    worker = join(spawn, url, secret[1], 1)
    assert worker.wait() == 64, worker.explain("exit code")
    assert "join" in worker.log() and "barley" not in worker.log() + cluster.log()
    assert workers_ready(cluster) == 1


def test_a_rank_that_is_taken_is_refused(gate, spawn, secret):
    cluster, url = gate
    worker = join(spawn, url, secret[0], 0)
    assert worker.wait() == 64, worker.explain("exit code")
    assert "rank" in worker.log()
    assert workers_ready(cluster) == 1 and len(cluster.complete(**ASK)["choices"][0]["token_ids"]) == 8
