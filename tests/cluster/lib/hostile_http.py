"""Attacks over HTTP/1 on a cluster's port of clients."""

import asyncio
import collections
import json
import socket

from hostile_sockets import (
    MIB, VERDICT_S, attack, connect, drip, each, hold, outcome, post, posted, send,
)


@attack("408", "closed")
async def heads_a_byte_a_second(target):
    async def one(_):
        peer = await connect(target.http)
        try:
            return await drip(target, peer, b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 100)
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


def costly_constraints(n):
    """Returns constraints that cost the most of those that the cheap bounds let pass, and some that these refuse. Each
    has a number in it, so that no check is known from an earlier one."""
    string = {"type": "string"}
    deep = {}
    for _ in range(31):
        deep = {"type": "object", "properties": {"a": deep, "b": string}}
    schemas = [
        {"type": "object", "properties": {f"m{index}-{n}": string for index in range(1000)}},
        {"enum": [f"{n}-{index}" for index in range(4000)]},
        {"anyOf": [{"properties": {f"m{index}": {"const": f"{n}-{index}"}}} for index in range(300)]},
        # The position of the fault is looked for by compilations.
        {"anyOf": [*({"properties": {f"m{index}": {"const": n}}} for index in range(200)), {"type": "nothing"}]},
        {"type": "string", "minLength": 9000, "maxLength": 10_000 + n % 1000},
        {"type": "string", "pattern": f"^.*a.{{20}}{n}$"},
        {"title": str(n), "$ref": "#"},
        {"title": str(n), "allOf": [{"$ref": "#"}]},
        deep | {"title": str(n)},
        {"type": "integer", "multipleOf": 1e-300, "minimum": n},
    ]
    asked = [{"guided_json": schema} for schema in schemas]
    asked += [{"guided_regex": f"\\p{{L}}{{1,5000}}{n}"}, {"guided_regex": "a?" * 4000 + str(n)}, {"guided_regex": f"([01]*1[01]{{30}}){n}"}]
    asked += [{"guided_grammar": "start: r0\n" + "".join(f"r{index}: r{index + 1}\n" for index in range(500)) + f'r500: "{n}"'}]
    asked += [{"guided_choice": [f"{n} {index}" for index in range(4000)]}]
    return asked


# A constraint that is taken ends with its first token. A check that has no room is refused with 503.
@attack("200", "400", "503", mib=256)
async def costly_schemas(target):
    asked = len(costly_constraints(0))

    async def one(client):
        seen, n = collections.Counter(), 0
        while target.left() > 0:
            n += 1
            constraint = costly_constraints(client * 10_000 + n)[(client + n) % asked]
            body = {"model": target.model, "prompt": "a", "max_tokens": 1} | constraint
            seen[await posted(target, "/v1/completions", json.dumps(body).encode())] += 1
        return seen

    return sum(await asyncio.gather(*(one(client) for client in range(64))), collections.Counter())
