"""Chaos: clusters under mixed load and random faults.

There are clusters with simulated devices, CPU workers, TP groups, disaggregated prefill and decode, and separate hosts
with mutual TLS between them. Each answer is compared with the answer without faults. All random choices come from one
seed. The log has a JSON line for each fault and for each failed request; --replay injects the faults of a log again, at
the same times. A JSON summary is written next to the log.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import pathlib
import random
import signal
import sys
import tempfile
import time

from chaos_faults import LOCAL_KINDS, Disk, Faults, again
from chaos_keys import KEPT, REVOKED, Keys
from chaos_load import Client, bodies
from chaos_log import Log
from harness import GOLDENS, REPO, Server
from hosts import EncryptedCluster, possible
from log_reader import LogReader
from outliving import OutlivingCluster

# Faults are so frequent here that a request may need more than the default number of replays.
ALL = ("--max-replays", 50, "--heartbeat-timeout", 2, "--slow-worker-steps", 32, "--slow-worker-pause", 3)
QWEN3 = ("--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init", "--threads", 1)
TOPOLOGIES = REPO / "deploy/topology"
# Number of different requests to clusters with a real model. Each request is run once without faults, to get the
# expected answer.
KNOWN = 24


@dataclasses.dataclass(frozen=True)
class Shape:
    """A kind of cluster, and the number of its concurrent clients."""

    workers: int
    args: tuple
    clients: int
    computes: bool = True
    # True if all processes are on separate hosts, with mutual TLS between them.
    encrypted: bool = False
    # True if workers outlive their conductor, which is killed, too.
    outliving: bool = False


SHAPES = {
    "sim": Shape(4, ("--workers", 4, "--device", "sim"), clients=12, computes=False),
    "cpu": Shape(2, ("--workers", 2, *QWEN3), clients=5),
    # The collective timeout is below the heartbeat timeout, so that the ranks of a group notice a stopped rank before
    # its heartbeats are missed.
    "tp": Shape(4, ("--workers", 4, "--tp", 2, "--collective-timeout", 1, *QWEN3), clients=4),
    # Prefill and decode on different workers.
    "sim-disaggregated": Shape(3, ("--topology", TOPOLOGIES / "two-prefill.toml", "--device", "sim"), clients=8, computes=False),
    "cpu-disaggregated": Shape(2, ("--topology", TOPOLOGIES / "disaggregated.toml", *QWEN3), clients=4),
    # Prefill and decode have the same number of ranks. Otherwise, a replay would compute a token with another number of
    # ranks, which rounds differently.
    "tp-disaggregated": Shape(4, ("--topology", TOPOLOGIES / "tp2-disaggregated.toml", "--collective-timeout", 1, *QWEN3), clients=3),
    # A router, and a conductor whose workers outlive it.
    "sim-outliving": Shape(2, ("--workers", 2, "--device", "sim"), clients=8, computes=False, outliving=True),
    # A router, a conductor and workers on separate hosts (network namespaces): two workers prefill for one that
    # decodes.
    "mtls": Shape(3, ("--topology", TOPOLOGIES / "two-prefill-by-hand.toml", "--device", "sim"), clients=8, computes=False, encrypted=True),
}


async def disturb(clusters, disks, log, options):
    rng, ended = random.Random(options.seed), asyncio.Event()
    clients, faults = [], {}
    for name, cluster in clusters.items():
        shape, known = SHAPES[name], []
        if shape.computes:
            undisturbed = Client(name, cluster, log, rng, known, cluster.keys and KEPT)
            asked = list(bodies(rng, KNOWN))
            # All requests are sent at once, because concurrent requests do not change each other's answers.
            known = list(zip(asked, await asyncio.gather(*(undisturbed.ask(body, "stream") for body in asked))))
        # Every third client has the key that is revoked.
        keys = itertools.cycle((KEPT, KEPT, REVOKED) if cluster.keys else (None,))
        clients += [Client(name, cluster, log, random.Random(rng.random()), known, next(keys)) for _ in range(shape.clients)]
        faults[name] = Faults(name, cluster, shape.workers, disks[name], log, random.Random(rng.random()))
    log.began = time.monotonic()
    asking = [asyncio.create_task(client.run(ended)) for client in clients]
    if options.replay:
        lines = [line for line in map(json.loads, options.replay.read_text().splitlines()) if "fault" in line]
        await again(faults, lines)
    else:
        harming = [asyncio.create_task(one.run(ended)) for one in faults.values()]
        await asyncio.sleep(options.minutes * 60)
        ended.set()
        await asyncio.gather(*harming)
    ended.set()
    await asyncio.gather(*asking)


def check_nothing_is_left(name, cluster, log):
    """Checks that no page and no request is left, and that the cluster leaves no process when it ends."""
    try:
        cluster.wait_until_idle()
        log.clusters[name].replays = int(cluster.metrics().get("tutti_request_replays_total", 0))
        if len(cluster.processes()) != SHAPES[name].workers + 1:
            log.leak(name, cluster.processes())
        cluster.stop()
    except AssertionError as problem:
        log.leak(name, problem)


def cluster(name, args, directory):
    """Starts a cluster of this shape."""
    shape = SHAPES[name]
    if shape.encrypted:
        started = EncryptedCluster(args, shape.workers, directory)
        started.keys = None
        return started
    if shape.outliving:
        return OutlivingCluster(args, directory)
    keys = Keys(directory, name)
    started = Server("conductor", [*args, "--api-key-file", keys.file], directory, log_reader=LogReader())
    started.keys, started.kinds = keys, LOCAL_KINDS
    started.client.headers["authorization"] = f"Bearer {KEPT}"
    return started


def run(options, say=print):
    """Runs chaos and returns the summary. `say` prints the progress."""
    directory = options.log.parent if options.log else pathlib.Path(tempfile.mkdtemp(prefix="chaos-"))
    log = Log(options.log or directory / "log.jsonl", options.seed)
    say(f"seed {options.seed}; log: {log.file.name}")
    clusters, disks = {}, {}
    try:
        for name in options.shape or [name for name, shape in SHAPES.items() if not shape.encrypted or possible()]:
            disks[name] = disk = Disk(directory, name)
            clusters[name] = cluster(name, [*SHAPES[name].args, *ALL, "--trace-steps", disk.trace], directory)
        for one in clusters.values():
            one.wait_until_ready()
        asyncio.run(disturb(clusters, disks, log, options))
        for name, one in clusters.items():
            check_nothing_is_left(name, one, log)
    finally:
        for one in clusters.values():
            one.destroy()
        for disk in disks.values():
            disk.destroy()
    summary = log.summary(options.minutes)
    path = pathlib.Path(log.file.name).with_suffix(".summary.json")
    path.write_text(json.dumps(summary, indent=2) + "\n")
    counts = ", ".join(f"{summary[what]} {what}" for what in ("faults", "requests", "cancelled", "refused", "replays", "lost", "wrong", "leaked"))
    say(f"{counts}; time to recover: p50 {summary['recover_p50_s']:.2f} s, max {summary['recover_max_s']:.2f} s")
    say(f"summary: {path}")
    for problem in log.leaked:
        say(problem)
    return summary


def unharmed(summary):
    """True if no request was lost or wrong, and no process, page or request leaked."""
    return not (summary["lost"] or summary["wrong"] or summary["leaked"])


def options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of all choices [default: a new one]")
    parser.add_argument("--minutes", type=float, default=1, help="for how long there are faults [default: 1]")
    parser.add_argument("--log", type=pathlib.Path, help="where the log goes [default: a new directory]")
    parser.add_argument("--replay", type=pathlib.Path, metavar="LOG", help="inject the faults of this log, and no others")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="a cluster, instead of sim and cpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # SIGTERM ends the program through `sys.exit`, so that the clusters end and the disks are removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(0 if unharmed(run(options())) else 1)
