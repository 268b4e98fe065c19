"""On every instruction path of the CPU, an answer's bits depend on the request only: not on other requests, chunks,
cached prefixes, preemptions or threads. The numbers in the JSON answers must be equal to the last digit."""

import functools
import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import CPU_PATHS, GOLDENS, Server, cpu_paths

PAGE_TOKENS = 16
# Lengths of prompts, around the sizes of a page, of a tile and of the block of 512 keys in attention.
LENGTHS = (1, 16, 37, 130, 515, 701)
VOCABULARY = 320
# All models have weights in bfloat16. `wide` has random ones in matrices of several superblocks of block floats, and a
# window in the second of two layers.
MODELS = ("qwen3", "qwen3_yarn_swa", "wide")
WIDE = dict(hidden_size=320, intermediate_size=576, num_hidden_layers=2)
WIDE |= dict(use_sliding_window=True, sliding_window=100, max_window_layers=1)
# In pages: room for the longest request, but not for all choices of the request "grown" at their full lengths.
SMALL_POOL = 56
PAGE_BYTES_PER_LAYER = 4096
VARIANTS = ("batched", "two threads", "chunking off", "cut 1", "cut 2", "prefix cache", "preempted")


def each_path_and_model(paths):
    """Parametrises a test over all models on these paths. Paths that the machine lacks are skipped by name."""
    have, cases = cpu_paths(), []
    for path in paths:
        marks = () if path in have else pytest.mark.skip(reason=f"this machine has no {path} instructions")
        # The portable path takes longer for the wide model than for all other tests in sum.
        models = [model for model in MODELS if (path, model) != ("portable", "wide")]
        cases += [pytest.param(path, model, marks=marks) for model in models]
    return pytest.mark.parametrize("path, model", cases)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{model: flags that serve it}"""
    wide = tmp_path_factory.mktemp("wide")
    config = json.loads((GOLDENS / "bf16/qwen3/config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | WIDE))
    golden = {model: ["--model", GOLDENS / "bf16" / model] for model in MODELS if model != "wide"}
    return golden | {"wide": ["--model", wide, "--load-format", "dummy"]}


def tokens(length):
    rng = random.Random(length)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


PROMPTS = {length: tokens(length) for length in LENGTHS}
# A prompt that shares a prefix with the longest prompt.
RELATED = PROMPTS[701][:600] + tokens(55)


def requests():
    """{name: request}: scored prompts of all lengths, greedy and seeded choices, one and several."""
    greedy = {"temperature": 0, "max_tokens": 12, "logprobs": 2}
    scored = {f"t{n} scored": {"prompt": ids, "prompt_logprobs": 1} | greedy for n, ids in PROMPTS.items()}
    return scored | {
        "t701": {"prompt": PROMPTS[701]} | greedy,
        "t655, related": {"prompt": RELATED, "temperature": 0.9, "seed": 3, "max_tokens": 12, "logprobs": 2},
        "t515 sampled": {"prompt": PROMPTS[515], "temperature": 0.8, "seed": 7, "top_p": 0.9, "n": 2, "max_tokens": 12, "logprobs": 0},
        "grown": {"prompt": PROMPTS[37], "temperature": 1, "seed": 11, "n": 12, "max_tokens": 110, "logprobs": 1},
    }


class Cluster:
    """A conductor with one worker, asked for token ids and never ending a sequence early."""

    def __init__(self, flags, directory):
        self.trace = directory / "steps"
        flags = ["--workers", 1, "--skip-tokenizer-init", "--trace-steps", self.trace, *flags]
        self.server = Server("conductor", flags, directory).wait_until_ready()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop()

    def ask(self, request):
        """(the part of the answer that depends on the request only, its number of cached tokens)"""
        answer = self.server.complete(**request, ignore_eos=True, return_token_ids=True)
        return answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def alone(self):
        """{name: answer} of all requests, one after another"""
        return {name: self.ask(request)[0] for name, request in requests().items()}

    def at_once(self):
        """{name: answer} of all requests, sent at once"""
        asked = requests()
        with ThreadPoolExecutor(len(asked)) as pool:
            return dict(zip(asked, pool.map(lambda request: self.ask(request)[0], asked.values())))

    def steps(self):
        """The step trace. It is complete when the server has stopped."""
        return [json.loads(line) for line in self.trace.with_name("steps.rank0").read_text().splitlines()[1:]]


def prefills(step):
    return [end - begin for row in step["rows"] if "prefill" in row["walk"] for begin, end in [row["range"]]]


WHOLE = ("--max-step-tokens", 2048, "--no-prefix-cache")


@pytest.fixture(scope="module")
def references(models, tmp_path_factory):
    """A cached function of path and model: {name: answer} of requests one after another with whole prompts and one
    thread, and {name: answer} of the same requests sent at once."""

    @functools.cache
    def reference(path, model):
        directory = tmp_path_factory.mktemp("reference")
        with Cluster([*models[model], "--cpu-isa", path, "--threads", 1, *WHOLE], directory) as cluster:
            assert f"on cpu, {path}, 1 threads" in cluster.server.log()
            alone, batched = cluster.alone(), cluster.at_once()
        steps = cluster.steps()
        # Guards the test itself: prompts are whole, and share steps with other rows when sent at once.
        assert max(size for step in steps for size in prefills(step)) == 701
        assert any(prefills(step) and len(step["rows"]) > 1 for step in steps)
        return alone, batched

    return reference


def check(expected, got, what):
    for name in expected:
        assert got[name] == expected[name], f"{name}, {what}"


def cut(*seed):
    """(flags of random chunks and steps, the largest chunk)"""
    rng = random.Random(" ".join(seed))
    step = rng.randint(17, 300)
    chunk = rng.randint(5, step)
    return ["--max-step-tokens", step, "--max-prefill-chunk-size", chunk, "--threads", 1], chunk


@pytest.mark.parametrize("variant", VARIANTS)
@each_path_and_model(CPU_PATHS)
def test_bits_depend_on_the_request_alone(models, references, tmp_path, path, model, variant):
    alone, batched = references(path, model)
    if variant == "batched":
        return check(alone, batched, variant)
    flags = [*models[model], "--cpu-isa", path]
    match variant:
        case "two threads":
            with Cluster([*flags, "--threads", 2, *WHOLE], tmp_path) as cluster:
                check(alone, cluster.at_once(), variant)
            assert f"on cpu, {path}, 2 threads" in cluster.server.log()
        case "chunking off":
            with Cluster([*flags, "--chunking", "off", "--threads", 1], tmp_path) as cluster:
                check(alone, cluster.at_once(), variant)
            assert max(size for step in cluster.steps() for size in prefills(step)) == 701
        case "cut 1" | "cut 2":
            cuts, chunk = cut(variant, path, model)
            with Cluster([*flags, *cuts], tmp_path) as cluster:
                check(alone, cluster.at_once(), f"{variant}: {cuts}")
            assert max(size for step in cluster.steps() for size in prefills(step)) <= chunk
        case "prefix cache":
            check_prefixes(flags, alone, tmp_path)
        case "preempted":
            page_bytes = PAGE_BYTES_PER_LAYER * (WIDE["num_hidden_layers"] if model == "wide" else 3)
            check_preempted(flags, page_bytes, alone, tmp_path)


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
        # On a busy machine the choices may start so late that all of them fit.
        for _ in range(10):
            check(alone, cluster.at_once(), "preempted")
            if cluster.server.metrics()["tutti_worker_preemptions"] > 0:
                break
        else:
            pytest.fail("the choices never outgrew the pool")
    assert all(step["kv_pages"][1] == SMALL_POOL for step in cluster.steps())


@each_path_and_model(("avx512", "avx512-vnni"))
def test_paths_that_multiply_in_integers_give_the_bits_of_avx2(references, path, model):
    """On a CPU without dot products of bfloat16, bfloat16 weights are stored in block floating point, with exact
    products."""
    check(references("avx2", model)[0], references(path, model)[0], path)
