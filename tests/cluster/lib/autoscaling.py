"""Autoscaling of conductors under a load that rises and falls. This file emulates Kubernetes' HorizontalPodAutoscaler.

The autoscaler reads the chart's metrics from the conductors, compares their means with the chart's targets, and starts
and ends conductors. For each metric it wants `ceil(ready * mean / target)` conductors, and takes the largest number. It
ignores deviations of a tenth, and ends one pod at a time, after a stable period
(https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/). A new conductor becomes ready only after
the time that loading a model takes. `tutti-bench` sends requests at a constant rate per phase, independent of the
answers. All times are the chart's, shortened by the same factor.
"""

import argparse
import asyncio
import json
import math
import pathlib
import re
import statistics
import sys
import tempfile
import time

import httpx
from harness import BINARIES, CLUSTER_TOKEN, free_port, machine
from pods import Pod

# A conductor has one worker with eight rows and steps of 20 ms: 400 tokens or eight requests per second.
ROWS, STEP_US, TOKENS = 8, 20_000, 50
CAPACITY = ROWS * 1e6 / STEP_US / TOKENS
# (load relative to one conductor's capacity, seconds)
PHASES = ((0.6, 40), (2.5, 120), (0.6, 120))
# Targets of the autoscaler: the chart's `targetWaiting` alone, or also `targetRunning`, which is three quarters of the
# rows.
WAITING, RUNNING = {"tutti_conductor_requests_waiting": 8}, {"tutti_conductor_requests_running": 0.75 * ROWS}
TARGETS = {"waiting": WAITING, "waiting and running": WAITING | RUNNING}
TOLERANCE = 0.1
DRAIN = 30


class Conductors:
    """A StatefulSet with pods 0 to n. It starts and ends pods at the end of this list."""

    def __init__(self, directory, options):
        self.directory, self.options, self.pods = directory, options, {}
        self.token, self.settings = directory / "cluster-token", directory / "sim.toml"
        self.token.write_text(CLUSTER_TOKEN)
        self.settings.write_text(f"max_running_requests = {ROWS}\n[sim]\nfixed_us = {STEP_US}\n")
        self.ports = [free_port() for _ in range(options.most)]
        self.loading, self.ending = {}, []

    async def start(self, index):
        await asyncio.sleep(self.options.load_seconds if self.pods else 0)
        flags = ["--config", self.settings, "--device", "sim", "--no-router", "--cluster-grpc", f"127.0.0.1:{self.ports[index]}",
                 "--cluster-token-file", self.token, "--drain-timeout", DRAIN, "--lame-duck", 2]
        pod = Pod("conductor", flags, self.directory, None, DRAIN + 10)
        try:
            self.pods[index] = await pod.ready()
        except BaseException:
            pod.process.destroy()
            raise

    def scale(self, desired):
        have = len(self.pods) + len(self.loading)
        for index in range(have, desired):
            self.loading[index] = asyncio.create_task(self.start(index))
        if desired < have and not self.loading:
            self.ending.append(asyncio.create_task(self.pods.pop(have - 1).end()))

    async def settle(self):
        """Moves pods that have become ready out of `loading`. Returns the numbers of ready and of loading pods."""
        for index, task in list(self.loading.items()):
            if task.done():
                await self.loading.pop(index)
        return len(self.pods), len(self.loading)

    async def means(self, client, names):
        """Returns the mean of each metric over the ready pods."""
        pods = list(self.pods.values())  # Others may become ready meanwhile.
        texts = [(await client.get(f"http://{pod.address}:{pod.http}/metrics")).text for pod in pods]
        found = {name: [float(re.search(rf"^{name}(?:\{{.*\}})? (\S+)", text, re.M)[1]) for text in texts] for name in names}
        return {name: statistics.mean(values) for name, values in found.items()}


def desired_by(ready, mean, target):
    """Returns the number of conductors that one metric asks for."""
    return ready if abs(mean / target - 1) <= TOLERANCE else math.ceil(ready * mean / target)


async def autoscale(conductors, targets, options, say):
    """Scales until it is cancelled. Records each change of the number of conductors in `conductors.course`."""
    wanted, known, began, last_down = [], None, time.monotonic(), -math.inf
    async with httpx.AsyncClient(timeout=5) as client:
        while True:
            ready, loading = await conductors.settle()
            means, now = await conductors.means(client, targets), time.monotonic()
            desired = max(desired_by(ready, means[name], target) for name, target in targets.items())
            desired = min(max(desired, 1), options.most)
            wanted = [(at, n) for at, n in wanted if now - at < options.calm_seconds] + [(now, desired)]
            current = ready + loading
            if desired > current:
                conductors.scale(min(desired, max(2 * current, current + 4)))
            elif max(n for _, n in wanted) < current and now - last_down >= options.calm_seconds / 4:
                conductors.scale(current - 1)
                last_down = now
            short = {name.rpartition("_")[2]: round(mean, 1) for name, mean in means.items()}
            seen = {"s": round(now - began, 1), "ready": ready, "loading": loading, **short, "desired": desired}
            counts = ready, loading, desired
            if counts != known:
                say(json.dumps(seen))
                conductors.course.append(seen)
                known = counts
            await asyncio.sleep(options.sync_seconds)


async def phase(url, load, seconds, directory, number):
    """Runs one phase of the load, and returns its figures."""
    report = directory / f"phase-{number}.json"
    words = ["--url", url, "--rate", load * CAPACITY, "--arrivals", "constant", "--requests", round(load * CAPACITY * seconds),
             "--input-tokens", 20, "--output-tokens", TOKENS, "--seed", number, "--json", report]
    process = await asyncio.create_subprocess_exec(
        BINARIES / "tutti-bench", *map(str, words), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert report.exists(), said.decode()
    found = json.loads(report.read_text())
    ttft = found["latency"]["ttft_ms"]
    return {
        "load": load,
        "requests": found["requests"]["sent"],
        "failed": found["requests"]["failed"],
        "ttft_ms_p50": round(ttft["p50"]),
        "ttft_ms_p99": round(ttft["p99"]),
    }


async def play(name, options, say):
    """Runs all phases with one set of metrics."""
    with tempfile.TemporaryDirectory() as directory:
        directory = pathlib.Path(directory)
        conductors = Conductors(directory, options)
        conductors.course = []
        reach = [flag for port in conductors.ports for flag in ("--conductor", f"http://127.0.0.1:{port}")]
        router, scaling = None, None
        try:
            conductors.scale(1)
            await asyncio.gather(*conductors.loading.values())
            router = await Pod("router", [*reach, "--cluster-token-file", conductors.token], directory, None, 60).ready()
            scaling = asyncio.create_task(autoscale(conductors, TARGETS[name], options, say))
            phases = []
            for number, (load, seconds) in enumerate(PHASES):
                phases.append(await phase(f"http://{router.address}:{router.http}", load, seconds, directory, number))
                say(json.dumps(phases[-1]))
                assert not scaling.done(), scaling.result()
            killed = [killed for _, killed in await asyncio.gather(*conductors.ending)]
        finally:
            if scaling:
                scaling.cancel()
            for task in conductors.loading.values():
                task.cancel()
            await asyncio.gather(*conductors.loading.values(), *filter(None, [scaling]), return_exceptions=True)
            for pod in (*conductors.pods.values(), *filter(None, [router])):
                pod.process.destroy()
    counts = [seen["ready"] + seen["loading"] for seen in conductors.course]
    return {
        "phases": phases,
        "started": sum(max(after - before, 0) for before, after in zip(counts, counts[1:])),
        "ended": len(killed),
        "killed": sum(killed),
        "most": max(counts),
        "course": conductors.course,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metric", action="append", choices=TARGETS, help="metrics to scale by; both in turn unless given")
    parser.add_argument("--most", type=int, default=4, help="conductors at most")
    parser.add_argument("--sync-seconds", type=float, default=2, help="interval of the autoscaler; Kubernetes' default is 15")
    parser.add_argument("--load-seconds", type=float, default=8, help="time that a conductor takes to load its model")
    parser.add_argument("--calm-seconds", type=float, default=30, help="time of calm before a conductor goes; the chart's is 900")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    options = parser.parse_args()
    figures = {"machine": machine(), "capacity_requests_per_s": CAPACITY, "sync_s": options.sync_seconds,
               "load_s": options.load_seconds, "calm_s": options.calm_seconds}
    figures["by"] = {name: asyncio.run(play(name, options, print)) for name in options.metric or TARGETS}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if any(phase["failed"] for by in figures["by"].values() for phase in by["phases"]) else 0


if __name__ == "__main__":
    sys.exit(main())
