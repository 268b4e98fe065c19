"""Quantised checkpoints, `--quantize`, and keys and values in fp8, on GPUs. Tests that a GPU holds weights as stored,
that answers are near the reference's on the dequantised weights, and that their bits do not depend on the batch. Runs
under emulated-gpu/run, or on a real GPU."""

import pytest
from bits import WHOLE, Cluster, check, check_preempted, check_prefixes
from golden import LENGTHS, answers, greatest_deviation, log_softmax, pick, prompt_logprobs
from gpus import has_driver, has_gpus
from harness import GOLDENS, REPO, run_to_exit
from safetensors.numpy import load_file

FORMATS = REPO / "target/formats"
pytestmark = [
    pytest.mark.skipif(not has_driver(), reason="no libcuda.so.1: run under emulated-gpu/run"),
    pytest.mark.skipif(not FORMATS.exists(), reason="tests/formats/generate has not run"),
]

# The models of tests/formats that are served, each with the plain model whose own deviation in bf16 is the bound.
SERVED = {
    "goldens/qwen3-fp8_blocks": "qwen3",
    "goldens/llama3-w4_group": "llama3",
    "goldens/qwen3-awq": "qwen3",
    "goldens/llama3-w4_channel_asym": "llama3",
    "goldens/qwen3_moe-w8a8_asym": "qwen3_moe",
    "goldens/qwen3_moe-fp8_ct_blocks": "qwen3_moe",
    "goldens/llama3-mxfp4": "llama3",
    "goldens-gguf/qwen3_moe-q4_1": "qwen3_moe",
    "goldens-gguf/smollm-q5_0": "smollm",
}


# The arguments of `start` for a golden model. A `Cluster` adds the first one itself.
WITHOUT_TOKENIZER = "--skip-tokenizer-init"


def flags(name, *more):
    model = FORMATS / name
    return ("--device", "cuda", "--model", model / "model.gguf" if "gguf" in name else model, *more)


def deviation(golden, got):
    """Returns the mean deviation of the logprobs of prompts from the reference."""
    off = []
    for length in LENGTHS[1:]:
        ids = golden[f"t{length}.input_ids"]
        exact = pick(log_softmax(golden[f"t{length}.logits"][:-1]), ids[1:])
        off.extend(abs(prompt_logprobs(got[length], ids) - exact))
    return sum(off) / len(off)


def bound_of(plain):
    """Returns twice the deviation of transformers' bf16 from its f32, for a plain model."""
    golden = load_file(GOLDENS / "bf16" / plain / "goldens.safetensors")
    off = []
    for length in LENGTHS[1:]:
        ids = golden[f"t{length}.input_ids"]
        exact, own = (pick(log_softmax(golden[f"t{length}.{of}"][:-1]), ids[1:]) for of in ("logits", "logits_bf16"))
        off.extend(abs(own - exact))
    return 2 * sum(off) / len(off)


@pytest.mark.parametrize("name", SERVED)
def test_quantised_checkpoints_match_the_reference_as_bf16_does(start, figure, name):
    golden = load_file(FORMATS / name / "goldens.safetensors")
    got = {}
    for budget in (2048, 64):
        cluster = start(*flags(name, WITHOUT_TOKENIZER, "--max-step-tokens", budget))
        assert cluster.says("quantised ones as stored")
        got[budget] = answers(cluster, golden)
        cluster.wait_until_idle()
        cluster.stop()
    assert got[64] == got[2048], "a budget changes bits"
    ours, most = deviation(golden, got[64]), bound_of(SERVED[name])
    figure(f"cuda {name}: mean |logprob - reference| {ours:.4f}, bound {most:.4f}")
    assert ours <= most


# The models that a GPU quantises, and those flags of a CPU with which it multiplies the same weights. A CPU rounds the
# activations of int8 to eight bits, so the bound is that of tests/cluster/test_quantize.py.
AT_LOAD = {
    "int4": ("llama3", ("--no-quantized-activations",), None),
    "int8": ("qwen3_moe", (), 0.1),
}


@pytest.mark.parametrize("quantize", AT_LOAD)
def test_weights_that_a_gpu_quantises_answer_as_on_a_cpu(start, figure, quantize):
    model, exact, most = AT_LOAD[quantize]
    directory = GOLDENS / "bf16" / model
    golden = load_file(directory / "goldens.safetensors")
    common = ("--model", directory, WITHOUT_TOKENIZER, "--quantize", quantize)
    got = {}
    for device, more in (("cpu", exact), ("cuda", ())):
        cluster = start("--device", device, *common, *more)
        assert cluster.says(f"weights in {quantize}")
        got[device] = answers(cluster, golden)
        cluster.wait_until_idle()
        cluster.stop()
    off = []
    for length in LENGTHS[1:]:
        ids = golden[f"t{length}.input_ids"]
        off.extend(abs(prompt_logprobs(got["cuda"][length], ids) - prompt_logprobs(got["cpu"][length], ids)))
    ours, most = sum(off) / len(off), most or bound_of(model)
    figure(f"cuda {model} in {quantize}: mean |logprob - the CPU's| {ours:.4f}, bound {most:.4f}")
    assert 0 < ours <= most


# Models whose bits are compared. The one of codes has plain attention in f32, which takes minutes on an emulated GPU.
OF_CODES = flags("goldens/qwen3-fp8_blocks")
IN_FP8 = ("--device", "cuda", "--model", GOLDENS / "bf16/qwen3_yarn_swa", "--kv-cache-dtype", "fp8")
# Bytes per page in fp8: keys and values of 3 layers, 2 heads of 32 elements, 16 tokens.
PAGE_BYTES = 2 * 3 * 2 * 32 * 16


def check_bits(model, folder):
    """Checks that answers have the same bits one after another, at once, and in chunks. Returns them."""
    whole, chunks = folder / "whole", folder / "chunks"
    whole.mkdir(), chunks.mkdir()
    with Cluster([*model, *WHOLE], whole) as cluster:
        alone = cluster.alone()
        check(alone, cluster.at_once(), "batched")
    with Cluster([*model, "--chunking", "engine", "--max-step-tokens", 70], chunks) as cluster:
        check(alone, cluster.at_once(), "chunks")
    return alone


def test_bits_of_codes_depend_on_the_request_alone(tmp_path):
    check_bits(OF_CODES, tmp_path)


def test_bits_of_keys_in_fp8_depend_on_the_request_alone(tmp_path):
    alone = check_bits(IN_FP8, tmp_path)
    folders = [tmp_path / name for name in ("prefixes", "preempted")]
    for folder in folders:
        folder.mkdir()
    check_prefixes(IN_FP8, alone, folders[0])
    check_preempted(IN_FP8, PAGE_BYTES, alone, folders[1])


# The greatest deviation of one logprob, and of the mean. A key or value that lies in the middle of two e4m3 up to the
# last bits of an f32 is rounded to the other one if sums have another order. A cache in full precision is 0.02 off.
FLIPPED, MEAN = 5e-3, 1e-4


@pytest.mark.parametrize("name", ("llama3", "qwen2", "qwen3", "qwen3_moe", "qwen3_5"))
def test_keys_and_values_in_fp8_match_a_reference_whose_cache_is_in_fp8(start, figure, name):
    golden = load_file(FORMATS / "goldens-kv" / name / "goldens.safetensors")
    got = answers(start(*flags(f"goldens-kv/{name}", WITHOUT_TOKENIZER, "--kv-cache-dtype", "fp8")), golden)
    worst, mean = greatest_deviation(golden, got), deviation(golden, got)
    figure(f"cuda goldens-kv/{name}: |logprob - reference| greatest {worst:.1e}, mean {mean:.1e}")
    assert worst <= FLIPPED and mean <= MEAN


@pytest.mark.parametrize("name, division", (("llama3-w4_group16", ()), ("qwen3_moe-fp8_channel", ("--ep",))))
def test_groups_of_gpus_hold_codes(start, figure, name, division):
    if not has_gpus(2):
        pytest.skip("two GPUs are needed")
    golden = load_file(FORMATS / "goldens" / name / "goldens.safetensors")
    args = flags(f"goldens/{name}", WITHOUT_TOKENIZER, "--workers", 2, "--tp", 2, *division)
    got = answers(start(*args, env={"EMULATED_GPUS": "2"}), golden)
    ours, most = deviation(golden, got), bound_of(name.split("-")[0])
    figure(f"cuda {name} tp 2: mean |logprob - reference| {ours:.4f}, bound {most:.4f}")
    assert ours <= most


def test_a_group_that_cuts_a_group_of_codes_is_refused_by_name(tmp_path):
    if not has_gpus(2):
        pytest.skip("two GPUs are needed")
    args = [*flags("goldens/llama3-w4_group", WITHOUT_TOKENIZER), "--workers=2", "--tp=2", "--http=127.0.0.1:0", "--grpc=127.0.0.1:0"]
    code, log = run_to_exit("conductor", args, tmp_path, {"EMULATED_GPUS": "2"})
    assert code == 64 and "down_proj" in log and "group" in log, log
