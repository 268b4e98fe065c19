"""Chaos: two clusters, one of simulated devices and one that computes, under mixed load and random faults. In both, each
worker does everything; in other shapes, prefill and decode are apart, or a model is divided among ranks.

Each answer is checked against what it is without faults. All choices come from one seed. The log has a JSON line for
each fault and each request that went wrong; --replay injects the faults of a log again, at the same times.
"""

import argparse
import asyncio
import json
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time

from harness import ANSWER_S, GOLDENS, REPO, Server, events
from streams import merge
from test_sim import asked

# Faults come faster here than a request may be expected to outlive by default.
ALL = ("--max-replays", 50, "--heartbeat-timeout", 2)
SIM = ("--device", "sim")
CPU = ("--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init", "--threads", 1)
TOPOLOGIES = REPO / "deploy/topology"
# Workers, and what the conductor is told.
SHAPES = {
    "sim": (4, ("--workers", 4, *SIM)),
    "cpu": (2, ("--workers", 2, *CPU)),
    # Prefill and decode at different workers.
    "sim-apart": (3, ("--topology", TOPOLOGIES / "two-prefill.toml", *SIM)),
    "cpu-apart": (2, ("--topology", TOPOLOGIES / "apart.toml", *CPU)),
    # Two ranks a model. Not with other ranks on one side than on the other: who computes a token again at another one
    # rounds otherwise.
    "cpu-tp": (4, ("--workers", 4, "--tp", 2, *CPU)),
    "cpu-tp-apart": (4, ("--topology", TOPOLOGIES / "tp2-apart.toml", *CPU)),
}
TOGETHER = ("sim", "cpu")
CLIENTS = {"sim": 12, "cpu": 5, "sim-apart": 8, "cpu-apart": 4, "cpu-tp": 3, "cpu-tp-apart": 3}
RECOVERY_S = 90


class Failure(Exception):
    """What a client was told in place of an answer."""


class Refused(Exception):
    """Turned away before anything had begun: not lost, but to be asked again."""


class Log:
    """Counts, and lines for what has to be seen again."""

    def __init__(self, path, seed):
        self.file, self.began = path.open("w"), time.monotonic()
        self.faults, self.recovery, self.counts = 0, [], dict.fromkeys(("requests", "cancelled", "refused", "lost", "wrong"), 0)
        self.write(seed=seed)

    def write(self, **what):
        self.file.write(json.dumps({"at": round(time.monotonic() - self.began, 3)} | what) + "\n")
        self.file.flush()

    def bad(self, kind, **what):
        self.counts[kind] += 1
        self.write(bad=kind, **what)


# --- Load ---


def cpu_bodies(rng, count):
    """Requests for the cluster that computes: whatever a replay must take along is in one of them."""
    for _ in range(count):
        body = dict(prompt=[rng.randrange(256) for _ in range(rng.choice((1, 7, 40, 300)))], seed=rng.randrange(2**63))
        body |= dict(max_tokens=rng.choice((8, 60, 300, 900)), temperature=rng.choice((0, 0.7, 1.3)), n=rng.choice((1, 1, 3)))
        body |= dict(ignore_eos=rng.random() < 0.8, presence_penalty=rng.choice((0, 1.1)), repetition_penalty=rng.choice((1, 1.2)))
        body |= dict(top_k=rng.choice((0, 30)), logprobs=rng.choice((None, 2)), min_tokens=rng.choice((0, 5)))
        if rng.random() < 0.3:
            body |= dict(echo=True, prompt_logprobs=1)
        yield {k: v for k, v in body.items() if v is not None} | dict(return_token_ids=True)


class Client:
    """Asks one request after another, each in a way of its own, until it is told to end."""

    def __init__(self, cluster, log, rng, known):
        self.cluster, self.log, self.rng, self.known = cluster, log, rng, known

    async def run(self, ended):
        while not ended.is_set():
            body, expected = self.next()
            how = self.rng.choices(("stream", "whole", "slow", "leave"), (6, 2, 1, 2))[0]
            leave_after = self.rng.randint(1, 40)
            while True:
                try:
                    answer = await asyncio.wait_for(self.ask(body, how, leave_after), ANSWER_S)
                except Refused:
                    self.log.counts["refused"] += 1
                    await asyncio.sleep(0.3)
                    continue
                except (Failure, AssertionError, OSError, TimeoutError) as problem:
                    self.log.bad("lost", body=body, how=how, why=repr(problem))
                else:
                    self.judge(body, how, expected, answer)
                break
            self.log.counts["requests"] += 1

    def next(self):
        if self.known:
            return self.rng.choice(self.known)
        body, (tokens, reason) = asked(self.rng)
        # Greedy choices are all the same.
        body["n"] = 1 if body["temperature"] else self.rng.choice((1, 1, 2, 4))
        return {k: v for k, v in body.items() if not k.startswith("stream")}, (tokens, reason)

    def judge(self, body, how, expected, answer):
        if answer is None:
            self.log.counts["cancelled"] += 1
        elif self.known and answer != expected:
            self.log.bad("wrong", body=body, how=how, answer=answer, expected=expected)
        elif not self.known:
            said = [(choice["token_ids"], *(reason for reason, _ in choice["ends"])) for choice in answer["choices"].values()]
            if said != [expected] * body["n"]:
                self.log.bad("wrong", body=body, how=how, answer=said, expected=expected)

    async def ask(self, body, how, leave_after=0):
        """All that the answer says; None for one that was left."""
        body = {"model": self.cluster.model} | body
        if how != "whole":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        content = json.dumps(body)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.cluster.http_port)
        try:
            head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
            writer.write(f"{head}{content}".encode())
            status = int((await reader.readline()).split()[1])
            while (await reader.readline()).strip():
                pass
            if how == "leave" and status == 200:
                for _ in range(leave_after):
                    await reader.read(512)
                return None
            begun = b""
            if how == "slow":
                for _ in range(10):
                    begun += await reader.read(2048)
                    await asyncio.sleep(self.rng.random() / 5)
            text = (begun + await reader.read()).decode()
        finally:
            writer.close()
        if status != 200:
            # "tried": it was accepted, and then given up.
            raise (Refused if status in (429, 503) and "tried" not in text else Failure)(f"{status}: {text}")
        answer = {}
        for event in [json.loads(text)] if how == "whole" else events(text.splitlines()):
            if "error" in event:
                raise Failure(event["error"]["message"])
            merge(answer, event)
        return answer



# --- Faults ---


class Faults:
    """One fault after another on one cluster, each with the time until all is as before."""

    def __init__(self, name, cluster, workers, log, rng):
        self.name, self.cluster, self.workers, self.log, self.rng = name, cluster, workers, log, rng

    async def run(self, ended):
        while not ended.is_set():
            kind = self.rng.choices(("kill", "stop", "pause", "kill two", "pause conductor"), (6, 2, 3, 2, 1))[0]
            place, seconds = self.rng.randrange(self.workers), self.rng.random()
            await self.inject(kind, place, seconds)
            await asyncio.sleep(self.rng.expovariate(1))

    async def inject(self, kind, place, seconds):
        pids = self.cluster.workers()
        if not pids:
            return
        self.log.faults += 1
        self.log.write(cluster=self.name, fault=kind, place=place, seconds=seconds)
        began, restarts = time.monotonic(), self.restarts()
        pid = pids[place % len(pids)]
        match kind:
            case "kill":
                self.signal(pid, signal.SIGKILL)
            case "kill two":
                for victim in {pid, pids[(place + 1) % len(pids)]}:
                    self.signal(victim, signal.SIGKILL)
            case "stop":
                # For longer than it takes to be found; what goes on afterwards is nobody.
                self.signal(pid, signal.SIGSTOP)
                await asyncio.sleep(3 + seconds)
                self.signal(pid, signal.SIGCONT)
            case "pause":
                self.signal(pid, signal.SIGSTOP)
                await asyncio.sleep(seconds)
                self.signal(pid, signal.SIGCONT)
            case "pause conductor":
                self.signal(self.cluster.pid, signal.SIGSTOP)
                await asyncio.sleep(2 + 2 * seconds)
                self.signal(self.cluster.pid, signal.SIGCONT)
        if kind in ("kill", "kill two", "stop"):
            await self.recovered(began, restarts)

    def signal(self, pid, number):
        """To a process of this cluster only, whoever has the number by now."""
        if pid in self.cluster.processes():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def restarts(self):
        return self.cluster.metrics().get("tutti_worker_restarts_total", 0)

    async def recovered(self, began, restarts):
        while time.monotonic() - began < RECOVERY_S:
            await asyncio.sleep(0.05)
            seen = await asyncio.to_thread(self.cluster.metrics)
            if seen["tutti_workers_ready"] == self.workers and seen.get("tutti_worker_restarts_total", 0) > restarts:
                self.log.recovery.append(time.monotonic() - began)
                return
        self.log.bad("lost", why=f"{self.name}: not as before within {RECOVERY_S} s")


async def again(faults, lines):
    """The faults of a log, at their times."""
    began, injected = time.monotonic(), []
    for line in lines:
        await asyncio.sleep(max(0, line["at"] - (time.monotonic() - began)))
        fault = faults[line["cluster"]].inject(line["fault"], line["place"], line["seconds"])
        injected.append(asyncio.create_task(fault))
    await asyncio.gather(*injected)


# --- The whole ---


async def disturb(clusters, log, options):
    rng, ended = random.Random(options.seed), asyncio.Event()
    clients, faults = [], {}
    for name, cluster in clusters.items():
        known = []
        if name.startswith("cpu"):
            bodies = list(cpu_bodies(rng, 24))
            undisturbed = Client(cluster, log, rng, known)
            known = [(body, await undisturbed.ask(body, "stream")) for body in bodies]
        clients += [Client(cluster, log, random.Random(rng.random()), known) for _ in range(CLIENTS[name])]
        faults[name] = Faults(name, cluster, SHAPES[name][0], log, random.Random(rng.random()))
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


def run(options, say=print):
    """Whether nothing was lost, wrong or left behind; says what happened."""
    directory = options.log.parent if options.log else pathlib.Path(tempfile.mkdtemp(prefix="chaos-"))
    log = Log(options.log or directory / "log.jsonl", options.seed)
    clusters = {}
    left, replays = [], 0
    try:
        for name in options.shape or TOGETHER:
            _, args = SHAPES[name]
            clusters[name] = Server("conductor", [*args, *ALL], directory)
        for cluster in clusters.values():
            cluster.wait_until_ready()
        asyncio.run(disturb(clusters, log, options))
        for name, cluster in clusters.items():
            try:
                cluster.wait_until_idle()
                replays += int(cluster.metrics().get("tutti_request_replays_total", 0))
                if len(cluster.processes()) != SHAPES[name][0] + 1:
                    left.append(f"{name}: {cluster.processes()}")
                cluster.stop()
            except AssertionError as problem:
                left.append(f"{name}: {problem}")
    finally:
        for cluster in clusters.values():
            cluster.destroy()
    recovery = sorted(log.recovery) or [0]
    counts = ", ".join(f"{count} {what}" for what, count in log.counts.items())
    say(f"seed {options.seed}: {log.faults} faults, {replays} replays, {counts}, {len(left)} left behind")
    say(f"time to recover: p50 {statistics.median(recovery):.2f} s, max {recovery[-1]:.2f} s; log: {log.file.name}")
    for problem in left:
        say(problem)
    return not left and not log.counts["lost"] and not log.counts["wrong"]


def options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="of all choices [default: a new one]")
    parser.add_argument("--minutes", type=float, default=1, help="for how long there are faults [default: 1]")
    parser.add_argument("--log", type=pathlib.Path, help="where the log goes [default: a new directory]")
    parser.add_argument("--replay", type=pathlib.Path, metavar="LOG", help="inject the faults of this log, and no others")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="a cluster, instead of sim and cpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(0 if run(options()) else 1)
