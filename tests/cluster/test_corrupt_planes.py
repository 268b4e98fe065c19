"""Planes that change in shared memory, between the worker that prefills and the one that decodes."""

import concurrent.futures
import os
import signal
import time

from harness import wait_for
from planes import flip, identity_of, segments, written
from simulated import VOCAB, sampled
from topologies import DISAGGREGATED

# Bytes of a simulated page: a digest of each of its tokens.
PAGE = 16 * 8
PROMPT = 1600
# A prefill takes long enough to be met by the fault.
SIM = ("--device", "sim", "--max-prefill-chunk-size", 64)
SLOW = {"TUTTI_SIM__PREFILL_NS_PER_TOKEN": "500000"}


# Longest time for which the worker that decodes is stopped in one try: far below the time-outs of its connections.
STOPPED_S = 10


def write_begins(pid, known, answer):
    """Waits until the planes of a new hand-over to a worker have begun to be written: from then on the sender has what
    it needs of the receiver. Returns their segment, or None if the answer came first."""

    def new():
        if answer.done():
            return [None]
        return [segment for segment in segments(pid) if identity_of(segment) not in known and written(segment, 0, PAGE)]

    return wait_for("a page or an answer", new, every=0.001)[0]


def test_planes_that_change_in_shared_memory_are_sent_again(start, figure):
    # The worker that decodes is stopped for as long as this process needs, which must not look like a death.
    cluster = start("--topology", DISAGGREGATED, "--heartbeat-timeout", 60, "--transfer-timeout", 600, *SIM, env=SLOW)
    decodes = cluster.workers_by_rank()[1]
    last = (PROMPT // 16 - 1) * PAGE
    known = set()

    def ask(seed):
        prompt = [(seed * 7 + index) % VOCAB for index in range(PROMPT)]
        answer = cluster.complete(prompt=prompt, seed=seed, temperature=1, max_tokens=20, ignore_eos=True, return_token_ids=True)
        return answer["choices"][0]["token_ids"] == sampled(prompt, seed, 1, 20)

    def change(answer):
        """Changes a page that is written while the worker that decodes is stopped, so that it is read only afterwards.
        Does nothing if it comes too late for that."""
        segment = write_begins(decodes, known, answer)
        if segment is None:
            return
        known.add(identity_of(segment))
        os.kill(decodes, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + STOPPED_S
            while segments(decodes) and time.monotonic() < deadline:
                if written(segment, last, last + PAGE):
                    flip(segment, last + 9)
                    break
                time.sleep(0.01)
        finally:
            os.kill(decodes, signal.SIGCONT)

    for seed in range(1, 30):
        with concurrent.futures.ThreadPoolExecutor() as threads:
            answer = threads.submit(ask, seed)
            change(answer)
            assert answer.result(), f"wrong tokens after planes of seed {seed} had changed"
        # In another case the page was read before the worker was stopped, or was not written in time.
        if cluster.metrics()["tutti_request_replays_total"]:
            break
    else:
        raise AssertionError("no change was noticed")
    wait_for("a count", lambda: cluster.metrics().get("tutti_worker_transfer_corrupt", 0) == 1)
    wait_for("a line of the log", lambda: "from worker 0 are corrupt" in cluster.log())
    assert cluster.metrics()["tutti_request_replays_total"] == 1
    figure(f"a bit of {PROMPT // 16} pages flips in shared memory: noticed, and the request is prefilled again")
    cluster.wait_until_idle()
