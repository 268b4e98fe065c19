"""A model divided among the ranks of a TP group. Tests that answers do not change, and that all ranks of a group end
when one rank ends."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest
from golden import BOUND, LENGTHS, MODELS, answers, greatest_deviation
from harness import GOLDENS, START_S, free_port, run_to_exit, wait_for
from safetensors.numpy import load_file
from streams import Streams

QWEN3 = ("--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init")
ASK = dict(prompt=[5, 6, 7], max_tokens=24, temperature=1, seed=11, ignore_eos=True, return_token_ids=True)
# A stream that is so long that it still runs when the other streams have begun.
LONG = dict(prompt=[1, 2, 3], max_tokens=2500, ignore_eos=True, temperature=1, return_token_ids=True)


def steps(cluster):
    """Returns {rank: number of steps so far}, from /metrics."""
    text = cluster.client.get("/metrics").text
    return {int(rank): int(count) for rank, count in re.findall(r'^tutti_worker_steps\{worker="(\d+)"\} (\d+)', text, re.M)}


def tokens(cluster, **changes):
    return cluster.complete(**ASK | changes)["choices"][0]["token_ids"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", (2, 4))
def test_groups_match_the_reference_with_bit_identical_answers(start, figure, tp, model):
    directory = GOLDENS / "seed0" / model
    golden = load_file(directory / "goldens.safetensors")
    first = None
    # A second cluster with another step budget must give the same digits.
    for budget in (64, 16):
        cluster = start(
            "--workers", 4, "--tp", tp, "--model", directory, "--skip-tokenizer-init", "--max-step-tokens", budget
        )
        assert len(cluster.workers()) == 4 and cluster.metrics()["tutti_workers_ready"] == 4
        got = answers(cluster, golden)
        assert set(got) == set(LENGTHS)
        worst = greatest_deviation(golden, got)
        assert worst <= BOUND, f"tp {tp}: {worst}"
        first = first or got
        assert got == first, f"a budget of {budget} changes bits"
        cluster.wait_until_idle()
        cluster.stop()
    figure(f"{model} tp {tp}: greatest |logprob - reference| {worst:.1e}, bound {BOUND:.0e}")


def test_a_seed_means_the_same_tokens_for_any_number_of_ranks(start):
    sampled = []
    for workers, tp in ((1, 1), (2, 2), (4, 4)):
        cluster = start("--workers", workers, "--tp", tp, *QWEN3)
        # For penalties and truncation, the leader needs the logits of the whole vocabulary.
        sampled.append(
            [tokens(cluster), tokens(cluster, seed=12, top_p=0.9, repetition_penalty=1.2), tokens(cluster, top_k=5)]
        )
        cluster.stop()
    assert sampled[0] == sampled[1] == sampled[2]


def endings(cluster, victim, number):
    """Runs streams on all groups, and sends a signal to the process `victim` while they run. Returns how each stream
    ends, and the time of the signal."""
    bodies = [LONG | dict(seed=seed) for seed in range(4)]
    streams = Streams(cluster, "/v1/completions", bodies, stopped=[victim])
    streams.stop_in_the_middle([victim], len(bodies))
    began = time.monotonic()
    os.kill(victim, number)
    return [answer["choices"][0]["ends"] for answer in streams.results()], began


def group_is_replaced(cluster, before, ranks):
    """Waits until these ranks have new processes, and all four workers have loaded."""

    def replaced():
        now = cluster.workers_by_rank()
        return sorted(now) == sorted(before) and all((now[rank] != before[rank]) == (rank in ranks) for rank in now)

    wait_for(f"new processes for ranks {ranks}", replaced)
    wait_for("four workers ready", lambda: cluster.metrics().get("tutti_workers_ready") == 4)


@pytest.mark.parametrize("victim", (2, 3), ids=("leader", "follower"))
def test_a_killed_rank_ends_its_group_which_restarts_while_the_other_continues(start, figure, victim):
    cluster = start("--workers", 4, "--tp", 2, *QWEN3)
    expected, before = tokens(cluster), cluster.workers_by_rank()
    ends, began = endings(cluster, before[victim], signal.SIGKILL)
    assert ends == [[("length", None)]] * 4, "the group's requests go on at the other one"
    group_is_replaced(cluster, before, (2, 3))
    figure(f"tp 2, rank {victim} killed: its group was back after {time.monotonic() - began:.1f} s at most")
    assert [tokens(cluster) for _ in range(4)] == [expected] * 4, "both groups answer as before"
    cluster.wait_until_idle()


def test_a_stopped_rank_trips_the_watchdog_and_its_group_is_replaced(start, figure):
    cluster = start("--workers", 4, "--tp", 2, "--collective-timeout", 1, *QWEN3)
    expected, before = tokens(cluster), cluster.workers_by_rank()
    ends, began = endings(cluster, before[1], signal.SIGSTOP)
    assert ends == [[("length", None)]] * 4, "the group's requests go on at the other one"
    assert cluster.says("rank 1 of 2 did not come to a collective")
    group_is_replaced(cluster, before, (0, 1))
    figure(f"tp 2, a rank stopped, a watchdog of 1 s: its group was back after {time.monotonic() - began:.1f} s at most")
    assert before[1] not in cluster.processes(), "the stopped process is gone"
    assert [tokens(cluster) for _ in range(4)] == [expected] * 4
    cluster.wait_until_idle()


def test_ranks_that_join_by_hand_meet_over_tcp_and_give_the_same_bits(start, spawn, tmp_path):
    secret, address = tmp_path / "secret", f"127.0.0.1:{free_port()}"
    secret.write_text("open sesame\n")
    cluster = start("--workers", 2, "--tp", 2, "--worker-listen", address, "--join-token-file", secret, *QWEN3)
    ask = dict(prompt=list(range(1, 200)), max_tokens=16, temperature=0, logprobs=3, prompt_logprobs=1, return_token_ids=True)
    in_memory = cluster.complete(**ask)["choices"]
    hand = [
        spawn("worker", "--conductor", f"http://{address}", "--rank", rank, "--join-token-file", secret)
        for rank in (3, 2)
    ]
    wait_for("two groups", lambda: cluster.metrics().get("tutti_workers_ready") == 4)
    assert all(worker.says("transport=\"tcp\"") for worker in hand)
    # Idle groups take requests in turn.
    assert [cluster.complete(**ask)["choices"] for _ in range(4)] == [in_memory] * 4
    wait_for("steps of both groups", lambda: all(steps(cluster).get(rank, 0) > 0 for rank in range(4)))
    os.kill(hand[0].pid, signal.SIGKILL)
    hand[1].wait()
    wait_for("one group", lambda: cluster.metrics().get("tutti_workers_ready") == 2)
    assert cluster.complete(**ask)["choices"] == in_memory


def test_ranks_that_do_not_divide_the_model_are_refused_by_name(tmp_path):
    for arguments, words in [
        (("--workers", 3, "--tp", 3), "num_attention_heads: 4 is not a multiple of tp, which is 3"),
        (("--workers", 3, "--tp", 2), "tp: is 2, which does not divide the 3 workers"),
    ]:
        code, log = run_to_exit("conductor", [*arguments, *QWEN3, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"], tmp_path)
        assert code == 64 and words in log, log


def rendezvous_directory(cluster):
    """Returns the conductor's directory in shared memory. Other conductors may have directories there, so the directory
    is identified by the file in it that this conductor keeps open."""
    opened = []
    for file in pathlib.Path(f"/proc/{cluster.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed while we looked
            opened.append(os.readlink(file))
    (owner,) = [path for path in opened if path.startswith("/dev/shm/tutti-conductor-")]
    return pathlib.Path(owner).parent


def test_nothing_of_a_group_stays_in_shared_memory(start):
    cluster = start("--workers", 2, "--tp", 2, *QWEN3)
    directory = rendezvous_directory(cluster)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in directory.iterdir()] == ["owner"], "ranks that have met need no name"
    cluster.stop()
    assert not directory.exists()


def test_the_next_conductor_removes_the_shared_memory_of_a_killed_one(start):
    killed = start("--workers", 2, "--tp", 2, *QWEN3)
    directory = rendezvous_directory(killed)
    killed.signal(signal.SIGKILL)
    killed.wait()
    start("--workers", 2, "--tp", 2, *QWEN3)
    assert not directory.exists()


def test_groups_of_simulated_workers_keep_in_step(start):
    cluster = start("--workers", 4, "--tp", 4, "--device", "sim", *QWEN3)
    alone = start("--workers", 1, "--device", "sim", *QWEN3)
    assert tokens(cluster) == tokens(alone)
    cluster.wait_until_idle()


# A command that runs another one with almost no space in /dev/shm.
SMALL_SHM = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$0" "$@"')


@pytest.mark.skipif(subprocess.run([*SMALL_SHM, "true"], capture_output=True).returncode, reason="no mounts here")
def test_shared_memory_without_room_is_an_error_and_no_signal(spawn):
    # If the memory were not allocated at the start, the first write to a page would end the process with SIGBUS (signal
    # 7).
    conductor = spawn("conductor", "--workers", 2, "--tp", 2, *QWEN3, "--http=127.0.0.1:0", "--grpc=127.0.0.1:0", under=SMALL_SHM)
    wait_for("the reason", lambda: "No space left on device" in conductor.log(), START_S)
    assert "signal: 7" not in conductor.log(), conductor.log()
