"""Measures how a flood of one API key delays another key, and how much many choices of one prompt cost, on the
simulated device.

The simulated H200 takes the time of its cost model, so that figures compare shares and not processors.
"""

import argparse
import asyncio
import json
import multiprocessing
import pathlib
import random
import sys
import tempfile
import time

import httpx
from api_keys import line
from harness import Server, machine, wait_for

PATH = "/v1/completions"
FLOOD, ONE = "flood-key", "one-key"
# Tokens per page of the prefix cache on the simulated device.
PAGE_TOKENS = 16
# Token ids that every model's vocabulary has.
TOKENS = range(10, 200)


def prompt(source, length):
    return [source.choice(TOKENS) for _ in range(length)]


def keyed(key):
    return {"authorization": f"Bearer {key}"}


def key_file(directory, *limits):
    """Writes a file of API keys for both callers, and returns its path."""
    file = pathlib.Path(directory) / "keys"
    file.write_text(line("flood", FLOOD, *limits) + line("one", ONE))
    return file


async def answer(client, key, body):
    """Returns (seconds, number of prompt and output tokens) of one request."""
    start = time.monotonic()
    response = await client.post(PATH, json=body, headers=keyed(key))
    assert response.status_code == 200, f"{response.status_code}: {response.text}"
    return time.monotonic() - start, response.json()["usage"]["total_tokens"]


def client_of(server):
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=600, verify=False, limits=limits)


async def flooding(client, bodies):
    """Sends all requests at once. Returns their prompt and output tokens per second."""
    start = time.monotonic()
    answers = await asyncio.gather(*(answer(client, FLOOD, body) for body in bodies))
    seconds = time.monotonic() - start
    return sum(tokens for _, tokens in answers) / seconds


def one_at_a_time(url, options, count, ended, found):
    """Puts the seconds of each request of a caller into `found`. The caller sends the next request after each answer,
    `count` of them or until `ended` is set. Runs in a separate process. In the flood's process, it would also measure
    the delays of the flood's event loop."""
    source, seconds = random.Random(options.seed + 1), []
    with httpx.Client(base_url=url, timeout=600) as client:
        while len(seconds) < count and not ended.is_set():
            [body] = bodies(source, 1, options)
            start = time.monotonic()
            response = client.post(PATH, json=body, headers=keyed(ONE))
            assert response.status_code == 200, f"{response.status_code}: {response.text}"
            seconds.append(time.monotonic() - start)
    found.put(seconds)


def bodies(source, count, options):
    return [
        {"prompt": prompt(source, options.input_tokens), "max_tokens": options.output_tokens, "ignore_eos": True}
        for _ in range(count)
    ]


def quantile(values, part):
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def summary(seconds):
    return {"requests": len(seconds)} | {f"p{p}_ms": round(1000 * quantile(seconds, p / 100), 1) for p in (50, 99)}


def shares(server, options):
    """Returns the latencies of one caller without and with a flood, and the throughput of the flood without and with
    this caller."""
    processes, source = multiprocessing.get_context("spawn"), random.Random(options.seed)
    ended, found = processes.Event(), processes.Queue()

    def other(count):
        process = processes.Process(target=one_at_a_time, args=(server.url, options, count, ended, found))
        process.start()
        return process

    async def flood():
        async with client_of(server) as client:
            return await flooding(client, bodies(source, options.flood, options))

    process = other(options.requests)
    alone = found.get()
    process.join()
    flood_alone = asyncio.run(flood())
    before = prefilled(server)
    process = other(sys.maxsize)
    wait_for("a request of the other key", lambda: prefilled(server) > before)
    flood_beside = asyncio.run(flood())
    ended.set()
    beside = found.get()
    process.join()
    return {
        "alone": summary(alone),
        "beside_the_flood": summary(beside),
        "p99_ratio": round(quantile(beside, 0.99) / quantile(alone, 0.99), 2),
        "flood_tokens_per_s": {"alone": round(flood_alone), "beside_the_other_key": round(flood_beside)},
    }


def prefilled(server):
    """Returns the number of prompt tokens of the requests that workers have admitted so far."""
    return server.metrics().get("tutti_worker_prefill_tokens", 0)


def computed(server):
    """Returns the number of prefill tokens that the workers have computed so far."""
    return prefilled(server) - server.metrics().get("tutti_worker_cached_tokens", 0)


def choices(server, n, length, output, seed):
    """Measures the cost of `n` choices of a new prompt."""
    body = {"prompt": prompt(random.Random(seed), length), "n": n, "max_tokens": output, "ignore_eos": True, "seed": seed,
            "return_token_ids": True, "temperature": 1}
    before, start, first = computed(server), time.monotonic(), None
    answers = {}
    for event in server.stream(PATH, **body):
        first = first or time.monotonic() - start
        for choice in event["choices"]:
            answers.setdefault(choice["index"], []).extend(choice["token_ids"] or [])
    seconds = time.monotonic() - start
    server.wait_until_idle()
    figures = {"n": n, "prefill_tokens": round(computed(server) - before), "ttft_ms": round(1000 * first, 1),
               "tokens_per_s": round(n * output / seconds)}
    return figures, [answers[index] for index in range(n)]


def expected_prefill(n, length):
    """Returns the expected number of prefill tokens: the whole prompt once, and for each further choice the tokens
    after the prompt's last whole page."""
    whole = (length - 1) // PAGE_TOKENS * PAGE_TOKENS
    return length + (n - 1) * (length - whole)


def measure(options):
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--workers", 1, "--device", "sim", "--max-running-requests", options.running]
        if options.target_itl_ms:
            flags += ["--target-itl-ms", options.target_itl_ms]
        keyed = Server("conductor", [*flags, "--api-key-file", key_file(directory)], directory)
        open_to_all = Server("conductor", flags, directory)
        try:
            keyed.wait_until_ready()
            open_to_all.wait_until_ready()
            found = {"machine": machine(), "device": "sim", "running": options.running, "target_itl_ms": options.target_itl_ms}
            found["shares"] = shares(keyed, options)
            found["choices"] = [
                choices(open_to_all, n, options.choice_prompt, 64, seed)[0] for seed, n in enumerate((1, 16, 64, 128), 1)
            ]
            return found
        finally:
            keyed.stop()
            open_to_all.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flood", type=int, default=500, help="requests that one key sends at once")
    parser.add_argument("--requests", type=int, default=100, help="requests of the other key alone")
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--choice-prompt", type=int, default=4000, help="tokens of a prompt with many choices")
    parser.add_argument("--running", type=int, default=64, help="requests that the worker runs at a time")
    parser.add_argument("--target-itl-ms", type=int, help="the worker's setting: how long a step with decodes may take")
    parser.add_argument("--seed", type=int, default=37)
    parser.add_argument("--out", type=pathlib.Path, help="file for the figures as JSON")
    options = parser.parse_args()
    text = json.dumps(measure(options), indent=2)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
