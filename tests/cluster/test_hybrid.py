"""Qwen3.5 and Qwen3.5-MoE, whose delta nets keep state in slots, on a running cluster. Tests that an undisturbed
request on colocated workers gets the reference's answer, and that hand-over, preemption, cached prefixes and lost
workers change no digit of it."""

import os
import signal

import pytest
from golden import LENGTHS, answers, bound, greatest_deviation
from harness import GOLDENS, run_to_exit, wait_for
from hybrid import PAGE_BYTES, SLOT_BYTES
from safetensors.numpy import load_file
from streams import Streams
from topologies import DISAGGREGATED, TP_2_DISAGGREGATED, TP_2_TO_1, TWO_PREFILL, handovers, served_by

MODELS = ("qwen3_5", "qwen3_5_moe")
RUNNING = 6


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return request.param


@pytest.fixture(scope="module")
def served(model):
    return ("--model", GOLDENS / "seed0" / model, "--skip-tokenizer-init", "--max-step-tokens", 64)


@pytest.fixture(scope="module")
def golden(model):
    return load_file(GOLDENS / "seed0" / model / "goldens.safetensors")


def test_disaggregated_is_bit_identical_to_colocated(start, figure, model, served, golden):
    colocated = served_by(start, golden, "--workers", 1, *served)
    for topology in (DISAGGREGATED, TWO_PREFILL):
        assert served_by(start, golden, "--topology", topology, *served) == colocated, topology
    worst = greatest_deviation(golden, colocated)
    assert worst <= bound(model)
    figure(f"{model}, disaggregated prefill: equal to colocated; greatest |logprob - reference| {worst:.1e}")


def test_groups_match_the_reference_and_hand_over_their_state(start, figure, model, served, golden):
    colocated = served_by(start, golden, "--workers", 2, "--tp", 2, *served)
    worst = greatest_deviation(golden, colocated)
    assert worst <= bound(model)
    assert served_by(start, golden, "--topology", TP_2_DISAGGREGATED, *served) == colocated
    cluster = start("--topology", TP_2_TO_1, *served)
    worst = max(worst, greatest_deviation(golden, answers(cluster, golden)))
    assert worst <= bound(model) and handovers(cluster) == len(LENGTHS)
    figure(f"{model} tp 2, tp 2 disaggregated, tp 2 to tp 1: greatest |logprob - reference| {worst:.1e}")


def test_a_warm_prefix_gives_the_same_answer(start, served, golden):
    cluster = start("--workers", 1, *served)
    prompt = golden["t300.input_ids"].tolist()
    ask = dict(max_tokens=16, temperature=0, logprobs=3, return_token_ids=True)

    def answer(tokens):
        got = cluster.complete(prompt=tokens, **ask)
        return got["choices"][0], (got["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    cold = answer(prompt)
    assert cold[1] == 0 and cold[0]["token_ids"] == golden["t300.greedy"].tolist()
    # Another request uses the slot of the first one before the prefix is restored.
    answer(golden["t125.input_ids"].tolist())
    warm = answer(prompt)
    assert warm[0] == cold[0] and warm[1] > 0
    # Prompts that share different lengths of the cached prompt: up to a snapshot, before and after one, and up to the
    # middle of a block.
    fresh = start("--workers", 1, "--no-prefix-cache", *served)
    for shared in (15, 16, 17, 33, 64, 130, 256, 299):
        tokens = prompt[:shared] + [7, 3, 7, 250, 9]
        expected = fresh.complete(prompt=tokens, **ask)["choices"][0]
        assert answer(tokens)[0] == expected, shared


def bodies(golden, output):
    prompts = [golden[f"t{length}.input_ids"].tolist() for length in (37, 125, 7, 300)]
    ask = dict(max_tokens=output, temperature=0, logprobs=2, ignore_eos=True, return_token_ids=True)
    return [ask | dict(prompt=[*prompts[index % 4], index]) for index in range(16)]


def test_preempted_requests_give_the_same_answers(start, model, served, golden, figure):
    asked = bodies(golden, 60)
    cluster = start("--workers", 1, *served)
    alone = [Streams(cluster, "/v1/completions", [body]).results()[0] for body in asked]
    cluster.stop()
    # The memory is enough for the state of all running requests, for the pages of a few of them, and for some
    # snapshots.
    memory = (1 + RUNNING) * SLOT_BYTES + 40 * PAGE_BYTES
    for flags in ((), ("--no-prefix-cache",)):
        cluster = start(
            "--workers", 1, *served, "--admission", "optimistic", "--max-running-requests", RUNNING,
            "--kv-cache-memory", memory, *flags,
        )
        assert Streams(cluster, "/v1/completions", asked).results() == alone, flags
        preemptions = cluster.metrics()["tutti_worker_preemptions"]
        assert preemptions > 0, "the requests never outgrew the pool"
        cluster.wait_until_idle()
        cluster.stop()
        figure(f"{model}, 16 requests, {RUNNING} slots {' '.join(flags)}: {preemptions:.0f} preemptions, equal answers")


def test_more_requests_than_slots_all_end(start, model, served, golden, figure):
    # 64 requests, of which three may run. Slots for state are scarce, and are reserved before a request begins. In the
    # first case, there are pages for all requests that have a slot, so the others wait and none is preempted. In the
    # second case, there are pages for some prompts but not for their output, so requests are preempted: they lose slot
    # and pages, and start again.
    asked = [body for body in bodies(golden, 40) if len(body["prompt"]) < 64] * 8
    answers = []
    for pages, flags in ((400, ()), (8, ("--admission", "optimistic", "--no-prefix-cache"))):
        memory = (1 + 3) * SLOT_BYTES + pages * PAGE_BYTES
        cluster = start("--workers", 1, *served, "--max-running-requests", 3, "--kv-cache-memory", memory, *flags)
        got = Streams(cluster, "/v1/completions", asked).results()
        assert [len(answer["choices"][0]["token_ids"]) for answer in got] == [40] * 64
        assert all(got[index] == got[index % 8] for index in range(64))
        preemptions = cluster.metrics()["tutti_worker_preemptions"]
        assert (preemptions > 0) == bool(flags), preemptions
        cluster.wait_until_idle()
        cluster.stop()
        answers.append([answer["choices"] for answer in got])
        figure(f"{model}, 64 requests on 3 slots and {pages} pages {' '.join(flags)}: {preemptions:.0f} preemptions")
    assert answers[0] == answers[1]


def test_slots_are_fitted_to_the_memory_unless_their_number_is_set(start, served, golden, tmp_path):
    # Slots for 128 requests, the default, would take more than the whole memory.
    memory = 3 * SLOT_BYTES + 60 * PAGE_BYTES
    assert 128 * SLOT_BYTES > memory
    cluster = start("--workers", 1, *served, "--kv-cache-memory", memory)
    asked = bodies(golden, 8) * 4
    got = Streams(cluster, "/v1/completions", asked).results()
    assert [len(answer["choices"][0]["token_ids"]) for answer in got] == [8] * 64
    cluster.wait_until_idle()
    cluster.stop()
    args = [*served, f"--kv-cache-memory={memory}", "--max-running-requests=128", "--http=127.0.0.1:0", "--grpc=127.0.0.1:0"]
    code, log = run_to_exit("conductor", ["--workers=1", *args], tmp_path)
    assert code == 64, log
    assert "max_running_requests" in log and "is 128, the limit is " in log and "kv_cache_memory" in log


def test_a_lost_worker_changes_no_answer(start, served, golden):
    cluster = start("--workers", 2, *served)
    asked = bodies(golden, 800)[:6]
    undisturbed = Streams(cluster, "/v1/completions", asked).results()
    # On a busy machine, a death may come too late for a replay, so there are several tries.
    for _ in range(5):
        workers = cluster.workers()
        streams = Streams(cluster, "/v1/completions", asked)
        streams.stop_in_the_middle(workers, 4)
        os.kill(workers[0], signal.SIGKILL)
        os.kill(workers[1], signal.SIGCONT)
        assert streams.results() == undisturbed
        wait_for("a replacement", lambda: workers[0] not in cluster.workers() and cluster.metrics()["tutti_workers_ready"] == 2)
        if cluster.metrics().get("tutti_request_replays_total", 0) >= 1:
            break
    else:
        pytest.fail("all deaths came too late for a replay")
    cluster.wait_until_idle()
