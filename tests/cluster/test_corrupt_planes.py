"""Planes that change in shared memory, between the worker that prefills and the one that decodes."""

import concurrent.futures
import os
import signal

from harness import wait_for
from planes import flip, segments, written
from simulated import VOCAB, sampled
from topologies import DISAGGREGATED

# Bytes of a simulated page: a digest of each of its tokens.
PAGE = 16 * 8
PROMPT = 1600
# A prefill takes long enough to be met by the fault.
SIM = ("--device", "sim", "--max-prefill-chunk-size", 64)
SLOW = {"TUTTI_SIM__PREFILL_NS_PER_TOKEN": "500000"}


def test_planes_that_change_in_shared_memory_are_sent_again(start, figure):
    # The worker that decodes is stopped for as long as this process needs, which must not look like a death.
    cluster = start("--topology", DISAGGREGATED, "--heartbeat-timeout", 60, "--transfer-timeout", 600, *SIM, env=SLOW)
    decodes = cluster.workers_by_rank()[1]
    last = (PROMPT // 16 - 1) * PAGE

    def ask(seed):
        prompt = [(seed * 7 + index) % VOCAB for index in range(PROMPT)]
        answer = cluster.complete(prompt=prompt, seed=seed, temperature=1, max_tokens=20, ignore_eos=True, return_token_ids=True)
        return answer["choices"][0]["token_ids"] == sampled(prompt, seed, 1, 20)

    for seed in range(1, 30):
        with concurrent.futures.ThreadPoolExecutor() as threads:
            answer = threads.submit(ask, seed)
            [segment] = wait_for("a segment", lambda: segments(decodes), every=0.001)
            # Planes that are written from here on are read only after the fault.
            os.kill(decodes, signal.SIGSTOP)
            try:
                wait_for("the last page", lambda: written(segment, last, last + PAGE) or not segments(decodes))
                flip(segment, last + 9)
            finally:
                os.kill(decodes, signal.SIGCONT)
            assert answer.result(), f"wrong tokens after planes of seed {seed} had changed"
        # The worker may have read the page before it was stopped.
        if "from worker 0 are corrupt" in cluster.log():
            break
    else:
        raise AssertionError("no change was noticed")
    wait_for("a count", lambda: cluster.metrics().get("tutti_worker_transfer_corrupt", 0) == 1)
    assert cluster.metrics()["tutti_request_replays_total"] == 1
    figure(f"a bit of {PROMPT // 16} pages flips in shared memory: noticed, and the request is prefilled again")
    cluster.wait_until_idle()
