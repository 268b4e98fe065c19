"""A cluster of simulated devices. The processes and streams are real, the tokens are predictable, and the steps are
traced."""

import asyncio
import json
import pathlib
import random
import re
import struct
import subprocess
import time

from harness import ANSWER_S, REPO, wait_for
from simulated import asked, sampled, stream

STREAMS = 240
STREAMS_AT_ONCE = 2000
# Time until the router has checked the readers of answers. The default time between two checks is an eighth of
# `reader_timeout_ms`.
INSPECTION_S = 30 / 8 + 0.25


def all_at_once(cluster, bodies):
    async def main():
        streams = (stream(cluster.http_port, cluster.model, body) for body in bodies)
        return await asyncio.wait_for(asyncio.gather(*streams), ANSWER_S)

    return asyncio.run(main())


class LiveHeap:
    """Measures the memory that the processes of a cluster have allocated and not freed."""

    def __init__(self, directory):
        library = directory / "live_heap.so"
        source = REPO / "tests/cluster/lib/live_heap.c"
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
        self.directory = directory
        self.env = {"LD_PRELOAD": str(library), "LIVE_HEAP": str(directory)}

    def read(self, pids):
        """Returns {pid: (bytes, blocks)}."""
        return {pid: struct.unpack("ll", (self.directory / str(pid)).read_bytes()) for pid in pids}

    def least(self, pids):
        """Returns the minimum of `read` for each process over the time of one check of readers. The check frees memory
        that ended answers still hold."""
        end = time.monotonic() + INSPECTION_S
        least = self.read(pids)
        while time.monotonic() < end:
            time.sleep(0.05)
            least = {pid: min(seen, least[pid], key=lambda counts: counts[1]) for pid, seen in self.read(pids).items()}
        return least

    def trim(self, pids):
        """Makes each process return its allocator's free memory to the system."""
        for pid in pids:
            (self.directory / f"{pid}.trim").write_bytes(b"t")
            with open(self.directory / f"{pid}.trimmed", "rb", buffering=0) as pipe:
                assert pipe.read(1) == b"t"


def resident_kb(pids):
    """Returns {pid: resident memory in kB}."""
    status = {pid: pathlib.Path(f"/proc/{pid}/status").read_text() for pid in pids}
    return {pid: int(re.search(r"VmRSS:\s+(\d+) kB", text)[1]) for pid, text in status.items()}


def cached_pages(cluster):
    """Returns {pid: cached KV pages} of the workers."""
    text = cluster.client.get("/metrics").text
    pages = {int(rank): int(count) for rank, count in re.findall(r'^tutti_kv_pages_cached{worker="(\d+)"} (\d+)', text, re.M)}
    return {pid: pages[rank] for rank, pid in cluster.workers_by_rank().items()}


def trace(path, rank):
    """Returns the steps in a rank's trace file. Checks that they are all steps of one process, in order."""
    header, *steps = map(json.loads, path.with_name(f"{path.name}.rank{rank}").read_text().splitlines())
    assert header["worker"] == rank and [step["step"] for step in steps] == list(range(len(steps)))
    return steps


def test_every_stream_of_eight_workers_ends_once_with_the_right_tokens(start, tmp_path):
    file = tmp_path / "steps"
    cluster = start("--workers", 8, "--device", "sim", "--trace-steps", file)
    rng = random.Random(3)
    bodies, expected = zip(*(asked(rng) for _ in range(STREAMS)))
    wrong = [row for row in zip(bodies, all_at_once(cluster, bodies), expected) if row[1] != row[2]]
    assert not wrong, wrong[0]
    cluster.wait_until_idle()
    seen = cluster.metrics()
    assert seen["tutti_requests_total"] == STREAMS
    assert seen["tutti_trace_steps_lost"] == 0 and seen["tutti_queue_age_seconds"] == 0

    # Each position of each request must have been computed once, in order, and the metrics must agree with the trace.
    steps = [step for rank in range(8) for step in trace(file, rank)]
    computed, rows = {}, 0
    for step in steps:
        assert step["tokens"] <= step["budget_tokens"] and step["plan_us"] + step["run_us"] > 4_000
        for row in step["rows"]:
            rows += 1
            begin, end = row["range"]
            assert computed.get(row["request"], 0) == begin < end
            computed[row["request"]] = end
    # The last sampled token of a request is not computed.
    assert sorted(computed.values()) == sorted(len(b["prompt"]) + len(w[0]) - 1 for b, w in zip(bodies, expected))
    assert seen["tutti_step_rows_total"] == rows and seen["tutti_step_seconds_count"] == len(steps)
    assert seen["tutti_step_budget_fill_count"] == len(steps)
    assert seen["tutti_worker_prefill_tokens"] == sum(len(body["prompt"]) for body in bodies)


def test_two_thousand_streams_at_once_leave_memory_as_it_was(start, figure, tmp_path):
    heap = LiveHeap(tmp_path)
    # The prefix cache has 1,024 pages of 128 bytes, and the first wave fills it.
    pool = ["--kv-cache-memory", 1025 * 128]
    cluster = start("--config", REPO / "tests/bench/many-streams.toml", *pool, env=heap.env)
    rng, resident, live, cached = random.Random(4), [], [], []
    for _ in range(4):
        bodies, expected = zip(*(asked(rng) for _ in range(STREAMS_AT_ONCE)))
        begin = time.monotonic()
        wrong = [row for row in zip(bodies, all_at_once(cluster, bodies), expected) if row[1] != row[2]]
        assert not wrong, wrong[0]
        figure(f"{STREAMS_AT_ONCE} streams over 8 simulated workers: {time.monotonic() - begin:.1f} s")
        cluster.wait_until_idle()
        pids = cluster.processes()
        heap.trim(pids)
        resident.append(resident_kb(pids))
        # `least` takes time, so it is only used for the readings that are compared.
        live.append(heap.least(pids) if len(live) % 2 else heap.read(pids))
        cached.append(cached_pages(cluster) | {cluster.pid: 0})
    seen = cluster.metrics()
    assert seen["tutti_requests_total"] == 4 * STREAMS_AT_ONCE
    assert seen["tutti_kv_pages_cached"] > 0.85 * seen["tutti_kv_pages_total"]
    for what, values in (("resident, kB", resident), ("allocated, (bytes, blocks)", live)):
        figure(f"conductor after each wave: {what}: {[value[cluster.pid] for value in values]}")
    # The first waves fill pools and caches. Between the second and the fourth wave, no memory may leak. Each request
    # takes some hundred blocks, and a leak is at least one of them. Pools grow until about the sixth wave, by up to
    # half a block per request (30,400 blocks after the second wave, 32,700 after the sixth and the tenth). How many
    # pages stay cached after a wave depends on the requests that end last, and each page takes a block or two.
    requests = 2 * STREAMS_AT_ONCE
    for pid in pids:
        (bytes_before, blocks_before), (bytes_after, blocks_after) = live[1][pid], live[3][pid]
        share = requests if pid == cluster.pid else requests / 8
        growth = max(cached[3][pid] - cached[1][pid], 0)
        seen = pids[pid], live[1][pid], live[3][pid], growth
        assert blocks_after - blocks_before < 3 * share / 4 + 2 * growth, seen
        assert bytes_after - bytes_before < share * 256 + 256 * growth, seen
        # Other resident memory is free memory between live blocks, which the next wave uses again.
        assert resident[3][pid] < resident[1][pid] * 1.15, (pids[pid], resident[1][pid], resident[3][pid])


def test_a_lost_device_ends_its_worker_and_the_next_one_continues(start, tmp_path):
    file = tmp_path / "steps"
    faults = {"TUTTI_SIM__LOSE_AFTER": "20", "TUTTI_SIM__PROFILE": "instant"}
    cluster = start("--workers", 1, "--device", "sim", "--trace-steps", file, env=faults)
    body = {"prompt": [1, 2], "max_tokens": 10, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    right = sampled([1, 2], 0, 0, 10)
    assert cluster.complete(**body)["choices"][0]["token_ids"] == right
    # The request needs more steps than one device runs before it is lost.
    assert cluster.complete(**body | {"max_tokens": 30})["choices"][0]["token_ids"] == sampled([1, 2], 0, 0, 30)

    def traced():
        # The last line may be incomplete.
        return [json.loads(line) for line in (tmp_path / "steps.rank0").read_text().split("\n")[:-1]]

    # The file has the steps of both processes, each with a header. A step's line is written after its tokens were sent.
    wait_for("steps of both incarnations", lambda: {row["incarnation"] for line in traced() for row in line.get("rows", ())} == {0, 1})
    assert sum("pid" in line for line in traced()) == 2


def test_a_step_trace_that_cannot_be_written_does_no_other_harm(start, tmp_path):
    file = tmp_path / "steps"
    (tmp_path / "steps.rank0").symlink_to("/dev/full")
    cluster = start("--workers", 1, "--device", "sim", "--trace-steps", file)
    body = {"prompt": [1, 2], "max_tokens": 10, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    assert cluster.complete(**body)["choices"][0]["token_ids"] == sampled([1, 2], 0, 0, 10)
    wait_for("lost steps in the metrics", lambda: cluster.metrics()["tutti_trace_steps_lost"] > 0)
    assert cluster.log().count("the step trace ends here") == 1
