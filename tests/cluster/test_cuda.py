"""The CUDA device over HTTP. The tests need libcuda.so.1 in the loader's path: on a GPU, or on an emulated one under
emulated-gpu/run."""

import functools
import os
import pathlib
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from bits import WHOLE, Cluster, check, check_preempted, check_prefixes, cut, prefills
from byte_level_model import byte_level_model
from golden import BOUND, GENERATED, MODELS, answers, greatest_deviation, mean_deviations
from gpus import has_driver
from harness import GOLDENS, events, run_to_exit, wait_for
from padding import check_padded
from safetensors.numpy import load_file
from streams import Streams
from structured_output import request
from structured_schemas import draw

# Flags that cut prompts into steps and forwards in different ways. The longest prompt has 300 tokens.
CUTS = (
    ("--max-step-tokens", 2048),
    ("--max-step-tokens", 64),
    ("--chunking", "engine", "--max-step-tokens", 64, "--max-prefill-chunk-size", 48),
    ("--chunking", "off", "--max-step-tokens", 64),
)


on_a_gpu = pytest.mark.skipif(not has_driver(), reason="no libcuda.so.1: run under emulated-gpu/run")


def serve(start, directory, *args, **options):
    return start("--device", "cuda", "--model", directory, "--skip-tokenizer-init", *args, **options)


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
@pytest.mark.parametrize("model", ("qwen3", "qwen3_moe", "qwen3_5"))
def test_padded_steps_change_no_digit_on_a_gpu(start, tmp_path, model):
    check_padded(start, tmp_path, model, 1, "--device", "cuda")


def check_warm_prefix(cluster, golden):
    """Checks that a prompt whose pages are in the prefix cache gets the same digits as without the cache."""
    length, page = 300, 16
    ask = dict(prompt=golden[f"t{length}.input_ids"].tolist(), max_tokens=GENERATED, temperature=0, logprobs=3)
    cold, warm = (cluster.complete(**ask, return_token_ids=True) for _ in range(2))
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (cold, warm)]
    assert cached == [0, (length - 1) // page * page]
    assert warm["choices"] == cold["choices"]
    assert warm["choices"][0]["token_ids"] == golden[f"t{length}.greedy"].tolist()


def check_echo(cluster, golden, got):
    """Checks that `echo` with logprobs gives the same digits as `prompt_logprobs` and `logprobs`."""
    for length, choice in got.items():
        ids = golden[f"t{length}.input_ids"].tolist()
        echo = dict(prompt=ids, max_tokens=GENERATED, temperature=0, echo=True, logprobs=1)
        first, *echoed = cluster.complete(**echo)["choices"][0]["logprobs"]["token_logprobs"]
        prompt = [entry[str(token)]["logprob"] for entry, token in zip(choice["prompt_logprobs"][1:], ids[1:])]
        assert first is None and echoed == prompt + choice["logprobs"]["token_logprobs"], f"t{length}"


@on_a_gpu
@pytest.mark.parametrize("model, ways", (*((model, CUTS) for model in MODELS), ("qwen3_moe", CUTS[1:3])))
def test_f32_weights_match_the_reference_however_prompts_are_cut(start, figure, model, ways):
    directory = GOLDENS / "seed0" / model
    golden = load_file(directory / "goldens.safetensors")
    first, worst = None, 0.0
    for cuts in ways:
        cluster = serve(start, directory, *cuts)
        check_warm_prefix(cluster, golden)
        got = answers(cluster, golden)
        worst = max(worst, greatest_deviation(golden, got))
        assert worst <= BOUND, cuts
        # The numbers in the JSON must be equal to the last digit.
        first = first or got
        assert got == first, cuts
        check_echo(cluster, golden, got)
        cluster.wait_until_idle()
        cluster.stop()
    figure(f"cuda seed0/{model} f32: greatest |logprob - reference| {worst:.1e}, bound {BOUND:.0e}")


@on_a_gpu
@pytest.mark.parametrize("model", (*MODELS, "qwen3_moe"))
def test_bf16_weights_deviate_no_more_than_bf16_does_on_a_gpu(start, figure, model):
    directory = GOLDENS / "bf16" / model
    golden = load_file(directory / "goldens.safetensors")
    ours, theirs = mean_deviations(golden, answers(serve(start, directory, "--max-step-tokens", 64), golden))
    figure(f"cuda bf16/{model}: mean |logprob - f32 reference| {ours:.4f}, transformers' own in bf16 {theirs:.4f}")
    assert ours <= 2 * theirs


@on_a_gpu
@pytest.mark.parametrize("model", (*MODELS, "qwen3_moe"))
def test_sampled_tokens_are_those_of_the_cpu(start, model):
    """Tests every sampling parameter, with two steps in flight on the GPU and one on the CPU."""
    asked = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "top_k": 7, "seed": 2},
        {"temperature": 1.0, "top_p": 0.7, "min_p": 0.02, "seed": 3},
        {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3, "seed": 4},
        {"temperature": 0, "frequency_penalty": 0.9},
        {"temperature": 0, "logit_bias": {"5": 4.0, "9": -3.0}},
    ]
    directory, got = GOLDENS / "seed0" / model, {}
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


@on_a_gpu
def test_constrained_tokens_are_those_of_the_cpu(start, tmp_path):
    """Tests masks that are made between two steps in flight, beside requests without a constraint."""
    model, got = byte_level_model(tmp_path), {}
    bodies = [request(number, schema) | {"max_tokens": 40} for number, (_, schema) in enumerate(draw(random.Random(39), 10))]
    free = [{"prompt": f"free {number}", "temperature": 1, "seed": number} for number in range(3)]
    bodies += [body | {"max_tokens": 60, "return_token_ids": True} for body in free]
    for device in ("cpu", "cuda"):
        # With a seed, copies and kernels of an emulated GPU run as late as CUDA allows.
        cluster = start("--device", device, "--model", model, env={"EMULATED_GPU_SEED": "5"})
        got[device] = Streams(cluster, "/v1/completions", bodies).results()
        assert cluster.metrics()["tutti_worker_masks"] > 0
        cluster.wait_until_idle()
        cluster.stop()
    assert got["cuda"] == got["cpu"]


# Variants per model. In each of them, the experts of a mixture get their rows in different tiles.
BITS = {"qwen3_yarn_swa": ("chunking off", "chunking engine", "cut 1", "cut 2", "prefix cache", "preempted")}
BITS |= {"qwen3_moe": ("cut 1", "preempted")}
# Bytes per page: keys and values of 3 layers, 2 heads of 32 elements, 16 tokens, 2 bytes per element.
PAGE_BYTES = 2 * 3 * 2 * 32 * 16 * 2


def on_gpu(model):
    return ("--device", "cuda", "--model", GOLDENS / "bf16" / model)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Returns a cached function of a model. It returns {name: answer} of test_bits' requests, sent one after another
    with whole prompts. It checks that they have the same bits when sent at once."""

    @functools.cache
    def reference(model):
        with Cluster([*on_gpu(model), *WHOLE], tmp_path_factory.mktemp("reference")) as cluster:
            assert cluster.server.says("on cuda, ")
            alone = cluster.alone()
            check(alone, cluster.at_once(), "batched")
        assert max(size for step in cluster.steps() for size in prefills(step)) == 701
        return alone

    return reference


@on_a_gpu
@pytest.mark.parametrize("model, variant", [(model, variant) for model in BITS for variant in BITS[model]])
def test_bits_depend_on_the_request_alone_on_a_gpu(references, tmp_path, model, variant):
    alone, flags = references(model), on_gpu(model)
    match variant:
        case "chunking off" | "chunking engine":
            with Cluster([*flags, "--chunking", variant.split()[1], "--max-step-tokens", 200], tmp_path) as cluster:
                check(alone, cluster.at_once(), variant)
        case "cut 1" | "cut 2":
            cuts, chunk = cut(variant, "cuda")
            with Cluster([*flags, *cuts], tmp_path) as cluster:
                check(alone, cluster.at_once(), f"{variant}: {cuts}")
            assert max(size for step in cluster.steps() for size in prefills(step)) <= chunk
        case "prefix cache":
            check_prefixes(flags, alone, tmp_path)
        case "preempted":
            check_preempted(flags, PAGE_BYTES, alone, tmp_path)


@on_a_gpu
def test_kernels_compiled_ahead_need_no_compiler(start, tmp_path):
    """`conductor kernels` fills a folder. A worker that gets this folder starts and serves without NVRTC."""
    folder, model = tmp_path / "kernels", GOLDENS / "bf16/qwen3"
    code, log = run_to_exit("conductor", ["kernels", "--arch", "sm_90a", "--arch", "sm_80", "--out", folder], tmp_path)
    assert code == 0 and "sm_90a: " in log and "sm_80: " in log, log
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert all(b".target sm_90a" in text or b".target sm_80" in text for text in made.values())
    # The loader's path has no compiler, and the cache is empty, so the kernels can only come from the folder.
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    without = [path for path in libraries if path and not (pathlib.Path(path) / "libnvrtc.so.13").exists()]
    bare = {"LD_LIBRARY_PATH": ":".join(without), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    probe = "import ctypes; ctypes.CDLL('libnvrtc.so.13')"
    if subprocess.run([sys.executable, "-c", probe], env=bare, capture_output=True).returncode == 0:
        pytest.skip("the loader finds NVRTC everywhere")
    args = ["--device", "cuda", "--model", model, "--skip-tokenizer-init"]
    refused, log = run_to_exit("conductor", [*args, "--http=127.0.0.1:0", "--grpc=127.0.0.1:0"], tmp_path, bare)
    assert refused == 64 and "libnvrtc.so.13 is missing" in log, log
    refused, log = run_to_exit("conductor", ["kernels", "--arch", "sm_90", "--out", folder], tmp_path, bare)
    assert refused == 64 and "sm_90: libnvrtc.so.13 is missing" in log, log
    asked = {"prompt": [1, 2, 3, 4, 5], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    cluster = start(*args, "--compiled-kernels", folder, env=bare)
    ahead = cluster.complete(**asked)["choices"][0]["token_ids"]
    cluster.stop()
    assert not (tmp_path / "cache").exists() and made == {path.name: path.read_bytes() for path in folder.iterdir()}
    # Kernels that the compiler makes for the present GPU give the same tokens.
    assert ahead == start(*args).complete(**asked)["choices"][0]["token_ids"]


@on_a_gpu
def test_the_memory_of_the_gpu_in_use_is_a_metric(start):
    def memory(planes):
        cluster = serve(start, GOLDENS / "bf16/qwen3", "--kv-cache-memory", planes)
        used = lambda: cluster.metrics().get("tutti_worker_device_memory_used_bytes", 0)
        # The first readings may be older than the planes.
        wait_for(f"a reading of at least {planes} bytes", lambda: used() >= planes)
        seen = used(), cluster.metrics()["tutti_worker_device_memory_total_bytes"]
        cluster.stop()
        return seen

    # All but the planes takes less than 100 MiB.
    (small, total), (large, same_total) = memory(1 << 20), memory(256 << 20)
    assert small < 100 << 20 and large < 356 << 20 < total == same_total, (small, large, total)


def hang_up(cluster, body, tokens):
    """Reads a stream up to this many tokens, and disconnects."""
    seen = 0
    with httpx.Client(base_url=cluster.url, timeout=120) as client:
        body = {"model": cluster.model, "stream": True} | body
        with client.stream("POST", "/v1/completions", json=body) as response:
            for event in events(response.iter_lines()):
                seen += sum(len(choice["token_ids"]) for choice in event.get("choices", ()))
                if seen >= tokens:
                    return


@on_a_gpu
@pytest.mark.parametrize("model", ("qwen3", "qwen3_5"))
def test_cancels_inside_two_steps_in_flight_leave_the_others_as_they_are(start, model):
    # With a seed, copies and kernels of an emulated GPU run as late as CUDA allows.
    cluster = serve(start, GOLDENS / "seed0" / model, env={"EMULATED_GPU_SEED": "5"})
    ask = dict(temperature=1, ignore_eos=True, return_token_ids=True)
    bodies = [ask | dict(prompt=[i + 1] * (1 + 11 * (i % 5)), seed=i, max_tokens=60) for i in range(12)]
    undisturbed = Streams(cluster, "/v1/completions", bodies).results()
    assert cluster.metrics().get("tutti_worker_void_rows", 0) == 0, "an end by length is planned"
    streams = Streams(cluster, "/v1/completions", bodies)
    with ThreadPoolExecutor(12) as pool:
        # These requests would last until the end of the context. Each is cancelled after some tokens.
        long = [ask | dict(prompt=[100 + i] * (1 + 40 * (i % 3)), seed=i, max_tokens=2000) for i in range(12)]
        list(pool.map(lambda i: hang_up(cluster, long[i], 1 + 3 * i), range(12)))
    assert streams.results() == undisturbed
    cluster.wait_until_idle()
    assert cluster.metrics()["tutti_worker_void_rows"] > 0, "no cancel fell into a step in flight"
