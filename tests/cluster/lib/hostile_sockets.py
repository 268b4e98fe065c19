"""Sockets of attackers: what they send, and which outcome they see.

Each attack is a coroutine that ends with the given time window, and returns the number of times that each outcome was
seen. An outcome is an HTTP status, "closed" for a connection that the server closed or reset, "open" for one that it
left open, or a code of gRPC or HTTP/2.
"""

import asyncio
import collections
import dataclasses
import socket
import struct
import time

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
    # The ports of routers and operators, and of planes. They are 0 at an open cluster.
    cluster: int
    planes: int
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
    # Maximum growth of the memory of the process that is attacked.
    mib: int
    # The cluster that is attacked: one that is open to clients, one with API keys and two workers, one with a model
    # that takes media, or one with a simulated device that takes pictures.
    cluster: str
    # The process that is attacked: "conductor" or "worker".
    process: str


ATTACKS = {}


def attack(*allowed, mib=64, cluster="open", process="conductor"):
    def register(run):
        ATTACKS[run.__name__.replace("_", "-")] = Attack(run, frozenset(allowed), mib, cluster, process)
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
