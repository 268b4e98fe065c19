"""Rolling upgrades of routers and conductors while clients stream. This file emulates what Kubernetes does.

Routers are a Deployment behind a Service: after a new pod has become ready, an old one leaves the endpoints and gets
SIGTERM. Conductors are a StatefulSet: a pod gets SIGTERM and ends, and its successor becomes ready at the same address.
Kubernetes sends SIGTERM and updates endpoints concurrently, so endpoints change some time after SIGTERM, but within the
lame-duck time. Clients stream one request after another over kept connections, and send no request twice. Each token is
compared with the simulated device's, and any error, wrong token or broken connection is a failed request. There is one
exception, with its own count: a kept connection may end before the first byte of an answer, because the request crossed
the server's close. Clients send such a request again.
"""

import argparse
import asyncio
import json
import pathlib
import random
import sys
import tempfile
import time

from harness import CLUSTER_TOKEN, free_port
from hosts import Network, possible
from pods import CLUSTER, Pod, Service
from simulated import VOCAB, generate

# Seconds for which a draining process still serves new requests, until endpoints and routers have changed.
LAME_DUCK = 3
# Maximum seconds until the end of a request after the lame-duck time.
DRAIN = 60


class Client:
    """A client that sends streamed requests, one after another, over a kept connection."""

    def __init__(self, number, port, model, tokens, ended):
        self.rng, self.port, self.model, self.tokens, self.ended = random.Random(number), port, model, tokens, ended
        self.reader = self.writer = None
        self.done, self.failed, self.connections = 0, [], 0
        # Number of requests that crossed the server's close of a kept connection.
        self.crossed, self.may_cross = 0, False
        self.longest_first, self.longest_pause = 0.0, 0.0

    async def run(self):
        while not self.ended.is_set():
            began = time.monotonic()
            try:
                await self.request()
                self.done += 1
            except (AssertionError, OSError, EOFError, ValueError) as problem:
                if self.may_cross and isinstance(problem, (OSError, EOFError)):
                    self.crossed += 1
                    self.close()
                    continue
                self.failed.append({"after_s": round(time.monotonic() - began, 3), "problem": repr(problem)[:300]})
                self.close()
        self.close()

    def close(self):
        if self.writer:
            self.writer.transport.abort()
        self.reader = self.writer = None

    async def connect(self):
        # If the client sees the end of a connection before it sends, it opens a new one.
        if self.reader and self.reader.at_eof():
            self.close()
        self.may_cross = self.reader is not None
        if not self.reader:
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
            self.connections += 1

    async def request(self):
        prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.choice((3, 40)))]
        seed, count = self.rng.randrange(2**63), self.rng.randint(self.tokens // 2, self.tokens)
        body = {"model": self.model, "prompt": prompt, "seed": seed, "temperature": 1, "max_tokens": count}
        body = json.dumps(body | {"ignore_eos": True, "return_token_ids": True, "stream": True}).encode()
        await self.connect()
        last = time.monotonic()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: tutti\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        first = await self.reader.readexactly(1)
        self.may_cross = False
        headers = (first + await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert headers.startswith("http/1.1 200 "), headers + (await self.reader.read(2000)).decode(errors="replace")
        assert "transfer-encoding: chunked" in headers, headers
        tokens, rest, finished = [], b"", False
        while size := int(await self.reader.readline(), 16):
            rest += (await self.reader.readexactly(size + 2))[:-2]
            *events, rest = rest.split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    finished = True
                elif event.startswith(b"data: "):
                    now, event = time.monotonic(), json.loads(event[6:])
                    assert "error" not in event, event
                    new = event["choices"][0].get("token_ids") or []
                    if new and tokens:
                        self.longest_pause = max(self.longest_pause, now - last)
                    elif new:
                        self.longest_first = max(self.longest_first, now - last)
                    last = now if new else last
                    tokens += new
        assert await self.reader.readline() == b"\r\n" and finished, "the stream ended without [DONE]"
        assert tokens == generate(prompt, seed, VOCAB, count), f"{len(tokens)} of {count} tokens, or other ones"
        if "connection: close" in headers:
            self.close()


class Cluster:
    """Conductors, routers, and the Service in front of the routers."""

    def __init__(self, directory, conductors, routers, hosts, lame_duck, drain, step_us):
        self.directory, self.hosts, self.lame_duck, self.drain = directory, hosts, lame_duck, drain
        self.step_us, self.sizes, self.service = step_us, (conductors, routers), Service()
        self.conductors, self.routers, self.ports = [], [], []
        self.token = directory / "cluster-token"
        self.token.write_text(CLUSTER_TOKEN)

    def flags(self):
        drains = ["--lame-duck", self.lame_duck, "--drain-timeout", self.drain, "--cluster-token-file", self.token]
        return drains + (["--insecure-plaintext"] if self.hosts else [])

    def conductor(self, index):
        host = self.hosts[index] if self.hosts else None
        cluster = f"{host.address}:{CLUSTER}" if host else f"127.0.0.1:{self.ports[index]}"
        settings = self.directory / "sim.toml"
        settings.write_text(f"[sim]\nfixed_us = {self.step_us}\n")
        flags = ["--config", settings, "--device", "sim", "--no-router", "--cluster-grpc", cluster, *self.flags()]
        return Pod("conductor", flags, self.directory, host, self.lame_duck + self.drain + 10)

    def router(self, host):
        where = [host.address for host in self.hosts[: self.sizes[0]]] if self.hosts else ()
        urls = [f"http://{address}:{CLUSTER}" for address in where] or [f"http://127.0.0.1:{port}" for port in self.ports]
        reach = [flag for url in urls for flag in ("--conductor", url)]
        return Pod("router", [*reach, *self.flags()], self.directory, host, self.lame_duck + self.drain + 10)

    async def start(self):
        conductors, routers = self.sizes
        self.ports = [free_port() for _ in range(conductors)]
        for index in range(conductors):
            self.conductors.append(self.conductor(index))
        # There is one more host than routers, because a new router starts before an old one ends.
        self.free = self.hosts[conductors:] if self.hosts else [None] * (routers + 1)
        for _ in range(routers):
            self.routers.append(self.router(self.free.pop(0)))
        for pod in (*self.conductors, *self.routers):
            await pod.ready()
        await self.service.start()
        self.service.endpoints = list(self.routers)

    async def upgrade_router(self, delay):
        """Waits until a new router is ready, and ends the oldest one. The old router leaves the endpoints `delay`
        seconds after its SIGTERM."""
        new = await self.router(self.free.pop(0)).ready()
        old = self.routers.pop(0)
        self.routers.append(new)
        self.service.endpoints = [*self.service.endpoints, new]

        async def leave_endpoints():
            await asyncio.sleep(delay)
            self.service.endpoints = [pod for pod in self.service.endpoints if pod is not old]

        leaving = asyncio.create_task(leave_endpoints())
        if not delay:
            # Without a delay, the old pod leaves the endpoints before it gets the signal.
            await leaving
        seconds, killed = await old.end()
        await leaving
        self.free.append(old.host)
        return seconds, killed

    async def upgrade_conductor(self, index):
        """Ends a conductor, and waits until its successor is ready at the same address."""
        old = self.conductors[index % len(self.conductors)]
        ended = await old.end()
        new = self.conductor(index % len(self.conductors))
        self.conductors[index % len(self.conductors)] = new
        await new.ready()
        return ended

    def destroy(self):
        for pod in (*self.routers, *self.conductors):
            pod.process.destroy()


async def roll(options, directory, hosts, say):
    """Runs the clients and the upgrades, and returns the summary."""
    cluster = Cluster(directory, options.conductors, options.routers, hosts, options.lame_duck, options.drain, options.step_us)
    rng, ended = random.Random(options.seed), asyncio.Event()
    try:
        await cluster.start()
        clients = [Client(f"{options.seed} {n}", cluster.service.port, "tutti-tiny", options.tokens, ended) for n in range(options.streams)]
        tasks = [asyncio.create_task(client.run()) for client in clients]
        # Each client has received an answer before the first upgrade, so that all connections are in use.
        await until(lambda: all(client.done or client.failed for client in clients))
        quiet = max(client.longest_pause for client in clients), max(client.longest_first for client in clients)
        began, upgrades = time.monotonic(), []
        for number in range(options.upgrades):
            for part in options.part:
                before = [client.done for client in clients]
                delay = rng.uniform(0.01, options.lame_duck * 0.7) if options.late else 0
                upgrade = cluster.upgrade_router(delay) if part == "routers" else cluster.upgrade_conductor(number)
                seconds, killed = await upgrade
                # Each client receives another answer before the next upgrade.
                await until(lambda: all(client.done > done or client.failed for client, done in zip(clients, before)))
                failed = sum(len(client.failed) for client in clients)
                upgrades.append({"part": part, "drain_s": round(seconds, 1), "killed": killed})
                say(f"{part} {number + 1}: drained in {seconds:.1f} s{', killed' if killed else ''}; failed requests so far: {failed}")
        ended.set()
        await asyncio.gather(*tasks)
    finally:
        cluster.destroy()
        if hasattr(cluster.service, "server"):
            cluster.service.stop()
    return {
        "upgrades": {part: sum(one["part"] == part for one in upgrades) for part in options.part},
        "streams": options.streams,
        "hosts": "network namespaces" if hosts else "ports",
        "lame_duck_s": options.lame_duck,
        "seconds": round(time.monotonic() - began, 1),
        "requests": sum(client.done for client in clients),
        "connections": sum(client.connections for client in clients),
        "failed": [problem for client in clients for problem in client.failed],
        "crossed": sum(client.crossed for client in clients),
        "killed": sum(one["killed"] for one in upgrades),
        "longest_drain_s": max(one["drain_s"] for one in upgrades),
        "longest_pause_s": round(max(client.longest_pause for client in clients), 3),
        "longest_pause_before_upgrades_s": round(quiet[0], 3),
        "longest_time_to_first_token_s": round(max(client.longest_first for client in clients), 3),
        "longest_time_to_first_token_before_upgrades_s": round(quiet[1], 3),
    }


async def until(holds, seconds=600):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.05)


def run(options, say=print):
    """Runs rolling upgrades of a new cluster, and returns the summary."""
    network = Network(options.conductors + options.routers + 1) if possible() and not options.no_hosts else None
    try:
        with tempfile.TemporaryDirectory() as directory:
            return asyncio.run(roll(options, pathlib.Path(directory), network and network.hosts, say))
    finally:
        if network:
            network.destroy()


def options(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrades", type=int, default=20, help="rolling upgrades of each part")
    parser.add_argument("--part", action="append", choices=("routers", "conductors"), help="part to upgrade; both unless given")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100, help="most tokens of a stream")
    parser.add_argument("--step-us", type=int, default=100_000, help="microseconds per simulated step, and so per token")
    parser.add_argument("--conductors", type=int, default=3)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--lame-duck", type=int, default=LAME_DUCK)
    parser.add_argument("--drain", type=int, default=DRAIN, help="seconds that requests have to finish")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-late", dest="late", action="store_false", help="change endpoints before SIGTERM, not during the lame-duck time")
    parser.add_argument("--no-hosts", action="store_true", help="use ports, not network namespaces")
    parser.add_argument("--json", type=pathlib.Path, help="file for the summary")
    chosen = parser.parse_args(arguments)
    chosen.part = chosen.part or ["routers", "conductors"]
    return chosen


def main():
    chosen = options()
    summary = run(chosen)
    text = json.dumps(summary, indent=1)
    print(text)
    if chosen.json:
        chosen.json.write_text(text + "\n")
    return 1 if summary["failed"] or summary["killed"] or summary["crossed"] else 0


if __name__ == "__main__":
    sys.exit(main())
