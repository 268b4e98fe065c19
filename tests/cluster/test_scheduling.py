"""Policies of the scheduler. Tests that none of them changes an answer: on every golden model, all modes and chunk
sizes give the same bits, whether requests are cold, warm, echoed, preempted, alone or beside decodes. test_golden.py
compares these bits with transformers."""

import functools
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from golden import BOUND, GENERATED, MODELS, log_softmax, pick, prompt_logprobs
from harness import ANSWER_S, GOLDENS, Server
from safetensors.numpy import load_file

PAGE_TOKENS = 16
# Numbers of output tokens of the decoders. The first is not reached while the questions run, and the second fits into
# the small pool.
ENDLESS, SHORT = 1500, 110
# Number of pages: enough for the longest prompt and its output, but not for the requests of `outgrowing` at their full
# lengths.
SMALL_POOL = 24
# The largest chunk per combination of flags. If the scheduler cuts prompts, --max-prefill-chunk-size limits a row of a
# step. If the engine cuts prompts, the flag limits a forward within a step. With --chunking=off, forwards have up to
# --max-step-tokens.
SCHEDULER = {
    "--max-prefill-chunk-size=1": 1,
    "--max-prefill-chunk-size=7 --prefill-sharing=first-come": 7,
    "--max-prefill-chunk-size=64 --long-prefill-token-threshold=33 --prefill-sharing=fair": 64,
    "--max-step-tokens=7": 7,
    "--target-itl-ms=1": 512,
    "--admission=optimistic --no-prefix-cache": 512,
}
WHOLE = (
    "--chunking=engine --max-prefill-chunk-size=1",
    "--chunking=engine --max-prefill-chunk-size=7 --prefill-sharing=fair",
    "--chunking=engine --max-prefill-chunk-size=64 --prefill-sharing=first-come",
    "--chunking=off",
    "--chunking=off --max-step-tokens=7",
)
PREEMPTED = (
    "--admission=optimistic --max-prefill-chunk-size=7",
    "--admission=optimistic --max-prefill-chunk-size=64 --no-prefix-cache",
    "--admission=optimistic --chunking=engine --max-prefill-chunk-size=7",
)
SAMPLED = {"temperature": 0.8, "seed": 7}


def each_model_with(every_flags):
    """Parametrises a test over all flags on each shape of golden model in f32. The flags also take turns on the models
    of the other seed, which have the same shapes, and on the shipped model, which has a tokenizer."""
    cases = [(f"seed0/{model}", flags) for model in MODELS for flags in every_flags]
    in_turn = ["shipped", *(f"seed1/{model}" for model in MODELS)]
    cases += [(in_turn[i % len(in_turn)], flags) for i, flags in enumerate(every_flags)]
    return pytest.mark.parametrize("served, flags", cases)


def questions(prompts):
    """Returns {name: request} for every kind of answer. `prompts` is keyed by length."""
    greedy = {"temperature": 0, "max_tokens": GENERATED}
    scored = {f"t{n} scored": {"prompt": ids, "prompt_logprobs": 2, "logprobs": 1} | greedy for n, ids in prompts.items()}
    return scored | {
        "t300": {"prompt": prompts[300], "logprobs": 3} | greedy,
        "t300 echoed": {"prompt": prompts[300], "echo": True, "logprobs": 3} | greedy,
        "t125 echoed": {"prompt": prompts[125], "echo": True, "logprobs": 2, "max_tokens": 5} | SAMPLED,
        "t125 sampled": {"prompt": prompts[125], "logprobs": 0, "max_tokens": 20, "top_p": 0.9} | SAMPLED,
    }


def decoders(prompts, max_tokens):
    """Returns requests that decode while the questions run."""
    ids = prompts[37][:20]
    others = {"max_tokens": max_tokens, "logprobs": 1, "temperature": 1}
    return [{"prompt": ids[i:] + ids[:i], "seed": i} | others for i in range(4)]


def outgrowing(prompts):
    """Returns requests with three choices each. The choices start at once in 23 pages, and need more pages before the
    last prefill ends."""
    both = {"prompt": [prompts[n] for n in (37, 7, 300)], "max_tokens": 60, "logprobs": 2} | SAMPLED
    return [both, both | {"echo": True}]


class Cluster:
    """A server of one of the models. It returns token ids, and no answer ends early."""

    def __init__(self, served, flags, directory):
        model = [] if served == "shipped" else ["--model", GOLDENS / served, "--skip-tokenizer-init"]
        self.trace = directory / "steps"
        self.server = Server("conductor", [*model, *flags, "--trace-steps", self.trace], directory).wait_until_ready()

    def ask(self, request):
        """Returns (the part of the answer that depends only on the request, its number of cached tokens)."""
        answer = self.server.complete(**request, ignore_eos=True, return_token_ids=True)
        return answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def stream(self, request, begun, enough):
        """Returns the part of a stream's answer that depends only on the request. The stream's first token sets
        `begun`, and the stream is read until `enough` is set."""
        whole = {"token_ids": [], "logprobs": {}}
        for event in self.server.stream("/v1/completions", **request, ignore_eos=True, return_token_ids=True):
            for choice in event["choices"]:
                begun.set()
                whole["token_ids"] += choice["token_ids"]
                for name, values in (choice["logprobs"] or {}).items():
                    whole["logprobs"].setdefault(name, []).extend(values)
            if enough.is_set():
                break
        return whole

    def beside_decoders(self, prompts, max_tokens):
        """Returns ({name: answer} of all questions, sent at once while the decoders decode; the decoders' answers)."""
        asked, decoding, enough = questions(prompts), decoders(prompts, max_tokens), threading.Event()
        begun = [threading.Event() for _ in decoding]
        with ThreadPoolExecutor(len(asked) + len(decoding)) as pool:
            streams = [pool.submit(self.stream, each, begun, enough) for each, begun in zip(decoding, begun)]
            try:
                assert all(event.wait(ANSWER_S) for event in begun)
                answers = dict(zip(asked, pool.map(lambda request: self.ask(request)[0], asked.values())))
            finally:
                # The decoders may end only now. Endless decoders have therefore decoded during all of these questions.
                enough.set()
            return answers, [stream.result() for stream in streams]

    def steps(self):
        """Returns the step trace, which is complete once the server has stopped."""
        return [json.loads(line) for line in self.trace.with_name("steps.rank0").read_text().splitlines()[1:]]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Returns a cached function of a model. It returns (prompts, {name: answer} of questions sent one after another
    with whole prompts, the answers of the decoders, the answers of `outgrowing`)."""

    @functools.cache
    def reference(served):
        golden = load_file(GOLDENS / ("seed0/qwen3" if served == "shipped" else served) / "goldens.safetensors")
        prompts = {n: golden[f"t{n}.input_ids"].tolist() for n in (1, 7, 37, 125, 300)}
        cluster = Cluster(served, ["--no-prefix-cache"], tmp_path_factory.mktemp("reference"))
        try:
            alone = {name: cluster.ask(question) for name, question in questions(prompts).items()}
            decoded = [cluster.ask(each)[0][0] for each in decoders(prompts, ENDLESS)]
            grown = [cluster.ask(each)[0] for each in outgrowing(prompts)]
        finally:
            cluster.server.stop()
        assert not any(cached for _, cached in alone.values())
        answers = {name: answer for name, (answer, _) in alone.items()}
        if served != "shipped":
            check_against_transformers(prompts, golden, answers)
        return prompts, answers, decoded, grown

    return reference


def check_against_transformers(prompts, golden, answers):
    for n in prompts:
        ids, greedy = golden[f"t{n}.input_ids"], golden[f"t{n}.greedy"]
        [answer] = answers[f"t{n} scored"]
        assert answer["token_ids"] == greedy.tolist()
        prompt = pick(log_softmax(golden[f"t{n}.logits"][:-1]), ids[1:])
        assert np.abs(prompt_logprobs(answer, ids) - prompt).max(initial=0.0) <= BOUND
        output = pick(log_softmax(golden[f"t{n}.greedy_logits"]), greedy)
        assert np.abs(np.array(answer["logprobs"]["token_logprobs"]) - output).max() <= BOUND
    # An echo reports the same logprobs of the prompt as `prompt_logprobs`.
    [echoed], [scored] = answers["t300 echoed"], answers["t300 scored"]
    echoed = echoed["logprobs"]["token_logprobs"]
    assert echoed[1:300] == prompt_logprobs(scored, golden["t300.input_ids"]).tolist()
    assert echoed[300:] == scored["logprobs"]["token_logprobs"]


def begins_with(whole, prefix):
    """True if the answer of a stream that was closed early is a prefix of the whole answer."""
    count = len(prefix["token_ids"])
    logprobs = {name: values[:count] for name, values in whole["logprobs"].items()}
    return count > 0 and prefix == {"token_ids": whole["token_ids"][:count], "logprobs": logprobs}


def check(references, served, flags, directory):
    """Checks all questions with a cold cache, with a warm cache, and while other requests decode. Returns the steps."""
    prompts, alone, decoded, _ = references(served)
    cluster = Cluster(served, flags, directory)
    try:
        asked = questions(prompts)
        warm = 0 if "--no-prefix-cache" in flags else 300 // PAGE_TOKENS * PAGE_TOKENS
        # An echo needs the logits of the whole prompt, which the prefix cache does not hold.
        for name, cached in (("t300", 0), ("t300", warm), ("t300 echoed", 0), ("t125 scored", 0)):
            assert cluster.ask(asked[name]) == (alone[name], cached), name
        answers, streams = cluster.beside_decoders(prompts, ENDLESS)
        cluster.server.wait_until_idle()
    finally:
        cluster.server.stop()
    for name in asked:
        assert answers[name] == alone[name], f"{name}, while others decode"
    assert all(map(begins_with, decoded, streams))
    return cluster.steps()


def prefills(step):
    return [end - begin for row in step["rows"] if "prefill" in row["walk"] for begin, end in [row["range"]]]


def have_decodes_beside_prefills(steps):
    return any(0 < len(prefills(step)) < len(step["rows"]) for step in steps)


@each_model_with(SCHEDULER)
def test_no_chunk_of_the_scheduler_changes_an_answer(references, tmp_path, served, flags):
    steps = check(references, served, flags.split(), tmp_path)
    # This checks the test itself: prompts were cut, also while others decoded.
    assert max(size for step in steps for size in prefills(step)) <= SCHEDULER[flags]
    assert have_decodes_beside_prefills(steps)


@each_model_with(WHOLE)
def test_no_forward_of_the_engine_changes_an_answer(references, tmp_path, served, flags):
    steps = check(references, served, flags.split(), tmp_path)
    assert max(size for step in steps for size in prefills(step)) == 300


@each_model_with(PREEMPTED)
def test_a_preempted_request_gives_the_same_answer(references, tmp_path, served, flags):
    prompts, alone, decoded, grown = references(served)
    page_bytes = {"shipped": 16 * 1024}.get(served, 24 * 1024)
    cluster = Cluster(served, [*flags.split(), "--kv-cache-memory", (SMALL_POOL + 1) * page_bytes], tmp_path)
    try:
        for request, expected in zip(outgrowing(prompts), grown):
            before = cluster.server.metrics()["tutti_worker_preemptions"]
            # On a busy machine, the first choices may end before the last one starts, so that all choices fit into the
            # pool. The test therefore tries several times.
            for _ in range(20):
                assert cluster.ask(request)[0] == expected
                if cluster.server.metrics()["tutti_worker_preemptions"] > before:
                    break
            else:
                pytest.fail("the choices never outgrew the pool")
        answers, streams = cluster.beside_decoders(prompts, SHORT)
        cluster.server.wait_until_idle()
    finally:
        cluster.server.stop()
    assert answers == alone
    assert all(map(begins_with, decoded, streams))
    assert all(step["kv_pages"][1] == SMALL_POOL for step in cluster.steps())
