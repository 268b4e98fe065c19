"""Clusters and requests whose answers must have the same bits, however their prompts are cut and batched."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import Server

PAGE_TOKENS = 16
# Prompt lengths around the sizes of a page, of a tile, and of the block of 512 keys in attention.
LENGTHS = (1, 16, 37, 130, 515, 701)
VOCABULARY = 320
# Number of pages: enough for the longest request, but not for all choices of the request "grown" at their full lengths.
SMALL_POOL = 56


def tokens(length):
    rng = random.Random(length)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


PROMPTS = {length: tokens(length) for length in LENGTHS}
# A prompt that shares a prefix with the longest prompt.
RELATED = PROMPTS[701][:600] + tokens(55)


def requests():
    """Returns {name: request}: scored prompts of all lengths, greedy and seeded choices, one choice and several."""
    greedy = {"temperature": 0, "max_tokens": 12, "logprobs": 2}
    scored = {f"t{n} scored": {"prompt": ids, "prompt_logprobs": 1} | greedy for n, ids in PROMPTS.items()}
    return scored | {
        "t701": {"prompt": PROMPTS[701]} | greedy,
        "t655, related": {"prompt": RELATED, "temperature": 0.9, "seed": 3, "max_tokens": 12, "logprobs": 2},
        "t515 sampled": {"prompt": PROMPTS[515], "temperature": 0.8, "seed": 7, "top_p": 0.9, "n": 2, "max_tokens": 12, "logprobs": 0},
        "grown": {"prompt": PROMPTS[37], "temperature": 1, "seed": 11, "n": 12, "max_tokens": 110, "logprobs": 1},
    }


class Cluster:
    """A conductor with one worker. It returns token ids, and no answer ends early."""

    def __init__(self, flags, directory):
        self.trace = directory / "steps"
        flags = ["--workers", 1, "--skip-tokenizer-init", "--trace-steps", self.trace, *flags]
        self.server = Server("conductor", flags, directory).wait_until_ready()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop()

    def ask(self, request):
        """Returns (the part of the answer that depends only on the request, its number of cached tokens)."""
        answer = self.server.complete(**request, ignore_eos=True, return_token_ids=True)
        return answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def alone(self):
        """Returns {name: answer} of all requests, sent one after another."""
        return {name: self.ask(request)[0] for name, request in requests().items()}

    def at_once(self):
        """Returns {name: answer} of all requests, sent at once."""
        asked = requests()
        with ThreadPoolExecutor(len(asked)) as pool:
            return dict(zip(asked, pool.map(lambda request: self.ask(request)[0], asked.values())))

    def steps(self):
        """Returns the step trace, which is complete once the server has stopped."""
        return [json.loads(line) for line in self.trace.with_name("steps.rank0").read_text().splitlines()[1:]]


def prefills(step):
    return [end - begin for row in step["rows"] if "prefill" in row["walk"] for begin, end in [row["range"]]]


WHOLE = ("--max-step-tokens", 2048, "--no-prefix-cache")


def check(expected, got, what):
    for name in expected:
        assert got[name] == expected[name], f"{name}, {what}"


def cut(*seed):
    """Returns (flags for random sizes of chunks and steps, the largest chunk)."""
    rng = random.Random(" ".join(seed))
    step = rng.randint(17, 300)
    chunk = rng.randint(5, step)
    return ["--max-step-tokens", step, "--max-prefill-chunk-size", chunk, "--threads", 1], chunk


def check_prefixes(flags, alone, directory):
    with Cluster([*flags, "--threads", 1], directory) as cluster:
        asked = requests()
        whole, shared = 701 // PAGE_TOKENS * PAGE_TOKENS, 600 // PAGE_TOKENS * PAGE_TOKENS
        for name, cached in (("t701", 0), ("t701", whole), ("t655, related", shared)):
            assert cluster.ask(asked[name]) == (alone[name], cached), name
        check(alone, cluster.at_once(), "cold and warm")
        check(alone, cluster.at_once(), "warm")


def check_preempted(flags, page_bytes, alone, directory):
    pool = (SMALL_POOL + 1) * page_bytes
    with Cluster([*flags, "--admission", "optimistic", "--kv-cache-memory", pool, "--threads", 1], directory) as cluster:
        # The test needs a preemption. On a busy machine, the choices may start so late that all of them fit. The test
        # therefore tries several times.
        for _ in range(10):
            check(alone, cluster.at_once(), "preempted")
            if cluster.server.metrics()["tutti_worker_preemptions"] > 0:
                break
        else:
            pytest.fail("the choices never outgrew the pool")
    assert all(step["kv_pages"][1] == SMALL_POOL for step in cluster.steps())
