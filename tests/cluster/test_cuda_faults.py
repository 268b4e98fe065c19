"""Injected faults of emulated GPUs. Tests that a worker whose GPU fails ends at once and names the kernel in its log,
and that its requests are replayed on other workers. Runs under emulated-gpu/run."""

import os

import pytest
from harness import GOLDENS, wait_for
from streams import Streams

pytestmark = pytest.mark.skipif("EMULATED_GPUS" not in os.environ, reason="only an emulated GPU fails on demand")

BODY = {"temperature": 0, "max_tokens": 100, "ignore_eos": True, "return_token_ids": True}
BODIES = [BODY | {"prompt": [i + 1] * (1 + 9 * (i % 4))} for i in range(24)]
# If a GPU hangs for half of this time, the worker logs the name of the kernel. After the whole time, the conductor ends
# the worker.
HANG_TIMEOUT_S = 6


def begun(kernel):
    return f"the kernel that began last is {kernel}"


# (fault, words of the log). A matrix product of cuBLASLt stores no kernel name, so the log names the kernel before the
# product.
FAULTS = (
    ("fail kernel=rotate_and_store_f32", f"CUDA_ERROR_LAUNCH_FAILED, \"unspecified launch failure\"); {begun('rotate_and_store_f32')}"),
    ("fail kernel=argmax", f"CUDA_ERROR_LAUNCH_FAILED, \"unspecified launch failure\"); {begun('argmax')}"),
    ("fail kernel=cublasLtMatmul at=3", "the kernel that began last is "),
    ("refuse kernel=embed_f32", "the launch of the kernel embed_f32: DriverError(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
    ("break kernel=gated_f32", "CUDA_ERROR_ECC_UNCORRECTABLE"),
    ("hang kernel=gated_f32", f"the GPU has not answered for {HANG_TIMEOUT_S // 2}."),
)


def serve(start, faults=""):
    env = {"EMULATED_GPUS": "2", "EMULATED_GPU_FAULTS": faults}
    model = ["--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init"]
    return start("--workers", 2, "--device", "cuda", "--hang-timeout", HANG_TIMEOUT_S, *model, env=env)


def tokens(answers):
    return [answer["choices"][0]["token_ids"] for answer in answers]


@pytest.fixture(scope="module")
def undisturbed(shared):
    """Returns the tokens of BODIES from GPUs without faults."""
    cluster = serve(shared)
    answers = tokens(Streams(cluster, "/v1/completions", BODIES).results())
    cluster.stop()
    return answers


@pytest.mark.parametrize("fault, said", FAULTS, ids=[fault for fault, _ in FAULTS])
def test_streams_survive_a_gpu_that_fails(start, undisturbed, tmp_path, fault, said):
    now = tmp_path / "now"
    cluster = serve(start, f"{fault} when={now}")
    before = set(cluster.workers())
    streams = Streams(cluster, "/v1/completions", BODIES)
    streams.wait_for_tokens(5)
    now.touch()
    assert tokens(streams.results()) == undisturbed
    assert not now.exists(), "the fault came too late"
    assert cluster.metrics()["tutti_request_replays_total"] >= 1
    wait_for("a replacement", lambda: cluster.metrics()["tutti_workers_ready"] == 2)
    assert len(before - set(cluster.workers())) == 1, "one worker is replaced"
    assert cluster.says(said)
    if fault.startswith("hang"):
        assert cluster.says(begun("gated_f32"))
    cluster.wait_until_idle()


def test_serving_allocates_nothing_and_a_start_without_memory_is_tried_again(start, undisturbed, tmp_path):
    """The largest step runs before the first request, so that no allocation can fail under load. The seventh allocation
    of the worker that replaces a failed one finds no memory, and the worker after that serves."""
    full, broken = tmp_path / "full", tmp_path / "broken"
    cluster = serve(start, f"out-of-memory at=7 when={full}; fail kernel=argmax when={broken}")
    assert tokens(Streams(cluster, "/v1/completions", BODIES).results()) == undisturbed
    full.touch()
    streams = Streams(cluster, "/v1/completions", BODIES)
    streams.wait_for_tokens(30)
    assert full.exists(), cluster.explain("a step has allocated")
    broken.touch()
    assert tokens(streams.results()) == undisturbed
    wait_for("a failed start", lambda: not full.exists())
    wait_for("a replacement", lambda: cluster.metrics()["tutti_workers_ready"] == 2)
    assert cluster.says("out of device memory")
    assert tokens(Streams(cluster, "/v1/completions", BODIES).results()) == undisturbed
    cluster.wait_until_idle()


def test_serving_a_mixture_of_experts_allocates_nothing(start, tmp_path):
    """The largest step runs before the first request. It allocates enough memory for any choice of experts."""
    full = tmp_path / "full"
    model = ["--model", GOLDENS / "bf16/qwen3_moe", "--skip-tokenizer-init"]
    env = {"EMULATED_GPUS": "1", "EMULATED_GPU_FAULTS": f"out-of-memory when={full}"}
    cluster = start("--device", "cuda", *model, env=env)
    full.touch()
    bodies = [BODY | {"prompt": [i + 1] * (1 + 40 * (i % 4)), "max_tokens": 24} for i in range(12)]
    Streams(cluster, "/v1/completions", bodies).results()
    assert full.exists(), cluster.explain("a step has allocated")
    cluster.wait_until_idle()
