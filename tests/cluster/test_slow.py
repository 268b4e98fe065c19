"""Tests that a worker far slower than its peers gets no requests until it is tried again."""

import re
import time

from harness import wait_for
from simulated import VOCAB, sampled
from streams import Streams

# A slow step takes 40 times as long as a peer's, and peers on a busy machine are within 8 times of each other.
STEP_US, TIMES = 25_000, 40
ARGS = ("--workers", 3, "--device", "sim", "--slow-worker-ratio", 8, "--slow-worker-steps", 8, "--slow-worker-pause", 3)
SLOW = 1
TOKENS = 400
# The longest time for a state that takes some seconds on an idle machine.
PATIENCE_S = 120


def body(seed, tokens):
    prompt = [(seed + index) % VOCAB for index in range(40)]
    return dict(prompt=prompt, seed=seed, temperature=1, max_tokens=tokens, ignore_eos=True, return_token_ids=True)


def expected(seed, tokens):
    return sampled(body(seed, tokens)["prompt"], seed, 1, tokens)


def of_slow(cluster, name):
    """Returns the value of a metric of the slow worker."""
    text = cluster.client.get("/metrics").text
    return float(re.search(rf'^tutti_{name}\{{worker="{SLOW}"\}} (\S+)', text, re.M)[1])


def detail(cluster):
    """Returns what /cluster/state says about the slow worker."""
    [conductor] = cluster.client.get("/cluster/state").json()["conductors"]
    return next(worker["detail"] for worker in conductor["workers"] if worker["worker"] == SLOW)


def test_a_slow_worker_is_set_aside_named_and_tried_again(start, tmp_path, figure):
    slow_file = tmp_path / "slow"
    cluster = start(*ARGS, env={"TUTTI_SIM__FIXED_US": str(STEP_US), "TUTTI_SIM__SLOW_FILE": str(slow_file)})
    streams = Streams(cluster, "/v1/completions", [body(seed, TOKENS) for seed in range(12)])
    streams.wait_for_tokens(8)
    slow_file.write_text(f"{SLOW} {TIMES}\n")
    began = time.monotonic()
    is_aside = lambda: of_slow(cluster, "worker_slow") == 1
    wait_for("a slow worker", is_aside, PATIENCE_S)
    noticed = time.monotonic() - began
    wait_for("a line of the log", lambda: "the worker gets no new requests" in cluster.log())

    def served_by_others():
        """True if requests were answered while the worker was set aside, and it prefilled none of them."""
        before = (of_slow(cluster, "workers_slowed_total"), of_slow(cluster, "worker_prefill_tokens"))
        said = detail(cluster)
        for seed in range(4):
            assert cluster.complete(**body(seed, 2))["choices"][0]["token_ids"] == expected(seed, 2)
        after = (of_slow(cluster, "workers_slowed_total"), of_slow(cluster, "worker_prefill_tokens"))
        # On a slow machine the worker is tried again meanwhile; each time that it is slow again, the pause doubles.
        if not is_aside() or after[0] != before[0]:
            return False
        assert "slow: its steps take" in said
        assert after[1] == before[1], "a slow worker got a request"
        return True

    wait_for("requests that others serve", served_by_others, PATIENCE_S)
    slow_file.unlink()
    answers = streams.results()
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [expected(seed, TOKENS) for seed in range(12)]
    wait_for("another try", lambda: not is_aside(), PATIENCE_S)
    wait_for("the usual standing", lambda: detail(cluster) == "", PATIENCE_S)
    assert cluster.metrics()["tutti_worker_restarts_total"] == 0
    figure(f"a worker {TIMES} times slower than its peers is set aside after {noticed:.1f} s")
    cluster.wait_until_idle()
