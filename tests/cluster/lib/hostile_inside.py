"""Attacks with wrong credentials: on the clients' ports of a cluster with API keys, and on the ports that the cluster's
own processes use.
"""

import asyncio
import collections
import json

import grpc
from hostile_http2 import hold_parts
from hostile_sockets import attack, connect, each, hold, outcome, posted

# Guesses per second and connection. More would only measure this machine's speed, because the guesser runs on it.
PACE_S = 0.02


def inside(*allowed, **more):
    return attack(*allowed, cluster="guarded", **more)


def guessed(target):
    """Yields wrong secrets until the window ends."""
    index = 0
    while target.left() > 0:
        index += 1
        yield f"{index:032x}"


async def outcomes_of(target, call):
    """Calls `call(secret)` with one guess after another, and counts the gRPC codes."""
    seen = collections.Counter()
    for secret in guessed(target):
        try:
            await call(secret)
            seen["OK"] += 1
        except grpc.aio.AioRpcError as refused:
            seen[refused.code().name] += 1
        await asyncio.sleep(PACE_S)
    return seen


@inside("401", "429", "closed")
async def guessed_keys(target):
    body = json.dumps({"model": target.model, "prompt": "a", "max_tokens": 1}).encode()

    async def one(_):
        seen = collections.Counter()
        for secret in guessed(target):
            seen[await posted(target, "/v1/completions", body, f"authorization: Bearer {secret}\r\n")] += 1
            await asyncio.sleep(PACE_S)
        return seen

    return sum(await asyncio.gather(*(one(index) for index in range(target.count(50)))), collections.Counter())


# Bodies that nobody reads, because their caller is refused.
@inside("401", "429", "closed", mib=128)
async def large_bodies_with_guessed_keys(target):
    async def one(_):
        return await posted(target, "/v1/completions", b" " * (8 << 20), "authorization: Bearer guess\r\n")

    return await each(target.count(50), one)


def guesses(port, methods, *, stream=False, metadata=()):
    """Returns an attack that calls methods on a port with guessed secrets, on many connections."""

    async def run(target):
        async def one(index):
            # Each connection is one of its own.
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{getattr(target, port)}", options=options) as channel:
                make = channel.stream_unary if stream else channel.unary_unary
                method = make(methods[index % len(methods)])

                def call(secret):
                    shown = (("authorization", f"Bearer {secret}"), *metadata)
                    return method(iter([b""]) if stream else b"", metadata=shown, timeout=10)

                return await outcomes_of(target, call)

        return sum(await asyncio.gather(*(one(index) for index in range(target.count(20)))), collections.Counter())

    return run


def named(run, name):
    run.__name__ = name
    return run


ORDERS = [f"/tutti.cluster.v1.Conductor/{method}" for method in ("Submit", "DrainWorker", "DrainConductor", "GetRequests")]
PUSH, REPORT = "/tutti.cluster.v1.PlaneTransfer/Push", "/tutti.cluster.v1.RankReports/Report"
inside("UNAUTHENTICATED", "RESOURCE_EXHAUSTED")(named(guesses("grpc", ["/tutti.v1.Inference/Generate"]), "guessed_keys_over_grpc"))
inside("UNAUTHENTICATED")(named(guesses("cluster", ORDERS), "guessed_secrets_of_the_cluster"))
inside("UNAUTHENTICATED", "NOT_FOUND", process="worker")(
    named(guesses("planes", [PUSH], stream=True, metadata=[("tutti-graph", "1.0.0")]), "guessed_secrets_of_planes")
)


@inside("closed", "goaway", "reset", "answered", mib=128)
async def parts_of_messages_to_the_cluster(target):
    return await hold_parts(target, target.cluster, ORDERS[:2])


@inside("closed", "goaway", "reset", "answered", mib=128, process="worker")
async def parts_of_planes(target):
    return await hold_parts(target, target.planes, [PUSH, REPORT])


@inside("open", "closed", mib=128, process="worker")
async def idle_connections_to_planes(target):
    peers = []
    try:
        for _ in range(target.count(5_000)):
            try:
                peers.append(await connect(target.planes))
            except OSError:
                pass  # refused is as good as closed
        return await hold(target, peers, outcome)
    finally:
        for peer in peers:
            peer.close()
