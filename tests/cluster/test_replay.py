"""Workers die, stop, or hang while they stream. Tests that every stream is the same as without the fault."""

import os
import random
import signal

from harness import GOLDENS, wait_for
from sampling_zoo import sampling_zoo
from simulated import VOCAB, sampled
from streams import Streams

QWEN3 = ("--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init")
# Steps of the simulated device are so long that a worker dies in the middle of its outputs.
SIM = ("--device", "sim")


def kill(pid, number=signal.SIGKILL):
    os.kill(pid, number)


def test_every_stream_survives_the_death_of_each_worker(start):
    cluster = start("--workers", 2, *SIM)
    rng, bodies, expected = random.Random(5), [], []
    for _ in range(24):
        prompt, seed = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 16, 700)))], rng.randrange(2**63)
        tokens = sampled(prompt, seed, 1, 250)
        bodies.append(dict(prompt=prompt, seed=seed, temperature=1, max_tokens=250, ignore_eos=True, return_token_ids=True))
        expected.append(tokens)
    first, second = cluster.workers()
    streams = Streams(cluster, "/v1/completions", bodies)
    streams.wait_for_tokens(20)
    kill(first)
    streams.wait_for_tokens(80)
    wait_for("a replacement", lambda: cluster.metrics()["tutti_workers_ready"] == 2)
    kill(second)
    answers = streams.results()
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
    assert all(answer["choices"][0]["ends"] == [("length", None)] for answer in answers)
    assert all(answer["usage"]["completion_tokens"] == 250 for answer in answers)
    cluster.wait_until_idle()
    seen = cluster.metrics()
    # At least the requests of the first killed worker are replayed.
    assert seen["tutti_request_replays_total"] >= 12 and seen["tutti_generated_tokens_total"] == 24 * 250


def test_answers_are_bit_identical_for_all_parameters(start):
    # The workers are stopped for as long as this process needs, which must not look like a death.
    cluster = start("--workers", 2, "--heartbeat-timeout", 60, *QWEN3)
    bodies = list(sampling_zoo())
    undisturbed = Streams(cluster, "/v1/completions", bodies).results()
    first, second = cluster.workers()
    streams = Streams(cluster, "/v1/completions", bodies, stopped=[first, second])
    streams.stop_in_the_middle([first, second], len(bodies), tokens=15)
    kill(first)
    streams.stop_in_the_middle([second], len(bodies) // 2, tokens=60)
    wait_for("a replacement", lambda: cluster.metrics()["tutti_workers_ready"] == 2)
    kill(second)
    disturbed = streams.results()
    assert cluster.metrics()["tutti_request_replays_total"] >= 2, "the deaths came too late for a replay"
    for body, expected, got in zip(bodies, undisturbed, disturbed):
        # The prefix cache of a new process is empty.
        assert expected == got, body
    cluster.wait_until_idle()


def test_chat_text_continues_without_a_gap(start):
    # At this temperature, characters may be incomplete when the worker dies.
    cluster = start("--workers", 1, *SIM)
    body = dict(messages=[{"role": "user", "content": "Count from 1 to 300"}], max_tokens=400, seed=3, temperature=1)
    body |= dict(stream_options={"include_usage": True}, ignore_eos=True)

    def content(events):
        return "".join(c["delta"].get("content") or "" for e in events for c in e["choices"])

    expected = content(cluster.stream("/v1/chat/completions", **body))
    stream = cluster.stream("/v1/chat/completions", **body)
    begun = [next(stream) for _ in range(10)]
    kill(cluster.workers()[0])
    assert content([*begun, *stream]) == expected
    assert cluster.metrics()["tutti_request_replays_total"] == 1


def test_a_request_that_kills_every_worker_fails_with_the_reason(start):
    # Every device is lost after 40 steps. Shorter requests succeed, but this one never finishes.
    cluster = start("--workers", 2, *SIM, env={"TUTTI_SIM__LOSE_AFTER": "40", "TUTTI_SIM__PROFILE": "instant"})
    ask = dict(prompt=[1, 2], ignore_eos=True, temperature=0, return_token_ids=True)
    answer = cluster.post("/v1/completions", ask | {"max_tokens": 500})
    assert answer.status_code == 503 and "3 times" in answer.json()["error"]["message"], answer.text
    short = wait_for("a worker", lambda: (r := cluster.post("/v1/completions", ask | {"max_tokens": 10})).status_code == 200 and r)
    assert short.json()["choices"][0]["token_ids"] == sampled([1, 2], 0, 0, 10)
    cluster.wait_until_idle()


def test_a_stopped_worker_is_detected_and_killed_and_its_streams_continue(start):
    cluster = start("--workers", 2, "--heartbeat-timeout", 2, *SIM)
    ask = dict(max_tokens=250, ignore_eos=True, temperature=1, return_token_ids=True)
    bodies = [ask | dict(prompt=[seed], seed=seed) for seed in range(8)]
    stopped = cluster.workers()[0]
    streams = Streams(cluster, "/v1/completions", bodies)
    streams.wait_for_tokens(10)
    kill(stopped, signal.SIGSTOP)
    answers = streams.results()
    assert [a["choices"][0]["token_ids"] for a in answers] == [sampled([s], s, 1, 250) for s in range(8)]
    wait_for("a replacement", lambda: stopped not in cluster.workers() and len(cluster.workers()) == 2)
    wait_for("ready", lambda: cluster.metrics()["tutti_workers_ready"] == 2)
    assert cluster.metrics()["tutti_workers_fenced_total"] == 1
    cluster.wait_until_idle()


def test_a_worker_whose_step_hangs_is_replaced(start):
    # Heartbeats continue, but the step counters do not advance.
    cluster = start("--workers", 1, "--hang-timeout", 1, *SIM, env={"TUTTI_SIM__HANG_AFTER": "40"})
    answer = cluster.complete(prompt=[3, 4], max_tokens=60, ignore_eos=True, temperature=0, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == sampled([3, 4], 0, 0, 60)
    assert cluster.metrics()["tutti_workers_fenced_total"] == 1


def test_a_crash_loop_ends_readiness_with_the_reason(start):
    cluster = start("--workers", 1, *SIM, env={"TUTTI_SIM__LOSE_AFTER": "0"})
    answer = cluster.post("/v1/completions", dict(prompt=[1, 2], max_tokens=5, ignore_eos=True))
    assert answer.status_code == 503 and "3 times" in answer.json()["error"]["message"], answer.text
    # The cluster must also be unready while a new process starts.
    wait_for("a worker", lambda: cluster.metrics()["tutti_workers_ready"] == 1)
    ready = wait_for("not ready", lambda: (r := cluster.client.get("/ready")).status_code == 503 and r)
    assert "crash loop" in ready.text and "exit status: 70" in ready.text, ready.text
