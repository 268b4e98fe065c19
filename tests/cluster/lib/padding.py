"""Checks that steps padded to fixed shapes give the same answers as steps without padding."""

import json

from golden import GENERATED, answers, bound, greatest_deviation
from harness import GOLDENS
from safetensors.numpy import load_file

SHAPES = (8, 32, 96)


def cached(cluster, golden):
    """Returns the answer to a prompt whose prefix an earlier request has left in the cache."""
    prompt = golden["t300.input_ids"].tolist()
    ask = dict(max_tokens=GENERATED, temperature=0, logprobs=3, return_token_ids=True)
    answer = cluster.complete(prompt=prompt, **ask)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    return answer["choices"][0]


def check_padded(start, tmp_path, model, ranks, *device):
    directory, trace = GOLDENS / "seed0" / model, tmp_path / "steps"
    golden = load_file(directory / "goldens.safetensors")
    flags = ("--workers", ranks, "--tp", ranks, "--model", directory, "--skip-tokenizer-init", "--max-step-tokens", 64, *device)
    plain = start(*flags)
    expected, warm = answers(plain, golden), cached(plain, golden)
    assert greatest_deviation(golden, expected) <= bound(model)
    assert plain.metrics().get("tutti_step_padding_tokens_total", 0) == 0
    plain.stop()

    padded = start(*flags, "--chunk-shapes", ",".join(map(str, SHAPES)), "--trace-steps", trace)
    assert answers(padded, golden) == expected
    assert cached(padded, golden) == warm
    padded.wait_until_idle()
    counted = padded.metrics()["tutti_step_padding_tokens_total"]
    padded.stop()
    traced = trace.with_name("steps.rank0")
    assert traced.exists(), f"{sorted(tmp_path.iterdir())}: {padded.log()[-4000:]}"
    steps = [json.loads(line) for line in traced.read_text().splitlines()[1:]]
    assert {step["tokens"] + step["padding_tokens"] for step in steps} == set(SHAPES)
    assert counted == sum(step["padding_tokens"] for step in steps) > 0
