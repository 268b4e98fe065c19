"""Attacks on a cluster's public ports, with real sockets from a separate address.

Each attack is a coroutine that ends with the given time window, and returns the number of times that each outcome was
seen. An outcome is an HTTP status, "closed" for a connection that the server closed or reset, "open" for one that it
left open, or a code of gRPC or HTTP/2.
"""

import argparse
import asyncio
import collections
import dataclasses
import json
import resource
import socket
import struct
import sys
import time

import grpc

# Every address of 127.0.0.0/8 is a loopback address. The good client uses another one.
ATTACKER = "127.0.0.2"
MIB = 1 << 20
# Time for which a slow attacker waits for an outcome after its window. The cluster's timeouts (hostile.py) are shorter.
VERDICT_S = 10
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Frames of HTTP/2 (RFC 9113 §6).
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
UNKNOWN = 0xBE
END_HEADERS = 4


@dataclasses.dataclass
class Target:
    http: int
    grpc: int
    model: str
    seconds: float
    size: float

    def __post_init__(self):
        self.end = time.monotonic() + self.seconds

    def left(self):
        return max(0.0, self.end - time.monotonic())

    def count(self, whole):
        return max(1, int(whole * self.size))


@dataclasses.dataclass(frozen=True)
class Attack:
    run: object
    allowed: frozenset
    # Maximum growth of the conductor's memory.
    mib: int


ATTACKS = {}


def attack(*allowed, mib=64):
    def register(run):
        ATTACKS[run.__name__.replace("_", "-")] = Attack(run, frozenset(allowed), mib)
        return run

    return register


async def connect(port, receive_buffer=None):
    peer = socket.socket()
    peer.setblocking(False)
    if receive_buffer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    peer.bind((ATTACKER, 0))
    try:
        await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", port))
    except BaseException:
        peer.close()
        raise
    return peer


async def send(peer, data):
    await asyncio.get_running_loop().sock_sendall(peer, data)


async def outcome(peer, seconds=0.2):
    """Returns the status of an answer that arrives within this time, "closed", or "open"."""
    answer = b""
    loop = asyncio.get_running_loop()
    try:
        while b"\r\n" not in answer:
            piece = await asyncio.wait_for(loop.sock_recv(peer, 1 << 16), seconds)
            if not piece:
                return "closed"
            answer += piece
    except TimeoutError:
        return "open"
    except OSError:
        return "closed"
    return answer.split()[1].decode() if answer.startswith(b"HTTP/1.1 ") else "other"


async def outcome_http2(peer, seconds=0.2):
    """Returns the code of a GOAWAY or RST_STREAM, "closed", "answered" for the headers of a response, or "open"."""
    answer = b""
    loop = asyncio.get_running_loop()
    try:
        while True:
            piece = await asyncio.wait_for(loop.sock_recv(peer, 1 << 16), seconds)
            if not piece:
                break
            answer += piece
    except TimeoutError:
        pass
    except OSError:
        return "closed"
    else:
        seconds = None
    seen = "closed" if seconds is None else "open"
    while len(answer) >= 9:
        length, kind = int.from_bytes(answer[:3]), answer[3]
        if kind == GOAWAY:
            return "goaway"
        if kind == RST_STREAM:
            seen = "reset"
        elif kind == HEADERS and seen == "open":
            seen = "answered"
        answer = answer[9 + length :]
    return seen


async def each(count, one):
    """Runs `one(index)` for all connections concurrently, and counts the outcomes."""
    async def guarded(index):
        try:
            return await one(index)
        except OSError:
            return "closed"

    return collections.Counter(await asyncio.gather(*(guarded(index) for index in range(count))))


async def drip(target, peer, data, read=outcome, pause=1.0):
    """Sends one byte per second until the window ends or the server closes the connection. Then waits for the outcome.
    """
    for at in range(len(data)):
        if target.left() < pause:
            break
        await send(peer, data[at : at + 1])
        if (seen := await read(peer, pause)) != "open":
            return seen
    return await read(peer, VERDICT_S)


def post(target, path, length=None, more=""):
    body = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    host = f"host: 127.0.0.1:{target.http}\r\ncontent-type: application/json\r\n{more}"
    return f"POST {path} HTTP/1.1\r\n{host}{body}\r\n\r\n".encode()


async def posted(target, path, body, more="", seconds=60):
    """Returns the outcome of one complete POST. The server may answer before it has read the whole body."""
    peer = await connect(target.http)
    try:
        sending = asyncio.create_task(send(peer, post(target, path, len(body), more) + body))
        seen = await outcome(peer, seconds)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        return seen
    finally:
        peer.close()


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def head(path, more=b""):
    """Returns the header block of a gRPC call (RFC 7541: indexed fields, and literals without indexing)."""
    path = path.encode()
    return b"\x83\x86\x04" + bytes((len(path),)) + path + b"\x01\x09127.0.0.1" + b"\x0f\x10\x10application/grpc" + more


async def hold(target, peers, read=outcome):
    """Waits for the end of the window, and returns which connections are still open."""
    await asyncio.sleep(target.left())
    return collections.Counter([await read(peer, 0.001) for peer in peers])


@attack("408", "closed")
async def heads_a_byte_a_second(target):
    async def one(_):
        peer = await connect(target.http)
        try:
            return await drip(target, peer, b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 100)
        finally:
            peer.close()

    return await each(target.count(500), one)


@attack("closed", "goaway")
async def prefaces_a_byte_a_second(target):
    async def one(_):
        peer = await connect(target.grpc)
        try:
            return await drip(target, peer, PREFACE + frame(SETTINGS, 0, 0) * 8, outcome_http2)
        finally:
            peer.close()

    return await each(target.count(500), one)


# 10,000 connections in total. The server closes the connections of an address that have been idle for longest to make
# room for new ones.
@attack("open", "closed", mib=256)
async def idle_connections(target):
    peers = []
    try:
        for index in range(target.count(10_000)):
            try:
                peers.append(await connect(target.http if index % 2 else target.grpc))
            except OSError:
                pass  # refused is as good as closed
        return await hold(target, peers)
    finally:
        for peer in peers:
            peer.close()


@attack("200", "closed", "503", mib=128)
async def half_closed_connections(target):
    body = json.dumps({"model": target.model, "prompt": "a", "max_tokens": 4, "stream": True}).encode()

    async def one(_):
        peer = await connect(target.http)
        try:
            await send(peer, post(target, "/v1/completions", len(body)) + body)
            peer.shutdown(socket.SHUT_WR)
            return await outcome(peer, target.left() + 5)
        finally:
            peer.close()

    return await each(target.count(300), one)


@attack("431", "400", "closed")
async def header_floods(target):
    async def one(index):
        peer = await connect(target.http)
        try:
            await send(peer, b"GET /v1/models HTTP/1.1\r\nhost: a\r\n")
            lines = b"".join(b"x-%d: %s\r\n" % (at, b"a" * (8000 if index % 2 else 8)) for at in range(1000))
            for _ in range(8):
                await send(peer, lines)
            return await outcome(peer, 5)
        finally:
            peer.close()

    return await each(target.count(50), one)


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


# A stream that is not read may continue until the buffers of sockets and server are full.
@attack("200", "open", "closed", "503", mib=256)
async def readers_that_do_not_read(target):
    body = json.dumps({"model": target.model, "prompt": [5] * 8, "max_tokens": 4000, "stream": True, "ignore_eos": True}).encode()
    peers = []
    try:
        for _ in range(target.count(64)):
            peers.append(await connect(target.http, receive_buffer=4096))
            await send(peers[-1], post(target, "/v1/completions", len(body)) + body)
        return await hold(target, peers)
    finally:
        for peer in peers:
            peer.close()


@attack("408", "closed", "503", "429")
async def uploads_a_byte_a_second(target):
    async def one(index):
        peer = await connect(target.http)
        try:
            if index % 2:
                await send(peer, post(target, "/v1/completions", 32 * MIB))
                return await drip(target, peer, b" " * 1000)
            await send(peer, post(target, "/v1/chat/completions"))
            for _ in range(1000):
                if target.left() < 1:
                    break
                await send(peer, b"1\r\n \r\n")
                if (seen := await outcome(peer, 1)) != "open":
                    return seen
            return await outcome(peer, VERDICT_S)
        finally:
            peer.close()

    return await each(64, one)


ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/v1/embeddings")


# The server's total memory for request bodies limits the memory of many such bodies.
@attack("400", "404", "405", "408", "413", "429", "503", "closed", mib=1024)
async def bodies_of_nothing(target):
    async def one(index):
        return await posted(target, ROUTES[index % len(ROUTES)], b" " * (32 * MIB - 1))

    return await each(target.count(len(ROUTES) * 4), one)


@attack("400", "413", "429", "503", "408", mib=512)
async def millions_of_empty_prompts(target):
    start = json.dumps({"model": target.model, "max_tokens": 1}).encode()[:-1]
    body = start + b', "prompt": [' + b'"",' * (10 * MIB) + b'""]}'
    return await each(target.count(4), lambda _: posted(target, "/v1/completions", body))


@attack("400", "413", "429", "503", "408", mib=512)
async def one_word_of_30_megabytes(target):
    def body(text, field):
        return json.dumps({"model": target.model, field: text, "max_tokens": 1}).encode()

    async def one(index):
        text = ("a", " ", "\u00e9")[index % 3] * ((30 if index % 3 < 2 else 14) * MIB)
        route, field = (("/v1/completions", "prompt"), ("/tokenize", "prompt"))[index % 2]
        return await posted(target, route, body(text, field))

    return await each(target.count(12), one)


@attack("400", mib=128)
async def an_answer_of_a_gigabyte(target):
    body = {"model": target.model, "prompt": [7] * 4000, "n": 128, "max_tokens": 1, "prompt_logprobs": 20, "echo": True, "logprobs": 5}
    return await each(target.count(8), lambda _: posted(target, "/v1/completions", json.dumps(body).encode()))


@attack("403")
async def pages_of_other_origins(target):
    body = json.dumps({"model": target.model, "prompt": "a", "max_tokens": 1}).encode()
    more = "origin: https://attacker.example\r\nsec-fetch-site: cross-site\r\n"
    return await each(target.count(20), lambda _: posted(target, "/v1/completions", body, more))


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
    paths = ("/grpc.health.v1.Health/Check", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")

    async def one(index):
        peer = await connect(target.grpc)
        try:
            await send(peer, PREFACE + frame(SETTINGS, 0, 0))
            # The streams are opened one by one over most of the attack. Opening them all at once would be another
            # attack, a burst of calls.
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attack", choices=list(ATTACKS))
    parser.add_argument("--http", type=int, required=True)
    parser.add_argument("--grpc", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--size", type=float, default=1)
    options = vars(parser.parse_args())
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    chosen = ATTACKS[options.pop("attack")]
    json.dump(asyncio.run(chosen.run(Target(**options))), sys.stdout)


if __name__ == "__main__":
    main()
