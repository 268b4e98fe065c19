"""The load of chaos: clients that stream, read slowly or disconnect, and that know the expected answers."""

import asyncio
import json
import socket
import time

from chaos_keys import REVOKED
from harness import events
from simulated import asked
from streams import merge

# Seconds after which an answer counts as lost. Even several faults in a row must not delay an answer for longer.
LOST_S = 240


class Failure(Exception):
    """An error that a client got in place of an answer."""


class Refused(Exception):
    """A request that was refused before it began. It is not lost unless every try is refused for too long."""


def bodies(rng, count):
    """Yields requests for clusters with a real model. Together they use every parameter that a replay must preserve."""
    for _ in range(count):
        body = dict(prompt=[rng.randrange(256) for _ in range(rng.choice((1, 7, 40, 300)))], seed=rng.randrange(2**63))
        body |= dict(max_tokens=rng.choice((8, 60, 300, 900)), temperature=rng.choice((0, 0.7, 1.3)), n=rng.choice((1, 1, 3)))
        body |= dict(ignore_eos=rng.random() < 0.8, presence_penalty=rng.choice((0, 1.1)), repetition_penalty=rng.choice((1, 1.2)))
        body |= dict(top_k=rng.choice((0, 30)), logprobs=rng.choice((None, 2)), min_tokens=rng.choice((0, 5)))
        if rng.random() < 0.3:
            body |= dict(echo=True, prompt_logprobs=1)
        yield {k: v for k, v in body.items() if v is not None} | dict(return_token_ids=True)


class Client:
    """A client that sends one request after another until `ended` is set. It reads each answer in a random way."""

    def __init__(self, name, cluster, log, rng, known, key=None):
        self.name, self.cluster, self.log, self.rng, self.known, self.key = name, cluster, log, rng, known, key

    async def run(self, ended):
        while not ended.is_set():
            body, expected = self.next()
            how = self.rng.choices(("stream", "whole", "slow", "leave", "stall and leave"), (6, 2, 2, 2, 1))[0]
            leave_after, first_sent = self.rng.randint(1, 40), time.monotonic()
            while True:
                try:
                    answer = await asyncio.wait_for(self.ask(body, how, leave_after), LOST_S)
                except Refused as refused:
                    self.log.count(self.name, "refused")
                    if time.monotonic() - first_sent < LOST_S:
                        await asyncio.sleep(0.3)
                        continue
                    self.log.bad(self.name, "lost", body=body, how=how, why=f"refused for {LOST_S} s: {refused}")
                except (Failure, AssertionError, OSError, TimeoutError, ValueError) as problem:
                    self.log.bad(self.name, "lost", body=body, how=how, why=repr(problem))
                else:
                    self.judge(body, how, expected, answer)
                break
            self.log.count(self.name, "requests")

    def next(self):
        if self.known:
            return self.rng.choice(self.known)
        body, (tokens, reason) = asked(self.rng)
        # All choices of a greedy request are equal.
        body["n"] = 1 if body["temperature"] else self.rng.choice((1, 1, 2, 4))
        return {k: v for k, v in body.items() if not k.startswith("stream")}, (tokens, reason)

    def judge(self, body, how, expected, answer):
        if answer is None:
            self.log.count(self.name, "cancelled")
        elif self.known and answer != expected:
            self.log.bad(self.name, "wrong", body=body, how=how, answer=answer, expected=expected)
        elif not self.known:
            said = [(choice["token_ids"], *(reason for reason, _ in choice["ends"])) for choice in answer["choices"].values()]
            if said != [expected] * body["n"]:
                self.log.bad(self.name, "wrong", body=body, how=how, answer=said, expected=expected)

    async def ask(self, body, how, leave_after=0):
        """Returns the whole answer; None if the client disconnected before its end."""
        body = {"model": self.cluster.model} | body
        if how != "whole":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        content = json.dumps(body)
        reader, writer = await self.connect(patient=how not in ("slow", "stall and leave"))
        try:
            head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
            head += f"authorization: Bearer {self.key}\r\n\r\n" if self.key else "\r\n"
            writer.write(f"{head}{content}".encode())
            status = int((await reader.readline()).split()[1])
            while (await reader.readline()).strip():
                pass
            begun = b""
            if status == 200:
                match how:
                    case "leave":
                        for _ in range(leave_after):
                            await reader.read(512)
                        return None
                    case "stall and leave":
                        # The client reads nothing more, so the socket buffers soon fill up.
                        await asyncio.sleep(leave_after / 10)
                        return None
                    case "slow":
                        for _ in range(leave_after):
                            begun += await reader.read(512)
                            await asyncio.sleep(self.rng.random() / 4)
            text = (begun + await reader.read()).decode()
        finally:
            # `close` would first wait for pending writes.
            writer.transport.abort()
        if status != 200:
            # A text with "tried" means that the request was accepted and then failed.
            is_refused = status in (429, 503) and "tried" not in text or status == 401 and self.key == REVOKED
            raise (Refused if is_refused else Failure)(f"{status}: {text}")
        answer = {}
        for event in [json.loads(text)] if how == "whole" else events(text.split("\n")):
            if "error" in event:
                raise Failure(event["error"]["message"])
            merge(answer, event)
        return answer

    async def connect(self, patient):
        """Connects to the cluster. A slow reader gets a small receive buffer, so that the server soon notices it."""
        if patient:
            return await asyncio.open_connection(self.cluster.host, self.cluster.http_port)
        slow = socket.socket()
        slow.setblocking(False)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.get_running_loop().sock_connect(slow, (self.cluster.host, self.cluster.http_port))
        return await asyncio.open_connection(sock=slow, limit=2048)
