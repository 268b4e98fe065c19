"""The faults of chaos: processes die, stop or pause, and the disk of the step trace becomes full."""

import asyncio
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

from planes import flip, identity_of, segments, written

RECOVERY_S = 90
# The kinds of faults, and the number of each per round.
KINDS = {"kill": 6, "stop": 2, "pause": 3, "slow": 2, "flip bits": 2, "kill two": 2, "pause conductor": 1, "full disk": 2}
# Kinds that clusters of one machine have in addition.
LOCAL_KINDS = {"stuck log": 2, "revoke key": 2}
# Faults that cause no restart of a worker.
UNHARMFUL = {"pause", "slow", "flip bits", "revoke key", "pause conductor", "renew certificates", "strangers"}
DISK_BYTES = 1 << 20


class Disk:
    """The disk for a cluster's step trace: a small file system that can be filled.

    If mounting is not allowed, it is a directory. Filling it then makes every trace file that is opened afterwards
    refuse writes.
    """

    def __init__(self, parent, name):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix=f"disk-{name}-", dir=parent))
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(self.directory)]
        may = shutil.which("mount") and os.geteuid() == 0
        self.mounted = bool(may) and subprocess.run(mount, capture_output=True).returncode == 0

    @property
    def trace(self):
        return self.directory / "steps"

    def fill(self, ranks):
        if not self.mounted:
            for rank in range(ranks):
                path = self.directory / f"steps.rank{rank}"
                path.unlink(missing_ok=True)
                path.symlink_to("/dev/full")
            return
        with (self.directory / "filler").open("wb", buffering=0) as filler:
            try:
                while filler.write(bytes(4096)):
                    pass
            except OSError:
                pass  # full

    def free(self):
        for path in self.directory.iterdir():
            # Processes may have other files open for writing, so these files are emptied and not removed.
            if path.is_symlink() or path.name == "filler":
                path.unlink()
            else:
                os.truncate(path, 0)

    def destroy(self):
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.directory)], check=True)
        shutil.rmtree(self.directory)


class Faults:
    """Injects one fault after another into one cluster, and measures the time to recover from each."""

    def __init__(self, name, cluster, workers, disk, log, rng):
        self.name, self.cluster, self.workers, self.disk, self.log, self.rng = name, cluster, workers, disk, log, rng

    async def run(self, ended):
        left, kinds = [], KINDS | getattr(self.cluster, "kinds", {})
        while not ended.is_set():
            left = left or self.rng.sample(tuple(kinds), sum(kinds.values()), counts=kinds.values())
            kind = left.pop()
            index, seconds = self.rng.randrange(self.workers), self.rng.random()
            await self.inject(kind, index, seconds)
            await asyncio.sleep(self.rng.expovariate(1))

    async def inject(self, kind, index, seconds):
        ranks = sorted(self.cluster.workers_by_rank().items())
        if not ranks:
            return
        self.log.fault(self.name, kind, place=index, seconds=seconds)
        began, restarts = time.monotonic(), await self.seen("tutti_worker_restarts_total")
        rank, pid = ranks[index % len(ranks)]
        match kind:
            case "kill":
                self.signal(pid, signal.SIGKILL)
            case "kill two":
                # The two victims may be ranks of one TP group, or of two groups.
                for victim in {pid, ranks[(index + 1) % len(ranks)][1]}:
                    self.signal(victim, signal.SIGKILL)
            case "stop":
                # The pause is longer than the time to detect a stopped worker, so that its replacement runs when the
                # worker continues.
                self.signal(pid, signal.SIGSTOP)
                await asyncio.sleep(3 + seconds)
                self.signal(pid, signal.SIGCONT)
            case "pause":
                self.signal(pid, signal.SIGSTOP)
                await asyncio.sleep(seconds)
                self.signal(pid, signal.SIGCONT)
            case "slow":
                # The worker is stopped for most of the time, and never for long enough to look dead.
                for _ in range(20 + int(20 * seconds)):
                    self.signal(pid, signal.SIGSTOP)
                    await asyncio.sleep(0.25)
                    self.signal(pid, signal.SIGCONT)
                    await asyncio.sleep(0.02)
            case "stuck log":
                # Nobody reads what a death and a restart make all processes log.
                self.cluster.log_reader.stop()
                self.signal(pid, signal.SIGKILL)
            case "revoke key":
                self.cluster.keys.revoke(carelessly=seconds < 0.5)
                await asyncio.sleep(1 + 2 * seconds)
                self.cluster.keys.restore()
            case "flip bits":
                await asyncio.to_thread(self.flip_bits, time.monotonic() + 0.5 + seconds)
            case "pause conductor":
                self.signal(self.cluster.pid, signal.SIGSTOP)
                await asyncio.sleep(2 + 2 * seconds)
                self.signal(self.cluster.pid, signal.SIGCONT)
            case "kill conductor":
                await asyncio.to_thread(self.cluster.replace_conductor)
                # The next conductor counts from 0, and restarts nothing.
                restarts = -1
            case "full disk":
                # Both the running workers and a restarted worker then write to the full disk.
                self.disk.fill(self.workers)
                await asyncio.sleep(1 + seconds)
                self.signal(pid, signal.SIGKILL)
            case "cut link":
                self.cluster.cut(rank)
                # The pause is longer than the time to detect the lost connection.
                await asyncio.sleep(3 + seconds)
                self.cluster.mend(rank)
            case "renew certificates":
                await asyncio.to_thread(self.cluster.renew)
            case "strangers":
                await asyncio.to_thread(self.cluster.refuse_strangers)
        if kind not in UNHARMFUL:
            await self.recovered(began, restarts)
        if kind == "stuck log":
            self.cluster.log_reader.go_on()
        if kind == "full disk":
            lost = await self.seen("tutti_trace_steps_lost")
            self.log.clusters[self.name].trace_steps_lost += int(lost)
            self.disk.free()

    def flip_bits(self, until):
        """Flips bits of the first planes that each hand-over in shared memory writes. Does nothing to other
        clusters."""
        flipped, pids = set(), self.cluster.workers_by_rank().values()
        while time.monotonic() < until:
            for pid in pids:
                for segment in segments(pid):
                    if (identity := identity_of(segment)) not in flipped and written(segment, 0, 64):
                        flipped.add(identity)
                        flip(segment, 33)
            time.sleep(0.001)

    def signal(self, pid, number):
        """Sends a signal, but only to a process of this cluster, since the pid may have been reused."""
        if pid in self.cluster.processes():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    async def seen(self, metric):
        # This runs on a thread, because the conductor may be paused, and the event loop must continue.
        return (await asyncio.to_thread(self.cluster.metrics)).get(metric, 0)

    async def recovered(self, began, restarts):
        while time.monotonic() - began < RECOVERY_S:
            await asyncio.sleep(0.05)
            seen = await asyncio.to_thread(self.cluster.metrics)
            if seen["tutti_workers_ready"] == self.workers and seen.get("tutti_worker_restarts_total", 0) > restarts:
                self.log.clusters[self.name].recovery.append(time.monotonic() - began)
                return
        self.log.bad(self.name, "lost", why=f"not as before within {RECOVERY_S} s")


async def again(faults, lines):
    """Injects the faults of a log again, at the same times."""
    began, injected = time.monotonic(), []
    for line in lines:
        await asyncio.sleep(max(0, line["at"] - (time.monotonic() - began)))
        fault = faults[line["cluster"]].inject(line["fault"], line["place"], line["seconds"])
        injected.append(asyncio.create_task(fault))
    await asyncio.gather(*injected)
