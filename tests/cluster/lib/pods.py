"""Pods as processes, and a Kubernetes Service as a TCP balancer, for tests of rolling upgrades.

A pod has a network namespace with a separate address if the machine allows it, and otherwise separate ports.
"""

import asyncio
import contextlib
import itertools
import signal
import time

import httpx
from harness import START_S, Process, free_port

HTTP, GRPC, CLUSTER = 8000, 50051, 50052


class Pod:
    """One process that is run as kubelet runs a pod: start, readiness probes, SIGTERM, grace period, SIGKILL."""

    def __init__(self, name, args, directory, host, grace):
        """`host` is a network namespace, or None for the machine's own."""
        self.address, under = (host.address, host.under[:4]) if host else ("127.0.0.1", ())
        self.http, self.grpc = (HTTP, GRPC) if host else (free_port(), free_port())
        own = ["--http", f"{self.address}:{self.http}", "--grpc", f"{self.address}:{self.grpc}"]
        self.process = Process(name, [*args, *own], directory, under=under)
        self.grace, self.host = grace, host

    async def is_ready(self, client):
        assert self.process.child.poll() is None, self.process.explain("ended before it was ready")
        try:
            return (await client.get(f"http://{self.address}:{self.http}/ready")).status_code == 200
        except httpx.TransportError:
            return False

    async def ready(self):
        """Probes readiness until the pod is ready."""
        deadline = time.monotonic() + START_S
        async with httpx.AsyncClient(timeout=5, verify=False) as client:
            while not await self.is_ready(client):
                assert time.monotonic() < deadline, self.process.explain("not ready")
                await asyncio.sleep(0.1)
        return self

    async def end(self):
        """Sends SIGTERM, and SIGKILL after the grace period. Returns the seconds, and True if SIGKILL was needed."""
        began, killed = time.monotonic(), False
        self.process.signal(signal.SIGTERM)
        while self.process.child.poll() is None:
            if not killed and time.monotonic() - began > self.grace:
                killed = True
                self.process.signal(signal.SIGKILL)
            await asyncio.sleep(0.05)
        seconds = time.monotonic() - began
        self.process.destroy()
        return seconds, killed


class Service:
    """A TCP balancer that gives each new connection to the next ready endpoint. It does not touch open connections."""

    def __init__(self):
        self.endpoints, self.turn, self.refused = [], itertools.count(), 0

    async def start(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0, backlog=1024)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def serve(self, reader, writer):
        if not self.endpoints:
            self.refused += 1
            writer.transport.abort()
            return
        pod = self.endpoints[next(self.turn) % len(self.endpoints)]
        try:
            there_reader, there_writer = await asyncio.open_connection(pod.address, pod.http)
        except OSError:
            self.refused += 1
            writer.transport.abort()
            return
        # At the end of a test, the event loop cancels open connections.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(forward(reader, there_writer), forward(there_reader, writer))

    def stop(self):
        self.server.close()


async def forward(reader, writer):
    """Forwards bytes and the end of the stream in one direction."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        # If the connection on one side breaks, the connection on the other side is aborted.
        writer.transport.abort()
