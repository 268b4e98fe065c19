"""A cluster of simulated devices: real processes and streams, tokens that can be known beforehand, steps that are traced."""

import asyncio
import json
import random

import httpx
from harness import ANSWER_S, REPO, events, wait_for
from simulated import generate

STREAMS = 240
CONFIG = json.loads((REPO / "tests/tutti-tiny/checkpoint/config.json").read_text())
VOCAB, EOS = CONFIG["vocab_size"], CONFIG["eos_token_id"]


def sampled(prompt, seed, temperature, count):
    return generate(prompt, seed if temperature else 0, VOCAB, count)


def asked(rng):
    """A request, and what must come of it."""
    prompt = [rng.randrange(VOCAB - 1) for _ in range(rng.choice((1, 2, 15, 16, 17, 60, 700)))]
    seed, temperature, count = rng.randrange(2**63), rng.choice((0, 0.8)), rng.randint(1, 40)
    body = {"prompt": prompt, "seed": seed, "temperature": temperature, "max_tokens": count}
    body |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    tokens = sampled(prompt, seed, temperature, count)
    if rng.random() < 0.5:
        return body | {"ignore_eos": True}, (tokens, "length")
    # Ends with its tenth token at the latest, unless that is one that came before.
    stops = {EOS, tokens[9]} if count > 9 else {EOS}
    ends = [i for i, token in enumerate(tokens) if token in stops]
    body |= {"stop_token_ids": sorted(stops)}
    return body, ((tokens[: ends[0] + 1], "stop") if ends else (tokens, "length"))


async def stream(client, model, body):
    """(token ids, finish reason) of a stream that must have exactly one ending."""
    lines = []
    async with client.stream("POST", "/v1/completions", json={"model": model} | body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            lines.append(line)
    tokens, reasons, usage = [], [], None
    for event in events(lines):
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
            reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
    assert len(reasons) == 1 and usage["completion_tokens"] == len(tokens)
    return tokens, reasons[0]


def all_at_once(cluster, bodies):
    async def main():
        limits = httpx.Limits(max_connections=len(bodies))
        async with httpx.AsyncClient(base_url=cluster.url, timeout=ANSWER_S, limits=limits) as client:
            return await asyncio.gather(*(stream(client, cluster.model, body) for body in bodies))

    return asyncio.run(main())


def trace(path, rank):
    """The steps in a rank's file, checked to be one process's, all of them, in order."""
    header, *steps = map(json.loads, path.with_name(f"{path.name}.rank{rank}").read_text().splitlines())
    assert header["worker"] == rank and [step["step"] for step in steps] == list(range(len(steps)))
    return steps


def test_every_stream_of_eight_workers_ends_once_and_right(start, tmp_path):
    file = tmp_path / "steps"
    cluster = start("--workers", 8, "--device", "sim", "--trace-steps", file)
    rng = random.Random(3)
    bodies, expected = zip(*(asked(rng) for _ in range(STREAMS)))
    answers = all_at_once(cluster, bodies)
    for body, got, wanted in zip(bodies, answers, expected):
        assert got == wanted, body
    cluster.wait_until_idle()
    seen = cluster.metrics()
    assert seen["tutti_requests_total"] == STREAMS
    assert seen["tutti_trace_steps_lost"] == 0 and seen["tutti_queue_age_seconds"] == 0

    # Each position of each request was computed once, in order, and the metrics count what the trace shows.
    steps = [step for rank in range(8) for step in trace(file, rank)]
    computed, rows = {}, 0
    for step in steps:
        assert step["tokens"] <= step["budget_tokens"] and step["plan_us"] + step["run_us"] > 4_000
        for row in step["rows"]:
            rows += 1
            begin, end = row["range"]
            assert computed.get(row["request"], 0) == begin < end
            computed[row["request"]] = end
    # The last sampled token is not computed any more.
    assert sorted(computed.values()) == sorted(len(b["prompt"]) + len(w[0]) - 1 for b, w in zip(bodies, expected))
    assert seen["tutti_step_rows_total"] == rows and seen["tutti_step_seconds_count"] == len(steps)
    assert seen["tutti_step_budget_fill_count"] == len(steps)


def test_a_device_that_is_lost_ends_its_worker_and_the_next_one_serves(start, tmp_path):
    file = tmp_path / "steps"
    faults = {"TUTTI_SIM__LOSE_AFTER": "20", "TUTTI_SIM__PROFILE": "instant"}
    cluster = start("--workers", 1, "--device", "sim", "--trace-steps", file, env=faults)
    body = {"prompt": [1, 2], "max_tokens": 10, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    right = sampled([1, 2], 0, 0, 10)
    assert cluster.complete(**body)["choices"][0]["token_ids"] == right
    failed = cluster.post("/v1/completions", body | {"max_tokens": 30})
    assert failed.status_code >= 500, failed.text
    # Readiness alone could still be that of the first life.
    wait_for("a restart", lambda: cluster.metrics().get("tutti_worker_restarts_total") == 1)
    cluster.wait_until_ready()
    assert cluster.complete(**body)["choices"][0]["token_ids"] == right
    # Both lives are in the file, each behind a header.
    lines = [json.loads(line) for line in (tmp_path / "steps.rank0").read_text().splitlines()]
    assert sum("pid" in line for line in lines) == 2


def test_a_step_trace_that_cannot_be_written_costs_nothing_else(start, tmp_path):
    file = tmp_path / "steps"
    (tmp_path / "steps.rank0").symlink_to("/dev/full")
    cluster = start("--workers", 1, "--device", "sim", "--trace-steps", file)
    body = {"prompt": [1, 2], "max_tokens": 10, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    assert cluster.complete(**body)["choices"][0]["token_ids"] == sampled([1, 2], 0, 0, 10)
    wait_for("lost steps in the metrics", lambda: cluster.metrics()["tutti_trace_steps_lost"] > 0)
    assert cluster.log().count("the step trace ends here") == 1
