"""Kills a conductor under streams behind a router, with workers that outlive it and with workers that do not.

A router, a conductor and simulated workers serve streams, and each token is compared with the expected one. In the
middle the conductor gets SIGKILL, and another one is started at once, as by systemd. Prints, as JSON, the longest time
between two events of a stream after the kill, and the prompt tokens that workers computed again.
"""

import argparse
import asyncio
import json
import pathlib
import random
import signal
import sys
import tempfile
import time

from harness import Server, machine, wait_for
from simulated import VOCAB, sampled

PROMPT_TOKENS, MAX_TOKENS = 512, 200
# Long steps, so that this program and the processes under test use little of a CPU.
STEP_US = 100_000


class Stream:
    """One stream, with the times of its events."""

    def __init__(self, rng):
        self.prompt, self.times, self.tokens = [rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)], [], []

    async def run(self, router):
        body = {"model": router.model, "prompt": self.prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        content = json.dumps(body)
        reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
        head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(f"{head}{content}".encode())
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            tokens = [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
            if tokens:
                self.times.append(time.monotonic())
                self.tokens += tokens
        writer.close()

    def is_right(self):
        return self.tokens == sampled(self.prompt, 0, 0, MAX_TOKENS)

    def gap_around(self, killed):
        """Returns the longest time between two events, the later of which came after the kill."""
        return max(b - a for a, b in zip(self.times, self.times[1:]) if b > killed)


def computed(conductor):
    """Returns the prompt tokens that the workers have computed since their start: all but the cached ones."""
    seen = conductor.metrics()
    return seen["tutti_worker_prefill_tokens"] - seen["tutti_worker_cached_tokens"]


async def measure(directory, flags, count):
    env, patient = {"TUTTI_SIM__FIXED_US": str(STEP_US)}, {"TUTTI_FLEET__RECOVERY_MS": "90000", "TUTTI_FLEET__POLL_MS": "100"}
    conductors = [Server("conductor", flags, directory, env)]
    first = conductors[0]
    router = Server("router", ["--conductor", f"http://{first.cluster}"], directory, patient)
    try:
        for server in (first, router):
            await asyncio.to_thread(server.wait_until_ready)
        _ = router.model
        rng = random.Random(3)
        streams = [Stream(rng) for _ in range(count)]
        running = [asyncio.create_task(stream.run(router)) for stream in streams]
        begun = lambda: all(len(stream.tokens) >= MAX_TOKENS // 8 for stream in streams)
        await asyncio.to_thread(wait_for, "streams in progress", begun, 120)
        before = (await asyncio.to_thread(computed, first)) if "--state-directory" in flags else 0
        killed = time.monotonic()
        first.signal(signal.SIGKILL)
        first.wait()
        conductors.append(Server("conductor", [*flags, *first.cluster_flags], directory, env))
        await asyncio.gather(*running)
        wrong = sum(not stream.is_right() for stream in streams)
        gaps = sorted(stream.gap_around(killed) for stream in streams)
        again = await asyncio.to_thread(computed, conductors[1]) - before
        return {
            "streams": count,
            "wrong": wrong,
            "longest_gap_s": round(gaps[-1], 2),
            "median_gap_s": round(gaps[len(gaps) // 2], 2),
            "prompt_tokens_computed_again": int(again),
        }
    finally:
        for server in (router, *reversed(conductors)):
            server.destroy()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200, help="number of streams [default: 200]")
    parser.add_argument("--json", type=pathlib.Path, help="file for the figures")
    options = parser.parse_args()
    base = ["--no-router", "--workers", 2, "--device", "sim"]
    figures = {"machine": machine(), "step_ms": STEP_US / 1000, "prompt_tokens": PROMPT_TOKENS}
    with tempfile.TemporaryDirectory(prefix="adoption-") as directory:
        outlive = [*base, "--state-directory", pathlib.Path(directory) / "state"]
        figures["workers_die"] = asyncio.run(measure(directory, base, options.streams))
        figures["workers_outlive"] = asyncio.run(measure(directory, outlive, options.streams))
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return int(any(figures[way]["wrong"] for way in ("workers_die", "workers_outlive")))


if __name__ == "__main__":
    sys.exit(main())
