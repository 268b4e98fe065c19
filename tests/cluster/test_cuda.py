"""The CUDA device over HTTP. Runs where the loader finds libcuda.so.1: on a GPU, or on an emulated one under
tests/emulated-gpu/run."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest
from harness import GOLDENS, run_to_exit
from safetensors.numpy import load_file
from test_golden import BOUND, LENGTHS, MODELS, answers, log_softmax, pick, prompt_logprobs

BUDGETS = (64, 2048)


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


on_a_gpu = pytest.mark.skipif(not has_driver(), reason="no libcuda.so.1: run under tests/emulated-gpu/run")


def serve(start, directory, *args):
    return start("--device", "cuda", "--model", directory, "--skip-tokenizer-init", *args)


def test_a_machine_without_cuda_learns_what_is_missing(tmp_path):
    bare = {"LD_LIBRARY_PATH": "/no/such/folder"}
    probe = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    if subprocess.run([sys.executable, "-c", probe], env=bare, capture_output=True).returncode == 0:
        pytest.skip("this machine has the NVIDIA driver")
    args = ["--device=cuda", f"--model={GOLDENS / 'seed0/qwen3'}", "--skip-tokenizer-init"]
    code, log = run_to_exit("conductor", [*args, "--http=127.0.0.1:0", "--grpc=127.0.0.1:0"], tmp_path, bare)
    assert code == 64, log
    assert "libcuda.so.1" in log and "/no/such/folder" in log and "panicked" not in log


@on_a_gpu
@pytest.mark.parametrize("model", MODELS)
def test_f32_weights_match_the_reference_on_a_gpu(start, figure, model):
    directory = GOLDENS / "seed0" / model
    golden = load_file(directory / "goldens.safetensors")
    worst = 0.0
    for budget in BUDGETS:
        cluster = serve(start, directory, "--max-step-tokens", budget)
        got = answers(cluster, golden)
        cluster.wait_until_idle()
        cluster.stop()
        for length, choice in got.items():
            ids, greedy = golden[f"t{length}.input_ids"], golden[f"t{length}.greedy"]
            assert choice["token_ids"] == greedy.tolist(), f"t{length} at a budget of {budget}"
            prompt = pick(log_softmax(golden[f"t{length}.logits"][:-1]), ids[1:])
            sampled = pick(log_softmax(golden[f"t{length}.greedy_logits"]), greedy)
            differences = [
                np.abs(prompt_logprobs(choice, ids) - prompt),
                np.abs(np.array(choice["logprobs"]["token_logprobs"]) - sampled),
            ]
            worst = max(worst, *(d.max(initial=0.0) for d in differences))
            assert worst <= BOUND, f"t{length} at a budget of {budget}"
    figure(f"cuda seed0/{model} f32: greatest |logprob - reference| {worst:.1e}, bound {BOUND:.0e}")


@on_a_gpu
def test_bf16_weights_deviate_no_more_than_bf16_does_on_a_gpu(start, figure):
    directory = GOLDENS / "bf16/qwen3"
    golden = load_file(directory / "goldens.safetensors")
    got = answers(serve(start, directory, "--max-step-tokens", 64), golden)
    ours, theirs = [], []
    for length in LENGTHS[1:]:
        ids = golden[f"t{length}.input_ids"]
        exact = pick(log_softmax(golden[f"t{length}.logits"][:-1]), ids[1:])
        ours.append(np.abs(prompt_logprobs(got[length], ids) - exact))
        theirs.append(np.abs(pick(log_softmax(golden[f"t{length}.logits_bf16"][:-1]), ids[1:]) - exact))
    ours, theirs = np.concatenate(ours).mean(), np.concatenate(theirs).mean()
    figure(f"cuda bf16/qwen3: mean |logprob - f32 reference| {ours:.4f}, transformers' own in bf16 {theirs:.4f}")
    assert ours <= 2 * theirs


@on_a_gpu
def test_sampled_tokens_are_those_of_the_cpu(start):
    """Every parameter of sampling, with two steps in flight on the GPU and one on the CPU."""
    asked = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "top_k": 7, "seed": 2},
        {"temperature": 1.0, "top_p": 0.7, "min_p": 0.02, "seed": 3},
        {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3, "seed": 4},
        {"temperature": 0, "frequency_penalty": 0.9},
        {"temperature": 0, "logit_bias": {"5": 4.0, "9": -3.0}},
    ]
    directory, got = GOLDENS / "seed0/qwen3", {}
    for device in ("cpu", "cuda"):
        cluster = start("--device", device, "--model", directory, "--skip-tokenizer-init")
        got[device] = [
            cluster.complete(prompt=[1, 2, 3, 4, 5 + i], max_tokens=24, return_token_ids=True, **parameters)["choices"][0][
                "token_ids"
            ]
            for i, parameters in enumerate(asked)
        ]
        cluster.stop()
    assert got["cuda"] == got["cpu"]
