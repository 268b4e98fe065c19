"""Measures resident memory before a load, after it and after a rest, of a router, a conductor and its worker.

The device is simulated and the requests are large: prompts of thousands of tokens, streams with logprobs, and texts.
The exit code is 1 if a process keeps more than the given multiple of its memory before the load, when it was warmed up
by a few requests.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import pathlib
import random
import sys
import tempfile
import time

from harness import BINARIES, Server

DEVICE = {"TUTTI_SIM__PROFILE": "instant", "TUTTI_SIM__FIXED_US": "2000"}
# A small pool of pages, which the warm-up fills: the prefix cache is meant to keep what it has.
POOL = ("--kv-cache-memory", 4097 * 128)
WARM_UP = 24


def options(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=500, help="clients at once (default: 500)")
    parser.add_argument("--seconds", type=float, default=180, help="length of the load (default: 180)")
    parser.add_argument("--rest", type=float, default=60, help="longest rest after the load in seconds (default: 60)")
    parser.add_argument("--most", type=float, default=1.3, help="memory after the rest, as a multiple (default: 1.3)")
    parser.add_argument("--out", type=pathlib.Path, help="file for the figures as JSON")
    return parser.parse_args(words)


@dataclasses.dataclass
class Memory:
    before_mib: float
    peak_mib: float
    after_mib: float

    @property
    def multiple(self):
        return self.after_mib / self.before_mib


def resident(pid, field="VmRSS:"):
    """Resident memory of a process, in MiB."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def body(model, rng):
    asked = {"model": model, "max_tokens": rng.choice((20, 100)), "ignore_eos": True, "stream": rng.random() < 0.8}
    if rng.random() < 0.5:
        asked["prompt"] = [rng.randrange(1, 250) for _ in range(rng.choice((100, 3000)))]
    else:
        asked["prompt"] = "".join(rng.choice("abcdefgh ") for _ in range(rng.choice((500, 3000))))
    if rng.random() < 0.3:
        asked["logprobs"] = 20
    return json.dumps(asked).encode()


async def ask(port, content):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        answer = await reader.read(12)
        while await reader.read(1 << 16):
            pass
        return answer
    finally:
        writer.close()


async def load(router, clients, seconds, most=None):
    """Sends requests, one after another from each client, until the time is over or so many are answered."""
    end, answered = time.monotonic() + seconds, 0

    async def client(seed):
        nonlocal answered
        rng = random.Random(seed)
        while time.monotonic() < end and (most is None or answered < most):
            answer = await ask(router.http_port, body(router.model, rng))
            assert answer.endswith(b" 200"), answer
            answered += 1

    await asyncio.gather(*(client(seed) for seed in range(clients)))
    return answered


def run(chosen, say=print):
    """Returns the `Memory` of each process by its name, and the number of answers."""
    with tempfile.TemporaryDirectory() as logs:
        conductor = Server("conductor", ("--no-router", "--workers", 1, "--device", "sim", *POOL), logs, DEVICE)
        servers = [conductor]
        try:
            conductor.wait_until_ready()
            router = Server("router", ("--conductor", f"http://{conductor.cluster}"), logs)
            servers.append(router)
            router.wait_until_ready()
            asyncio.run(load(router, 2, 60, WARM_UP))
            conductor.wait_until_idle()
            pids = {"router": router.pid, "conductor": conductor.pid, "worker": conductor.workers()[0]}
            before = {name: resident(pid) for name, pid in pids.items()}
            answers = asyncio.run(load(router, chosen.clients, chosen.seconds))
            conductor.wait_until_idle()
            end, after = time.monotonic() + chosen.rest, {}
            while True:
                after = {name: resident(pid) for name, pid in pids.items()}
                if time.monotonic() >= end or all(after[name] <= chosen.most * before[name] for name in pids):
                    break
                time.sleep(0.5)
            peaks = {name: resident(pid, "VmHWM:") for name, pid in pids.items()}
            memories = {name: Memory(before[name], peaks[name], after[name]) for name in pids}
            for name, memory in memories.items():
                said = f"{memory.before_mib:6.1f} MiB before, {memory.peak_mib:6.1f} at most, {memory.after_mib:6.1f} after"
                say(f"{name:10} {said}: {memory.multiple:.2f} times")
            for server in reversed(servers):
                server.stop()
            return memories, answers
        except BaseException:
            for server in servers:
                server.destroy()
            raise


def main():
    chosen = options()
    memories, answers = run(chosen)
    print(f"{answers} answers to {chosen.clients} clients in {chosen.seconds:.0f} s")
    if chosen.out:
        figures = {"command": ["tests/memory-comes-back", *sys.argv[1:]], "cpus": os.cpu_count(), "answers": answers}
        figures["build"] = BINARIES.name
        figures["processes"] = {name: dataclasses.asdict(m) | {"multiple": m.multiple} for name, m in memories.items()}
        chosen.out.write_text(json.dumps(figures, indent=1) + "\n")
    sys.exit(any(memory.multiple > chosen.most for memory in memories.values()))


if __name__ == "__main__":
    main()
