"""Disaggregated prefill and decode. Tests that answers are bit-identical, even after workers die, and that no page and
no request is left.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import re
import signal
import subprocess

import numpy as np
import pytest
from golden import BOUND, LENGTHS, MODELS, answers, greatest_deviation
from harness import GOLDENS, free_port, wait_for
from hosts import ELSEWHERE
from safetensors.numpy import load_file
from sampling_zoo import sampling_zoo
from simulated import VOCAB, sampled
from streams import Streams
from topologies import DISAGGREGATED, TP_2_DISAGGREGATED, TP_2_TO_1, TWO_PREFILL, all_accepted, handovers, served_by

SIM = ("--device", "sim")
QWEN3 = ("--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init")


def loads(cluster, name):
    """Returns {rank: value} of a worker's gauge."""
    text = cluster.client.get("/metrics").text
    return {int(rank): float(value) for rank, value in re.findall(rf'^tutti_{name}\{{worker="(\d+)"\}} (\S+)', text, re.M)}


def listening_on_tcp(pid):
    """Inodes of the TCP sockets on which a process listens."""
    links = [os.readlink(link) for link in pathlib.Path(f"/proc/{pid}/fd").iterdir() if link.exists() or link.is_symlink()]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    lines = [line.split() for file in ("tcp", "tcp6") for line in pathlib.Path(f"/proc/{pid}/net/{file}").open()][1:]
    listening = {fields[9] for fields in lines if fields[3] == "0A"}
    return own & listening


@pytest.mark.parametrize("model", (*MODELS, "deepseek_v4", "v4_sliding"))
def test_disaggregated_is_bit_identical_to_colocated(start, figure, model):
    directory = GOLDENS / "seed0" / model
    golden = load_file(directory / "goldens.safetensors")
    served = ("--model", directory, "--skip-tokenizer-init", "--max-step-tokens", 64)
    colocated = served_by(start, golden, "--workers", 1, *served)
    for topology in (DISAGGREGATED, TWO_PREFILL):
        assert served_by(start, golden, "--topology", topology, *served) == colocated, topology
    worst = greatest_deviation(golden, colocated)
    assert worst <= BOUND
    figure(f"{model}, disaggregated prefill: equal to colocated; greatest |logprob - reference| {worst:.1e}")


def test_two_ranks_on_either_side_are_bit_identical_to_two_ranks(start):
    directory = GOLDENS / "seed0/qwen3"
    golden, served = load_file(directory / "goldens.safetensors"), ("--model", directory, "--skip-tokenizer-init")
    colocated = served_by(start, golden, "--workers", 2, "--tp", 2, *served)
    assert served_by(start, golden, "--topology", TP_2_DISAGGREGATED, *served) == colocated


def test_each_of_two_ranks_carries_half_of_a_hand_over(start, figure):
    cluster = start("--topology", TP_2_DISAGGREGATED, *QWEN3)
    cluster.complete(prompt=list(range(300)), max_tokens=20, temperature=0, ignore_eos=True)

    def carried():
        text = cluster.client.get("/metrics").text
        found = re.findall(r'^tutti_worker_transfer_bytes\{worker="(\d+)",transport="\w+"\} (\d+)', text, re.M)
        return [sum(int(bytes_) for rank, bytes_ in found if rank == wanted) for wanted in ("0", "1")]

    # Each rank sends 19 pages of keys and values: 3 layers, 32 floats per head, one of the two heads.
    half = 19 * 16 * 2 * 3 * 32 * 4
    wait_for("both ranks' counts", lambda: carried() == [half, half])
    ranks = cluster.workers_by_rank()
    assert not any(listening_on_tcp(pid) for pid in ranks.values())
    assert len(re.findall("listens for planes.*socket", cluster.log())) >= 2
    figure(f"hand-over from two ranks to two: {half} bytes by each rank, of {2 * half}")


@pytest.mark.parametrize("victim", (1, 3), ids=("prefill", "decode"))
def test_every_stream_survives_the_loss_of_one_rank_of_either_side(start, victim):
    faults = ("--heartbeat-timeout", 2, "--collective-timeout", 2, "--max-replays", 4)
    cluster = start("--topology", TP_2_DISAGGREGATED, *faults, *QWEN3)
    ask = dict(max_tokens=1000, temperature=1, ignore_eos=True, logprobs=1, return_token_ids=True)
    bodies = [ask | dict(prompt=list(range(seed, seed + 200)), seed=seed) for seed in range(6)]
    undisturbed = Streams(cluster, "/v1/completions", bodies).results()
    streams = Streams(cluster, "/v1/completions", bodies)
    # Waits until all requests are accepted for the second time. A prefill worker that has handed over all of them may
    # then die without a replay.
    all_accepted(cluster, bodies + bodies)
    ranks = cluster.workers_by_rank()
    pid = ranks[victim]
    if victim == 3:
        streams.stop_in_the_middle([ranks[2], pid], 3)
    os.kill(pid, signal.SIGKILL)
    if victim == 3:
        # The conductor may have ended it already, because its group is broken.
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[2], signal.SIGCONT)
    for body, expected, got in zip(bodies, undisturbed, streams.results()):
        assert expected == got, body
    wait_for("a replacement", lambda: cluster.workers_by_rank().get(victim, pid) != pid)
    cluster.wait_until_ready()
    cluster.wait_until_idle()
    assert cluster.metrics().get("tutti_request_replays_total", 0) >= (victim == 3)


@pytest.mark.parametrize("model", MODELS)
def test_a_prefill_of_two_ranks_continues_on_one_within_the_tolerance(start, figure, model):
    directory = GOLDENS / "seed0" / model
    golden = load_file(directory / "goldens.safetensors")
    cluster = start("--topology", TP_2_TO_1, "--model", directory, "--skip-tokenizer-init")
    first = answers(cluster, golden)
    worst = greatest_deviation(golden, first)
    assert worst <= BOUND
    # The prompts are now in the prefix cache, which must change no bit.
    assert answers(cluster, golden) == first and handovers(cluster) == 2 * len(LENGTHS)
    cluster.wait_until_idle()
    figure(f"{model}, tp 2 to tp 1: greatest |logprob - reference| {worst:.1e}, bound {BOUND:.0e}")


def small_zoo():
    """Yields requests with every kind of state that a hand-over must transfer, and requests that end before a
    hand-over. """
    ask = dict(prompt=list(range(1, 60)), max_tokens=20, temperature=1, seed=3, return_token_ids=True)
    yield ask
    yield ask | dict(max_tokens=1)
    yield ask | dict(max_tokens=2, ignore_eos=True)
    yield ask | dict(max_tokens=0, echo=True, logprobs=2)
    yield ask | dict(echo=True, logprobs=3, prompt_logprobs=2)
    yield ask | dict(temperature=0, logprobs=0)
    yield ask | dict(min_tokens=10, stop_token_ids=list(range(100)))
    # Outputs that end with the first token, with the second one, or at the earliest with the third one.
    yield ask | dict(logit_bias={"9": 100}, stop_token_ids=[9])
    yield ask | dict(logit_bias={"9": 100, "10": 99}, presence_penalty=2, stop_token_ids=[10])
    yield ask | dict(logit_bias={"9": 100}, stop_token_ids=[9], min_tokens=3)
    yield ask | dict(presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.3, ignore_eos=True)
    yield ask | dict(logit_bias={"9": 5, "10": -100}, top_k=20, top_p=0.9, min_p=0.01, n=4)
    yield ask | dict(prompt=[7])
    yield ask | dict(prompt=[[1, 2, 3], [4, 5], list(range(16)), list(range(33))])


def test_all_state_that_an_answer_depends_on_is_handed_over(start):
    bodies = list(small_zoo()) + [body | dict(max_tokens=100, min_tokens=0) for body in sampling_zoo()]
    colocated = start("--workers", 1, *QWEN3)
    expected = Streams(colocated, "/v1/completions", bodies).results()
    disaggregated = start("--topology", DISAGGREGATED, *QWEN3)
    # In the second round, the prefix cache contains the prompts.
    for _ in range(2):
        for body, want, got in zip(bodies, expected, Streams(disaggregated, "/v1/completions", bodies).results()):
            assert want == got, body
    disaggregated.wait_until_idle()


def test_cached_prompt_tokens_are_reported_as_when_colocated(start):
    ask = dict(prompt=list(range(200)), max_tokens=4, temperature=0)
    usages = []
    for shape in (("--workers", 1), ("--topology", DISAGGREGATED)):
        cluster = start(*shape, *QWEN3)
        usages.append([cluster.complete(**ask)["usage"] for _ in range(2)])
    assert usages[0] == usages[1]
    assert usages[1][1]["prompt_tokens_details"]["cached_tokens"] > 0


def test_prefill_workers_prefill_and_decode_workers_decode(start):
    cluster = start("--topology", DISAGGREGATED, *SIM)
    bodies = [dict(prompt=[seed] * 400, max_tokens=60, seed=seed, ignore_eos=True, return_token_ids=True) for seed in range(6)]
    Streams(cluster, "/v1/completions", bodies).results()
    text = cluster.client.get("/metrics").text
    went = dict(re.findall(r'^tutti_worker_transfer_bytes\{worker="0",transport="(\w+)"\} (\d+)', text, re.M))
    # The simulated device has 8 bytes of state per token.
    assert went == {"shared_memory": str(6 * 400 * 8), "tcp": "0"}
    assert 'tutti_worker_transfers{worker="0",outcome="handed_over"} 6' in text
    rows = {(int(rank), kind): int(n) for rank, kind, n in re.findall(r'^tutti_step_rows_total\{worker="(\d+)",kind="(\w+)"\} (\d+)', text, re.M)}
    assert rows.get((0, "decode"), 0) == 0 and rows[0, "last_prefill"] == 6
    assert rows[1, "decode"] == 6 * 59 and rows.get((1, "last_prefill"), 0) + rows.get((1, "prefill"), 0) == 0


def test_pages_that_the_decode_worker_has_are_not_sent(start):
    cluster = start("--topology", TWO_PREFILL, *QWEN3)
    page = 16 * 2 * 3 * 2 * 32 * 4
    ask = dict(prompt=[index * 7 % 300 for index in range(400)], temperature=1, ignore_eos=True, logprobs=1, return_token_ids=True)
    expected, usages, sent = [], [], []
    colocated = start("--workers", 1, *QWEN3)
    for seed in range(3):
        # The last prompt includes the first request's output, which only the decode worker has computed.
        more = expected[0]["token_ids"] if seed == 2 else []
        body = ask | dict(prompt=ask["prompt"] + more, seed=seed, max_tokens=60)
        expected.append(colocated.complete(**body)["choices"][0])
        answer = cluster.complete(**body)
        assert answer["choices"][0] == expected[-1]
        usages.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        sent.append(cluster.metrics()["tutti_worker_transfer_bytes"])
    # The last token of a prompt is always computed, so its page is always sent.
    assert [after - before for before, after in zip([0, *sent], sent)] == [25 * page, page, page]
    assert usages == [0, 384, 400], "cached tokens on the prefill worker"
    cluster.wait_until_idle()


@pytest.mark.skipif(subprocess.run([*ELSEWHERE, "true"], capture_output=True).returncode, reason="no namespaces here")
def test_between_hosts_planes_go_over_tcp_and_give_the_same_bits(start, spawn, tmp_path):
    topology, secret, address = tmp_path / "topology.toml", tmp_path / "secret", f"127.0.0.1:{free_port()}"
    topology.write_text(DISAGGREGATED.read_text() + "spawn = false\n")
    secret.write_text("open sesame\n")
    far = ("--topology", topology, "--worker-listen", address, "--join-token-file", secret)
    cluster = start(*far, *QWEN3, ready=False)
    spawn("worker", "--conductor", f"http://{address}", "--rank", 1, "--join-token-file", secret, under=ELSEWHERE)
    cluster.wait_until_ready()
    ask = dict(prompt=list(range(300)), max_tokens=40, temperature=1, seed=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    colocated = start("--workers", 1, *QWEN3)
    assert cluster.complete(**ask)["choices"] == colocated.complete(**ask)["choices"]
    text = cluster.client.get("/metrics").text
    went = dict(re.findall(r'^tutti_worker_transfer_bytes\{worker="0",transport="(\w+)"\} (\d+)', text, re.M))
    # 19 pages of keys and values: 3 layers, 2 heads of 32 floats.
    assert went == {"tcp": str(19 * 16 * 2 * 3 * 2 * 32 * 4), "shared_memory": "0"}
    cluster.wait_until_idle()


@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGSTOP), ids=("killed", "stopped"))
@pytest.mark.parametrize("victim", (0, 1), ids=("prefill", "decode"))
def test_every_stream_survives_the_loss_of_either_side(start, victim, number):
    cluster = start("--topology", DISAGGREGATED, "--heartbeat-timeout", 2, *SIM)
    bodies, expected = [], []
    for seed in range(16):
        prompt = [seed] * (20 if seed % 2 else 3000)
        expected.append(sampled(prompt, seed, 1, 120))
        bodies.append(dict(prompt=prompt, seed=seed, temperature=1, max_tokens=120, ignore_eos=True, return_token_ids=True))
    streams = Streams(cluster, "/v1/completions", bodies)
    all_accepted(cluster, bodies)
    wait_for("some that decode", lambda: sum(seen > 5 for seen in streams.seen) >= 2, every=0.002)
    pid = cluster.workers_by_rank()[victim]
    os.kill(pid, number)
    assert [answer["choices"][0]["token_ids"] for answer in streams.results()] == expected
    wait_for("a replacement", lambda: cluster.workers_by_rank().get(victim, pid) != pid)
    cluster.wait_until_ready()
    cluster.wait_until_idle()
    assert cluster.metrics()["tutti_request_replays_total"] >= 1
    assert cluster.metrics().get("tutti_workers_fenced_total", 0) == (number == signal.SIGSTOP)


@pytest.mark.parametrize("victim", (0, 1), ids=("prefill", "decode"))
def test_an_expired_lease_costs_an_attempt_and_no_worker(start, victim):
    # The worker is stopped for longer than the transfer timeout, but not for long enough to count as dead.
    waits = ("--transfer-timeout", 1, "--heartbeat-timeout", 30, "--max-replays", 20)
    cluster = start("--topology", DISAGGREGATED, *waits, *SIM)
    bodies = [dict(prompt=[s] * 3500, seed=s, temperature=1, max_tokens=30, ignore_eos=True, return_token_ids=True) for s in range(32)]
    streams = Streams(cluster, "/v1/completions", bodies)
    pid = cluster.workers_by_rank()[victim]
    replayed = lambda: cluster.metrics().get("tutti_request_replays_total", 0) > 0
    unsent = lambda: "planes did not get across" in cluster.log()
    # A stop has no effect if no hand-over is running. The test then waits for another hand-over.
    for attempt in range(1, 6):
        before = handovers(cluster) if attempt > 1 else 0
        wait_for("a hand-over", lambda: handovers(cluster) > before, every=0.002)
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_for("a lease to run out" if victim == 0 else "a push to fail", unsent if victim else replayed, seconds=5)
            break
        except AssertionError:
            if attempt == 5:
                raise
        finally:
            os.kill(pid, signal.SIGCONT)
    expected = [sampled([s] * 3500, s, 1, 30) for s in range(32)]
    assert [answer["choices"][0]["token_ids"] for answer in streams.results()] == expected
    cluster.wait_until_idle()
    assert cluster.workers_by_rank()[victim] == pid and cluster.metrics()["tutti_request_replays_total"] >= 1


@pytest.mark.parametrize("victim", (0, 1), ids=("prefill", "decode"))
def test_a_drained_worker_finishes_its_requests(start, victim):
    cluster = start("--topology", DISAGGREGATED, *SIM)
    bodies = [dict(prompt=[s] * 800, seed=s, temperature=1, max_tokens=60, ignore_eos=True, return_token_ids=True) for s in range(8)]
    streams = Streams(cluster, "/v1/completions", bodies)
    all_accepted(cluster, bodies)
    streams.wait_for_tokens(1 if victim else 0)
    pid = cluster.workers_by_rank()[victim]
    os.kill(pid, signal.SIGTERM)
    expected = [sampled([s] * 800, s, 1, 60) for s in range(8)]
    assert [answer["choices"][0]["token_ids"] for answer in streams.results()] == expected
    assert cluster.metrics().get("tutti_request_replays_total", 0) == 0
    wait_for("a replacement", lambda: cluster.workers_by_rank().get(victim, pid) != pid)
    cluster.wait_until_ready()
    cluster.wait_until_idle()


def test_answers_are_bit_identical_after_both_sides_die(start):
    # The death of the prefill worker, the death of the decode worker and the hand-over may each cost a request an
    # attempt. The workers are stopped for as long as this process needs, which must not look like a death, so the
    # heartbeat timeout is long.
    cluster = start("--topology", DISAGGREGATED, "--max-replays", 4, "--heartbeat-timeout", 60, *QWEN3)
    bodies = list(sampling_zoo())
    undisturbed = Streams(cluster, "/v1/completions", bodies).results()
    prefill, decode = (cluster.workers_by_rank()[rank] for rank in (0, 1))
    streams = Streams(cluster, "/v1/completions", bodies, stopped=[prefill, decode])
    streams.stop_in_the_middle([prefill, decode], len(bodies), tokens=15)
    os.kill(decode, signal.SIGKILL)
    os.kill(prefill, signal.SIGKILL)
    new = wait_for("both again", lambda: (r := cluster.workers_by_rank()).keys() == {0, 1} and {prefill, decode}.isdisjoint(r.values()) and r)
    streams.stop_in_the_middle([new[1]], len(bodies) // 2, tokens=60)
    os.kill(new[1], signal.SIGKILL)
    for body, expected, got in zip(bodies, undisturbed, streams.results()):
        assert expected == got, body
    assert cluster.metrics()["tutti_request_replays_total"] >= 2
    cluster.wait_until_idle()


def test_the_death_of_one_prefill_worker_leaves_the_other(start):
    cluster = start("--topology", TWO_PREFILL, *SIM)
    bodies = [dict(prompt=[s] * 2000, seed=s, max_tokens=40, ignore_eos=True, temperature=1, return_token_ids=True) for s in range(10)]
    streams = Streams(cluster, "/v1/completions", bodies)
    wait_for("both prefill", lambda: {0, 1} <= {rank for rank, steps in loads(cluster, "worker_steps").items() if steps > 0})
    os.kill(cluster.workers_by_rank()[0], signal.SIGKILL)
    expected = [sampled([s] * 2000, s, 1, 40) for s in range(10)]
    assert [answer["choices"][0]["token_ids"] for answer in streams.results()] == expected
    cluster.wait_until_idle()


def test_many_requests_share_a_small_decode_pool(start):
    # The pool is enough for about three requests. The others wait before their prefill.
    cluster = start("--topology", TWO_PREFILL, "--kv-cache-memory", "4MiB", *SIM)
    pages = loads(cluster, "kv_pages_total")
    most = cluster.client.get("/v1/models").json()["data"][0].get("max_model_len", 4096)
    length = int(min(pages[2] * 16 // 3, most)) - 100
    assert length > 50, (pages, most)

    def ask(seed):
        body = dict(prompt=[seed] * length, seed=seed, max_tokens=60, ignore_eos=True, temperature=1, return_token_ids=True)
        return cluster.complete(**body)["choices"][0]["token_ids"] == sampled([seed] * length, seed, 1, 60)

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        assert all(pool.map(ask, range(40)))
    assert handovers(cluster) == 40
    cluster.wait_until_idle()


def test_clients_that_leave_leave_nothing_in_any_stage_of_their_request(start):
    cluster = start("--topology", DISAGGREGATED, *SIM)
    rng = np.random.default_rng(3)

    def leave(seed):
        body = dict(prompt=[seed % VOCAB] * int(rng.integers(1, 3800)), seed=seed, max_tokens=200, ignore_eos=True)
        stream = cluster.stream("/v1/completions", **body)
        for _ in range(seed % 4):
            next(stream)
        stream.close()

    def late(seed):
        body = dict(prompt=[1] * 3500, max_tokens=200, ignore_eos=True, timeout_ms=1 + 15 * (seed % 10))
        return cluster.post("/v1/completions", body).status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        leaving, timed_out = pool.map(leave, range(40)), pool.map(late, range(40))
        list(leaving)
        assert set(timed_out) <= {200, 504}
    cluster.wait_until_idle()
    assert cluster.complete(prompt=[1, 2], max_tokens=3, seed=0, temperature=1, ignore_eos=True, return_token_ids=True)[
        "choices"
    ][0]["token_ids"] == sampled([1, 2], 0, 1, 3)


def test_disaggregated_and_whole_groups_serve_in_one_cluster(start, tmp_path):
    path = tmp_path / "mixed.toml"
    path.write_text(DISAGGREGATED.read_text() + "\n[[group]]\nname = 'all'\n")
    cluster = start("--topology", path, *QWEN3)
    ask = dict(prompt=list(range(1, 100)), max_tokens=300, temperature=1, seed=8, ignore_eos=True, logprobs=1, return_token_ids=True)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answered = list(pool.map(lambda _: cluster.complete(**ask)["choices"], range(8)))
    assert all(choices == answered[0] for choices in answered)
    assert 0 < handovers(cluster) < 8
    # The group for whole requests still serves while the workers of the other groups are dead.
    for rank in (0, 1):
        os.kill(cluster.workers_by_rank()[rank], signal.SIGKILL)
    assert cluster.complete(**ask)["choices"] == answered[0]
    cluster.wait_until_idle()
