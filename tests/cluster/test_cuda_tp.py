"""A model divided among GPUs that use NCCL. Tests that answers are those of the reference, that tokens are those of the
CPU, and that a group restarts after the loss of a rank. Runs under emulated-gpu/run with 4 GPUs, or on as many real
ones."""

import os
import pathlib
import signal

import pytest
from golden import BOUND, LENGTHS, MODELS, answers, bound, check_balance, greatest_deviation
from gpus import has_driver, has_gpus
from harness import GOLDENS, run_to_exit, wait_for
from safetensors.numpy import load_file
from streams import Streams

pytestmark = pytest.mark.skipif(not has_driver(), reason="no libcuda.so.1: run under emulated-gpu/run")
emulated = pytest.mark.skipif("EMULATED_GPUS" not in os.environ, reason="only an emulated GPU fails on demand")

COLLECTIVE_TIMEOUT_S = 4


def serve(start, model, workers, tp, *args, env=None):
    """Starts a cluster with one GPU per worker."""
    if not has_gpus(workers):
        pytest.skip(f"{workers} GPUs are needed")
    directory = ["--model", GOLDENS / "seed0" / model, "--skip-tokenizer-init"]
    env = {"EMULATED_GPUS": str(workers)} | (env or {})
    cluster = start("--device", "cuda", "--workers", workers, "--tp", tp, *directory, *args, env=env)
    assert cluster.says('transport="nccl"', workers)
    return cluster


@pytest.mark.parametrize("tp, model", [(tp, model) for tp in (2, 4) for model in MODELS] + [(2, "qwen3_5")])
def test_groups_of_gpus_match_the_reference(start, figure, tp, model):
    golden = load_file(GOLDENS / "seed0" / model / "goldens.safetensors")
    worst, first = 0.0, None
    for budget in (2048, 64):
        cluster = serve(start, model, tp, tp, "--max-step-tokens", budget)
        got = answers(cluster, golden)
        assert set(got) == set(LENGTHS)
        worst = max(worst, greatest_deviation(golden, got))
        assert worst <= bound(model), f"tp {tp} at a budget of {budget}: {worst}"
        first = first or got
        assert got == first, f"a budget of {budget} changes bits"
        cluster.wait_until_idle()
        cluster.stop()
    figure(f"cuda {model} tp {tp}: greatest |logprob - reference| {worst:.1e}, bound {bound(model):.0e}")


@pytest.mark.parametrize(
    "model, layers, division",
    (("qwen3_moe", (0, 2), ()), ("qwen3_moe", (0, 2), ("--ep",)), ("qwen3_moe_nonorm", (1,), ("--ep",))),
    ids=("width", "whole", "whole, weights as they are"),
)
def test_experts_divided_among_gpus_match_the_reference(start, figure, model, layers, division):
    golden = load_file(GOLDENS / "seed0" / model / "goldens.safetensors")
    cluster = serve(start, model, 2, 2, *division, "--max-step-tokens", 64)
    worst = greatest_deviation(golden, answers(cluster, golden))
    check_balance(cluster, layers)
    figure(f"cuda {model} tp 2 {' '.join(division)}: greatest |logprob - reference| {worst:.1e}, bound {BOUND:.0e}")
    assert worst <= BOUND


# Requests of three kinds. The ranks send only their likeliest token, the logits of their best tokens, or all of their
# logits.
ASKED = (
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 0.9},
    {"temperature": 0, "logit_bias": {"5": 4.0, "9": -3.0}},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_k": 7, "seed": 2},
    {"temperature": 1.3, "top_k": 200, "top_p": 0.9, "seed": 3},
    {"temperature": 1.0, "top_p": 0.7, "min_p": 0.02, "seed": 4},
    {"temperature": 0.9, "top_k": 20, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3, "seed": 5},
    {"temperature": 0.7, "repetition_penalty": 1.2, "seed": 6},
    {"temperature": 1.0, "top_k": 9, "min_tokens": 24, "logprobs": 2, "seed": 7},
)
PROMPTED = [ask | {"prompt": [1, 2, 3, 4, 5 + i], "max_tokens": 24, "return_token_ids": True} for i, ask in enumerate(ASKED)]


def tokens(answers):
    return [answer["choices"][0]["token_ids"] for answer in answers]


@pytest.mark.parametrize("tp", (2, 4))
def test_sampled_tokens_of_groups_are_those_of_the_cpu(start, tp):
    cpu = start("--device", "cpu", "--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init")
    wanted = tokens(Streams(cpu, "/v1/completions", PROMPTED).results())
    cpu.stop()
    cluster = serve(start, "qwen3", tp, tp)
    assert tokens(Streams(cluster, "/v1/completions", PROMPTED).results()) == wanted


BODY = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
BODIES = [
    BODY | {"prompt": [i + 1] * (1 + 9 * (i % 4))} | ({"temperature": 1, "top_k": 9, "seed": i} if i % 3 else {})
    for i in range(24)
]


@pytest.fixture(scope="module")
def undisturbed(shared):
    """Returns the tokens of BODIES from a group of two ranks without faults. All such groups give the same tokens."""
    cluster = serve(shared, "qwen3", 2, 2)
    answers = tokens(Streams(cluster, "/v1/completions", BODIES).results())
    cluster.stop()
    return answers


def check_loss(cluster, undisturbed, gone, lose):
    """Runs 24 streams, during which `lose` ends a group. Checks that no stream is lost or wrong, and that new ranks
    replace `gone`."""
    before = cluster.workers_by_rank()
    streams = Streams(cluster, "/v1/completions", BODIES)
    streams.wait_for_tokens(5)
    lose(before)
    assert tokens(streams.results()) == undisturbed
    assert cluster.metrics()["tutti_request_replays_total"] >= 1

    def replaced():
        now = cluster.workers_by_rank()
        return sorted(now) == sorted(before) and all((now[rank] != before[rank]) == (rank in gone) for rank in now)

    wait_for(f"new processes for ranks {gone}", replaced)
    wait_for("all workers ready", lambda: cluster.metrics().get("tutti_workers_ready") == len(before))
    assert tokens(Streams(cluster, "/v1/completions", BODIES).results()) == undisturbed, "the new group answers as the old"
    cluster.wait_until_idle()


@pytest.mark.parametrize("workers, victim", ((2, 0), (2, 1), (4, 3)), ids=("leader", "follower", "of two groups"))
def test_streams_survive_a_rank_that_is_killed(start, undisturbed, workers, victim):
    cluster = serve(start, "qwen3", workers, 2)
    group = (victim // 2 * 2, victim // 2 * 2 + 1)
    check_loss(cluster, undisturbed, group, lambda pids: os.kill(pids[victim], signal.SIGKILL))


@emulated
@pytest.mark.parametrize("device", (0, 1), ids=("leader", "follower"))
def test_streams_survive_a_rank_that_never_joins_a_collective(start, undisturbed, tmp_path, device):
    now = tmp_path / "now"
    env = {"EMULATED_GPU_FAULTS": f"never-joins kernel=ncclAllReduce device={device} when={now}"}
    cluster = serve(start, "qwen3", 2, 2, "--collective-timeout", COLLECTIVE_TIMEOUT_S, env=env)
    check_loss(cluster, undisturbed, (0, 1), lambda _: now.touch())
    assert not now.exists(), "the fault came too late"
    missing = f"of 2 within {COLLECTIVE_TIMEOUT_S}s"
    assert "a collective (all-reduce) has not ended at rank" in cluster.log() and missing in cluster.log()


@emulated
def test_a_group_without_nccl_learns_what_is_missing(tmp_path):
    for folder in os.environ["LD_LIBRARY_PATH"].split(":"):
        for library in pathlib.Path(folder).glob("lib*.so*"):
            if "nccl" not in library.name and not (tmp_path / library.name).exists():
                (tmp_path / library.name).symlink_to(library)
    env = {"LD_LIBRARY_PATH": str(tmp_path), "EMULATED_GPUS": "2"}
    args = ["--device=cuda", "--workers=2", "--tp=2", f"--model={GOLDENS / 'seed0/qwen3'}", "--skip-tokenizer-init"]
    code, log = run_to_exit("conductor", [*args, "--http=127.0.0.1:0", "--grpc=127.0.0.1:0"], tmp_path, env)
    assert code == 64, log
    assert "libnccl.so.2 is missing" in log and str(tmp_path) in log and "panicked" not in log


@emulated
def test_two_ranks_on_one_gpu_are_refused(tmp_path):
    args = ["--device=cuda", "--workers=2", "--tp=2", f"--model={GOLDENS / 'seed0/qwen3'}", "--skip-tokenizer-init"]
    env = {"EMULATED_GPUS": "1"}
    code, log = run_to_exit("conductor", [*args, "--http=127.0.0.1:0", "--grpc=127.0.0.1:0"], tmp_path, env)
    assert code == 64, log
    assert "invalid usage" in log and "Each rank needs a GPU of its own" in log, log
