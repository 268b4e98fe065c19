"""The tokens of `--device sim`: an independent implementation of worker/models/src/sim_device/digest.rs."""

import asyncio
import json

from harness import REPO, events

MASK = 2**64 - 1


def mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def extend(digest, token):
    return mix(digest ^ ((token + 1) * 0x9E3779B97F4A7C15 & MASK))


def generate(prompt, seed, vocab_size, count):
    """Returns the next `count` tokens after the prompt, as if nothing ended the sequence. Greedy requests have seed 0.
    """
    digest, tokens = 0, []
    for token in prompt:
        digest = extend(digest, token)
    while len(tokens) < count:
        tokens.append(mix(digest ^ mix(seed)) % vocab_size)
        digest = extend(digest, tokens[-1])
    return tokens


CHECKPOINT = REPO / "tests/tutti-tiny/checkpoint"
VOCAB = json.loads((CHECKPOINT / "config.json").read_text())["vocab_size"]
EOS = set(json.loads((CHECKPOINT / "generation_config.json").read_text())["eos_token_id"])


def sampled(prompt, seed, temperature, count):
    return generate(prompt, seed if temperature else 0, VOCAB, count)


def asked(rng):
    """Returns a random request, and its expected answer."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 15, 16, 17, 60, 700)))]
    seed, temperature, count = rng.randrange(2**63), rng.choice((0, 0.8)), rng.randint(1, 40)
    body = {"prompt": prompt, "seed": seed, "temperature": temperature, "max_tokens": count}
    body |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    tokens = sampled(prompt, seed, temperature, count)
    if rng.random() < 0.5:
        return body | {"ignore_eos": True}, (tokens, "length")
    # The tenth token is a stop token, so the output ends there or at an earlier stop token.
    stops = EOS | set(tokens[9:10])
    ends = [i for i, token in enumerate(tokens) if token in stops]
    body |= {"stop_token_ids": sorted(stops)}
    return body, ((tokens[: ends[0] + 1], "stop") if ends else (tokens, "length"))


async def stream(port, model, body):
    """Returns (token ids, finish reason) of a stream. Fails unless the stream has exactly one end."""
    # The HTTP is written by hand, because with thousands of connections a client library's pool is slower than the
    # cluster. HTTP/1.0 ends the answer by closing the connection.
    content = json.dumps({"model": model} | body)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(f"{head}{content}".encode())
    head, _, answer = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    assert " 200 " in head.splitlines()[0], head + answer
    tokens, reasons, usage = [], [], None
    # `splitlines` would split at every Unicode line separator, and random text contains them.
    for event in events(answer.split("\n")):
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
            reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
    assert len(reasons) == 1 and usage["completion_tokens"] == len(tokens)
    return tokens, reasons[0]
