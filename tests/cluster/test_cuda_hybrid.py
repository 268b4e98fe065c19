"""Qwen3.5 on the CUDA device over HTTP. Tests that answers are those of the reference, and have the same digits with
all chunks, with concurrent requests, after cached prefixes and preemptions, and with state from another worker. Runs
under emulated-gpu/run, or on a GPU."""

import pytest
from golden import GENERATED, answers, bound, greatest_deviation, mean_deviations
from gpus import has_driver, has_gpus
from harness import GOLDENS
from hybrid import PAGE_BYTES, SLOT_BYTES
from safetensors.numpy import load_file
from streams import Streams
from topologies import DISAGGREGATED, handovers

pytestmark = pytest.mark.skipif(not has_driver(), reason="no libcuda.so.1: run under emulated-gpu/run")

ENGINE = ("--chunking", "engine", "--max-step-tokens", 64, "--max-prefill-chunk-size", 48)
# Flags that cut prompts into steps and forwards in different ways.
CUTS = {"qwen3_5": (("--max-step-tokens", 2048), ENGINE)}
CUTS |= dict.fromkeys(("qwen3_5_text_tied", "qwen3_5_moe"), (("--max-step-tokens", 64),))
RUNNING = 6


def flags(model):
    return ("--device", "cuda", "--model", GOLDENS / model, "--skip-tokenizer-init")


@pytest.mark.parametrize("model", CUTS)
def test_f32_weights_match_the_reference_however_prompts_are_cut(start, figure, model):
    golden = load_file(GOLDENS / "seed0" / model / "goldens.safetensors")
    first, worst = None, 0.0
    for cuts in CUTS[model]:
        cluster = start(*flags(f"seed0/{model}"), *cuts)
        got = answers(cluster, golden)
        worst = max(worst, greatest_deviation(golden, got))
        assert worst <= bound(model), cuts
        # The numbers in the JSON must be equal to the last digit.
        first = first or got
        assert got == first, cuts
        cold = {key: got[300][key] for key in ("token_ids", "logprobs")}
        ask = dict(prompt=golden["t300.input_ids"].tolist(), max_tokens=GENERATED, temperature=0, logprobs=1)
        warm = cluster.complete(**ask, return_token_ids=True)
        # An engine that divides a step's prompts into several forward passes saves no snapshot.
        assert (warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == (cuts != ENGINE), cuts
        assert {key: warm["choices"][0][key] for key in cold} == cold, cuts
        cluster.wait_until_idle()
        cluster.stop()
    figure(f"cuda seed0/{model} f32: greatest |logprob - reference| {worst:.1e}, bound {bound(model):.0e}")


def test_bf16_weights_deviate_no_more_than_bf16_does(start, figure):
    golden = load_file(GOLDENS / "bf16/qwen3_5/goldens.safetensors")
    ours, theirs = mean_deviations(golden, answers(start(*flags("bf16/qwen3_5"), "--max-step-tokens", 64), golden))
    figure(f"cuda bf16/qwen3_5: mean |logprob - f32 reference| {ours:.4f}, transformers' own in bf16 {theirs:.4f}")
    assert ours <= 2 * theirs


def test_states_depend_on_the_request_alone(start, figure):
    model, golden = flags("seed0/qwen3_5"), load_file(GOLDENS / "seed0/qwen3_5/goldens.safetensors")
    # No two requests share a prefix. Requests with a shared prefix would share pages and need less memory.
    text = golden["t300.input_ids"].tolist()
    prompts = [text[first : first + length] for first in (0, 130) for length in (37, 120, 7, 90)]
    ask = dict(max_tokens=40, temperature=0, logprobs=2, ignore_eos=True, return_token_ids=True)
    asked = [ask | dict(prompt=prompt) for prompt in prompts]

    def ended(cluster):
        cluster.wait_until_idle()
        cluster.stop()

    cluster = start(*model, "--no-prefix-cache")
    alone = [Streams(cluster, "/v1/completions", [body]).results()[0] for body in asked]
    ended(cluster)
    # The memory is enough for the state of all running requests, for the pages of a few of them, and for some
    # snapshots.
    memory = (1 + RUNNING) * SLOT_BYTES + 36 * PAGE_BYTES
    small = ("--admission", "optimistic", "--max-running-requests", RUNNING, "--kv-cache-memory", memory)
    cluster = start(*model, "--max-step-tokens", 64, *small)
    assert Streams(cluster, "/v1/completions", asked).results() == alone
    preemptions = cluster.metrics()["tutti_worker_preemptions"]
    assert preemptions > 0, "the requests never outgrew the pool"
    ended(cluster)
    figure(f"cuda qwen3_5, 8 requests, {RUNNING} slots: {preemptions:.0f} preemptions, equal answers")
    if not has_gpus(2):
        pytest.skip("2 GPUs are needed for a hand-over")
    cluster = start("--topology", DISAGGREGATED, *model, env={"EMULATED_GPUS": "2"})
    assert Streams(cluster, "/v1/completions", asked).results() == alone
    assert handovers(cluster) == len(asked)
    ended(cluster)
