"""64 requests of all kinds, sent to two workers at once. Tests that each request gets the same answer as alone, and
that no page and no request is left."""

import asyncio
import json
import random

import httpx
from harness import ANSWER_S, events

REQUESTS = 64
WORDS = "tutti plays one two three red green blue stone river count reverse add".split()


def requests(model):
    """Returns [(path, body, number of events before the client disconnects, or None)]. The list is always the same."""
    rng, made = random.Random(2), []
    for i in range(REQUESTS):
        prompt = " ".join(rng.choices(WORDS, k=rng.choice((1, 3, 12, 40))))
        body = {"model": model, "max_tokens": rng.randint(1, 40), "seed": rng.randrange(2**32)}
        body |= rng.choice(({"temperature": 0}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.3, "top_k": 20}))
        body |= rng.choice(({}, {"n": 3}, {"stop": ["e", "tu"]}, {"repetition_penalty": 1.3}, {"min_p": 0.05}))
        leave = None
        if i % 2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            if i % 8 == 1:
                body |= {"max_tokens": 400, "ignore_eos": True}
                leave = rng.randint(1, 6)
        if i % 3 == 0:
            made.append(("/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}, leave))
        else:
            extra = rng.choice(({}, {"logprobs": 2}, {"echo": True}, {"prompt_logprobs": 1}))
            made.append(("/v1/completions", body | {"prompt": prompt, "return_token_ids": True} | extra, leave))
    return made


async def answer(client, path, body, leave):
    """Returns the result of one request: the whole answer, or a stream's deltas by choice up to the disconnect."""
    if not body.get("stream"):
        response = await client.post(path, json=body)
        assert response.status_code == 200, response.text
        got = response.json()
        return {"choices": got["choices"], "usage": got["usage"]}
    lines = []
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            lines.append(line)
            if leave is not None and sum(l.startswith("data: ") for l in lines) == leave:
                break
    if leave is not None:
        return merged(json.loads(l.removeprefix("data: ")) for l in lines if l not in ("", "data: [DONE]"))
    return merged(events(lines))


def merged(chunks):
    """Returns a stream's content as {choice: {field: all deltas in order}}. The division into events depends on timing,
    so it is left out."""
    choices, usage = {}, None
    for chunk in chunks:
        assert "error" not in chunk, chunk
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            into = choices.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": [], "finish": None})
            delta = choice.get("delta", {})
            into["text"] += choice.get("text") or delta.get("content") or ""
            into["token_ids"] += choice.get("token_ids") or []
            into["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs") or []
            into["finish"] = choice.get("finish_reason") or into["finish"]
    return {"choices": choices, "usage": usage}


def test_each_answers_as_it_does_alone(tiny):
    asked = requests(tiny.model)

    async def main():
        limits = httpx.Limits(max_connections=REQUESTS)
        async with httpx.AsyncClient(base_url=tiny.url, timeout=ANSWER_S, limits=limits) as client:
            alone = [await answer(client, *request) for request in asked]
            concurrent = await asyncio.gather(*(answer(client, *request) for request in asked))
            return alone, concurrent

    ended = lambda: tiny.metrics().get("tutti_requests_total", 0)
    before = ended()
    alone, concurrent = asyncio.run(main())
    for request, one, other in zip(asked, alone, concurrent):
        if request[2] is None:
            for usage in (one["usage"], other["usage"]):
                usage.pop("prompt_tokens_details")  # what others have computed before is the one thing that differs
            assert one == other, request
        else:  # hung up on after as many events, which can hold more or fewer tokens
            for index in one["choices"].keys() & other["choices"].keys():
                a, b = one["choices"][index]["text"], other["choices"][index]["text"]
                assert a.startswith(b) or b.startswith(a), (request, a, b)
    tiny.wait_until_idle()
    choices = sum(body.get("n", 1) for _, body, _ in asked)
    assert ended() - before == 2 * choices, "each choice has exactly one ending"


def test_both_workers_are_used(start):
    cluster = start("--workers", 2)
    asked = [{"prompt": "count", "max_tokens": 60, "ignore_eos": True, "seed": seed} for seed in range(16)]

    async def main():
        async with httpx.AsyncClient(base_url=cluster.url, timeout=ANSWER_S) as client:
            bodies = ({"model": cluster.model} | body for body in asked)
            await asyncio.gather(*(answer(client, "/v1/completions", body, None) for body in bodies))

    def steps():
        lines = cluster.client.get("/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("tutti_worker_steps{")}

    asyncio.run(main())
    cluster.wait_until_idle()
    after = steps()
    assert len(after) == 2 and all(taken >= 60 for taken in after.values()), after


def test_overload_is_refused_at_once(start):
    cluster = start("--workers", 1, "--max-running-requests", 1, "--max-queued-requests", 2)
    body = {"model": cluster.model, "prompt": "go on", "max_tokens": 1000, "ignore_eos": True}

    async def main():
        async with httpx.AsyncClient(base_url=cluster.url, timeout=ANSWER_S) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(12)))

    answers = asyncio.run(main())
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 503} and statuses.count(200) >= 1, statuses
    for answer in answers:
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "server_overloaded"
    cluster.wait_until_idle()
    assert cluster.complete(prompt="one", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_reader_that_stalls_delays_no_other(tiny):
    body = {"model": tiny.model, "prompt": "go on", "max_tokens": 3000, "ignore_eos": True, "n": 4, "stream": True}
    with tiny.client.stream("POST", "/v1/completions", json=body) as stalled:
        lines = stalled.iter_lines()
        next(lines)
        for _ in range(8):
            assert tiny.complete(prompt="one", max_tokens=8, ignore_eos=True)["usage"]["completion_tokens"] == 8
        got = list(events(line for line in lines))
    assert sum(bool(choice["finish_reason"]) for event in got for choice in event["choices"]) == 4
