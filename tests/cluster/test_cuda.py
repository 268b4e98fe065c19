"""The CUDA device over HTTP. Runs where the loader finds libcuda.so.1: on a GPU, or on an emulated one under
tests/emulated-gpu/run."""

import ctypes
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from harness import GOLDENS, run_to_exit, wait_for
from safetensors.numpy import load_file
from streams import Streams
from test_bits import WHOLE, Cluster, check, check_preempted, check_prefixes, cut, prefills
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


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """{name: answer} of the requests of test_bits, one after another with whole prompts; the same bits at once."""
    with Cluster([*ON_GPU, *WHOLE], tmp_path_factory.mktemp("reference")) as cluster:
        assert "on cuda, " in cluster.server.log()
        alone = cluster.alone()
        check(alone, cluster.at_once(), "batched")
    assert max(size for step in cluster.steps() for size in prefills(step)) == 701
    return alone


ON_GPU = ("--device", "cuda", "--model", GOLDENS / "bf16/qwen3_yarn_swa")
# Bytes of a page: keys and values of 3 layers, 2 heads of 32 elements, 16 tokens, 2 bytes per element.
PAGE_BYTES = 2 * 3 * 2 * 32 * 16 * 2


@on_a_gpu
@pytest.mark.parametrize("variant", ("chunking off", "chunking engine", "cut 1", "cut 2", "prefix cache", "preempted"))
def test_bits_depend_on_the_request_alone_on_a_gpu(alone, tmp_path, variant):
    match variant:
        case "chunking off" | "chunking engine":
            with Cluster([*ON_GPU, "--chunking", variant.split()[1], "--max-step-tokens", 200], tmp_path) as cluster:
                check(alone, cluster.at_once(), variant)
        case "cut 1" | "cut 2":
            cuts, chunk = cut(variant, "cuda")
            with Cluster([*ON_GPU, *cuts], tmp_path) as cluster:
                check(alone, cluster.at_once(), f"{variant}: {cuts}")
            assert max(size for step in cluster.steps() for size in prefills(step)) <= chunk
        case "prefix cache":
            check_prefixes(ON_GPU, alone, tmp_path)
        case "preempted":
            check_preempted(ON_GPU, PAGE_BYTES, alone, tmp_path)


@on_a_gpu
def test_kernels_compiled_ahead_need_no_compiler(start, tmp_path):
    """`conductor kernels` fills a folder. A worker that is told of it starts without NVRTC and serves."""
    folder, model = tmp_path / "kernels", GOLDENS / "bf16/qwen3"
    code, log = run_to_exit("conductor", ["kernels", "--arch", "sm_90a", "--arch", "sm_80", "--out", folder], tmp_path)
    assert code == 0 and "sm_90a: " in log and "sm_80: " in log, log
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert all(b".target sm_90a" in text or b".target sm_80" in text for text in made.values())
    # The loader's path without the compiler. The cache is empty, so nothing else has the kernels.
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    without = [path for path in libraries if path and not (pathlib.Path(path) / "libnvrtc.so.13").exists()]
    bare = {"LD_LIBRARY_PATH": ":".join(without), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    probe = "import ctypes; ctypes.CDLL('libnvrtc.so.13')"
    if subprocess.run([sys.executable, "-c", probe], env=bare, capture_output=True).returncode == 0:
        pytest.skip("the loader finds NVRTC everywhere")
    args = ["--device", "cuda", "--model", model, "--skip-tokenizer-init"]
    refused, log = run_to_exit("conductor", [*args, "--http=127.0.0.1:0", "--grpc=127.0.0.1:0"], tmp_path, bare)
    assert refused == 64 and "libnvrtc.so.13 is missing" in log, log
    asked = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    cluster = start(*args, "--compiled-kernels", folder, env=bare)
    ahead = cluster.complete(**asked)["choices"][0]["token_ids"]
    cluster.stop()
    assert not (tmp_path / "cache").exists() and made == {path.name: path.read_bytes() for path in folder.iterdir()}
    # The compiler's own code for the GPU that is there computes the same.
    assert ahead == start(*args).complete(**asked)["choices"][0]["token_ids"]


@pytest.mark.skipif("EMULATED_GPUS" not in os.environ, reason="only an emulated GPU fails on demand")
@pytest.mark.parametrize("fault", ("fail kernel=attention_f32", "fail kernel=argmax", "refuse kernel=embed_f32"))
def test_streams_survive_a_gpu_that_fails(start, tmp_path, fault):
    """24 streams on two GPUs, one of which fails: the worker ends at once, and its requests are replayed elsewhere."""
    now = tmp_path / "now"
    env = {"EMULATED_GPUS": "2", "EMULATED_GPU_FAULTS": f"{fault} when={now}"}
    args = ["--workers", 2, "--device", "cuda", "--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init"]
    cluster = start(*args, env=env)
    body = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    bodies = [body | {"prompt": [i + 1] * (1 + 9 * (i % 4))} for i in range(24)]
    undisturbed = Streams(cluster, "/v1/completions", bodies).results()
    streams = Streams(cluster, "/v1/completions", bodies)
    streams.wait_for_tokens(5)
    now.touch()
    answers = streams.results()
    assert [a["choices"][0]["token_ids"] for a in answers] == [a["choices"][0]["token_ids"] for a in undisturbed]
    assert not now.exists(), "the fault came too late"
    assert cluster.metrics()["tutti_request_replays_total"] >= 1
    wait_for("a replacement", lambda: cluster.metrics()["tutti_workers_ready"] == 2)
    assert "device lost" in cluster.log()
