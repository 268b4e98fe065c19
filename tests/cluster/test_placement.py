"""Requests go to the worker that has their prefix, unless its load costs more than the prefix saves."""

import os
import signal

import pytest
from harness import GOLDENS, wait_for
from topologies import TOPOLOGIES

SIM = ("--device", "sim")
QWEN3 = ("--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init")
PREFIX = 640


def ask(kind, last=0, **more):
    """Returns a request whose prompt shares its first 40 pages with all prompts of the same kind."""
    return dict(prompt=[kind] * PREFIX + [last + 1] * 8, max_tokens=3, temperature=0, ignore_eos=True) | more


def cached(cluster, kind, last=0, **more):
    """Sends the request of `ask`, and returns the number of its cached prompt tokens."""
    usage = cluster.complete(**ask(kind, last, **more))["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("model", (QWEN3, SIM), ids=("qwen3", "sim"))
def test_repeated_prefixes_go_to_the_worker_that_has_them(start, model):
    cluster = start("--workers", 2, *model)
    for kind in range(3):
        # The requests come one after another. By load alone, the workers would take turns.
        assert [cached(cluster, kind, last) for last in range(5)] == [0] + [PREFIX] * 4
    seen = cluster.metrics()
    assert seen["tutti_placed_blocks_total"] == 15 * 40 and seen["tutti_placed_hit_blocks_total"] == 12 * 40
    assert seen["tutti_prefix_index_entries"] == 3 * 36 and seen["tutti_prefix_index_bytes"] > 3 * PREFIX * 4


def test_load_overrides_a_prefix(start):
    cluster = start("--workers", 2, *SIM)
    assert cached(cluster, 1) == 0
    busy = cluster.stream("/v1/completions", **ask(1, 1, max_tokens=3000, return_token_ids=True))
    next(busy)
    # The first worker's decoding requests have more pages than the prefix, so the second worker gets the request.
    # Afterwards, the second worker has the prefix as well.
    assert [cached(cluster, 1, last) for last in (2, 3)] == [0, PREFIX]
    busy.close()
    cluster.wait_until_idle()


def test_many_at_once_with_one_prefix_use_both_workers(start):
    cluster = start("--workers", 2, *SIM)
    assert cached(cluster, 1) == 0
    streams = [cluster.stream("/v1/completions", **ask(1, last, max_tokens=3000)) for last in range(1, 7)]
    for stream in streams:
        next(stream)
    text = cluster.client.get("/metrics").text
    running = [line.split()[-1] for line in text.splitlines() if line.startswith("tutti_requests_running{")]
    assert running == ["3", "3"]
    for stream in streams:
        stream.close()
    cluster.wait_until_idle()


def test_the_prefixes_of_a_killed_worker_are_forgotten(start):
    cluster = start("--workers", 2, *SIM)
    assert [cached(cluster, 1, last) for last in range(2)] == [0, PREFIX]
    [holder] = [rank for rank, pid in cluster.workers_by_rank().items() if has_steps(cluster, rank)]
    pid = cluster.workers_by_rank()[holder]
    os.kill(pid, signal.SIGKILL)
    wait_for("a replacement", lambda: cluster.workers_by_rank().get(holder, pid) != pid)
    wait_for("ready", lambda: cluster.metrics()["tutti_workers_ready"] == 2)
    hits = cluster.metrics()["tutti_placed_hit_blocks_total"]
    assert [cached(cluster, 1, last) for last in range(3)] == [0, PREFIX, PREFIX]
    assert cluster.metrics()["tutti_placed_hit_blocks_total"] - hits == 2 * 40, "the first request counted as a hit"


def has_steps(cluster, rank):
    return f'tutti_worker_prefill_tokens{{worker="{rank}"}} 0' not in cluster.client.get("/metrics").text


def test_without_a_prefix_cache_nothing_is_remembered(start):
    cluster = start("--workers", 2, "--no-prefix-cache", *SIM)
    assert [cached(cluster, 1) for _ in range(3)] == [0, 0, 0]
    assert cluster.metrics()["tutti_placed_blocks_total"] == 0 == cluster.metrics()["tutti_prefix_index_entries"]
    assert all(has_steps(cluster, rank) for rank in (0, 1)), "the workers did not take turns"


def test_disaggregated_prefills_go_to_the_worker_that_has_their_prefix(start):
    cluster = start("--topology", TOPOLOGIES / "two-prefill.toml", *SIM)
    for kind in range(3):
        assert [cached(cluster, kind, last) for last in range(5)] == [0] + [PREFIX] * 4
