"""Compares a running cluster's answers over HTTP with Hugging Face transformers.

Every logprob is within its bound of the reference, and all greedy tokens are equal. Answers are bit-identical for every
step budget, whatever the chunks and the other requests of a step.
"""

import json
import shutil

import pytest
from golden import BOUND, MODELS, answers, bound, check_balance, greatest_deviation, mean_deviations
from harness import GOLDENS
from safetensors.numpy import load_file

# Families whose layers are variants of the layers of MODELS. They run with one token budget per step, because
# worker/models/tests covers all budgets.
VARIANTS = ("llama3", "smollm", "qwen2", "mistral", "qwen3_embedding", "qwen3_moe", "qwen3_moe_nonorm")
VARIANTS += ("qwen3_5", "qwen3_5_text_tied", "qwen3_5_moe", "qwen3_5_moe_text")
VARIANTS += ("deepseek_v4", "v4_sliding", "v4_hca", "v4_csa_all", "v4_hash")
BUDGETS = (8, 64, 2048)


def serve(start, directory, budget):
    return start("--workers", 2, "--model", directory, "--skip-tokenizer-init", "--max-step-tokens", budget)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", ("seed0", "seed1"))
def test_f32_weights_match_the_reference_under_every_step_budget(start, figure, seed, model):
    directory = GOLDENS / seed / model
    golden = load_file(directory / "goldens.safetensors")
    first, worst = None, 0.0
    for budget in BUDGETS:
        cluster = serve(start, directory, budget)
        got = answers(cluster, golden)
        cluster.wait_until_idle()
        cluster.stop()
        worst = max(worst, greatest_deviation(golden, got))
        assert worst <= BOUND, f"a budget of {budget}"
        # The numbers in the JSON must be equal to the last digit.
        first = first or got
        assert got == first, f"a budget of {budget} changes bits that {BUDGETS[0]} gives"
    figure(f"{seed}/{model} f32: greatest |logprob - reference| {worst:.1e}, bound {BOUND:.0e}")


@pytest.mark.parametrize("model", VARIANTS)
@pytest.mark.parametrize("seed", ("seed0", "seed1"))
def test_other_families_match_the_reference(start, figure, seed, model):
    directory = GOLDENS / seed / model
    golden = load_file(directory / "goldens.safetensors")
    cluster = serve(start, directory, 64)
    worst = greatest_deviation(golden, answers(cluster, golden))
    figure(f"{seed}/{model} f32: greatest |logprob - reference| {worst:.1e}, bound {bound(model):.0e}")
    assert worst <= bound(model)


@pytest.mark.parametrize("division", ((), ("--ep",)), ids=("width", "whole"))
@pytest.mark.parametrize("model, layers", (("qwen3_moe", (0, 2)), ("qwen3_5_moe", range(5)), ("deepseek_v4", range(5))))
def test_experts_divided_among_ranks_match_the_reference(start, figure, model, layers, division):
    directory = GOLDENS / "seed0" / model
    golden = load_file(directory / "goldens.safetensors")
    args = ("--workers", 2, "--tp", 2, *division, "--model", directory, "--skip-tokenizer-init")
    cluster = start(*args, "--max-step-tokens", 64)
    worst = greatest_deviation(golden, answers(cluster, golden))
    check_balance(cluster, layers)
    limit = bound(model)
    figure(f"{model}, 2 ranks {' '.join(division)}: greatest |logprob - reference| {worst:.1e}, bound {limit:.0e}")
    assert worst <= limit


@pytest.mark.parametrize("model", MODELS)
def test_bf16_weights_deviate_no_more_than_bf16_does(start, figure, model):
    directory = GOLDENS / "bf16" / model
    golden = load_file(directory / "goldens.safetensors")
    cluster = serve(start, directory, 64)
    ours, theirs = mean_deviations(golden, answers(cluster, golden))
    figure(f"bf16/{model}: mean |logprob - f32 reference| {ours:.4f}, transformers' own in bf16 {theirs:.4f}")
    # The limit is twice the deviation of the reference's own bf16 run. A wrong operation would deviate far more.
    assert ours <= 2 * theirs


def changed(directory, target, **keys):
    """Copies a checkpoint, with other keys in its config."""
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | keys))
    return target


def test_files_hold_against_the_config(start, tmp_path):
    """Transformers keep an LM head that differs from the embedding, though the config ties the two. Tensors that the
    model does not use are named in the log."""
    directory = GOLDENS / "seed0/qwen3"
    golden = load_file(directory / "goldens.safetensors")
    cluster = serve(start, changed(directory, tmp_path / "tied", tie_word_embeddings=True), 64)
    assert greatest_deviation(golden, answers(cluster, golden)) <= BOUND
    assert cluster.says("tie_word_embeddings") and "does not use" not in cluster.log()
    layers = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    cluster = serve(start, changed(directory, tmp_path / "short", num_hidden_layers=layers - 1), 64)
    said = f"the files have {layers} layers, but config.json asks for {layers - 1}"
    assert cluster.says(said)
