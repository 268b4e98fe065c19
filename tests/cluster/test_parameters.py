"""Sampling and stopping parameters. The effect of each is computed from the reference's logits."""

import json
import shutil

import numpy as np
import pytest
from harness import GOLDENS
from safetensors.numpy import load_file

GOLDEN = load_file(GOLDENS / "seed0/qwen3/goldens.safetensors")
PROMPT = GOLDEN["t37.input_ids"]
GREEDY = GOLDEN["t37.greedy"].tolist()
# Row i has the logits from which token i was picked.
LOGITS = GOLDEN["t37.greedy_logits"]


def ask(cluster, **parameters):
    asked = dict(prompt=PROMPT.tolist(), max_tokens=len(GREEDY), temperature=0, return_token_ids=True)
    return cluster.complete(**asked | parameters)["choices"]


def tokens(cluster, **parameters):
    return ask(cluster, **parameters)[0]["token_ids"]


@pytest.mark.parametrize("narrow", ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}), ids=str)
def test_a_choice_of_one_is_greedy(bare, narrow):
    assert tokens(bare, temperature=2, seed=1, **narrow) == GREEDY


def test_a_bias_forces_and_forbids(bare):
    assert tokens(bare, logit_bias={"7": 100}, max_tokens=5) == [7] * 5
    forbidden = {str(token): -100 for token in GREEDY}
    assert set(tokens(bare, logit_bias=forbidden)).isdisjoint(GREEDY)
    assert tokens(bare, logit_bias=forbidden)[0] == np.where(np.isin(np.arange(320), GREEDY), -1e9, LOGITS[0]).argmax()


def test_a_repetition_penalty_counts_the_prompt(bare):
    for penalty in (1.3, 3.0, 0.5):
        seen = LOGITS[0, PROMPT]
        logits = LOGITS[0].copy()
        logits[PROMPT] = np.where(seen > 0, seen / penalty, seen * penalty)
        assert tokens(bare, repetition_penalty=penalty, max_tokens=1) == [logits.argmax()], penalty


@pytest.mark.parametrize("name", ("presence_penalty", "frequency_penalty"))
def test_a_penalty_counts_the_output_only(bare, name):
    """A bias forces token 7. A penalty of 2 then lowers its biased logit by 2 per occurrence."""
    runner_up = LOGITS[1].copy()
    runner_up[GREEDY[0]] += 2  # a negative penalty favours earlier output
    assert tokens(bare, max_tokens=2, **{name: -2}) == [GREEDY[0], runner_up.argmax()]
    forced = tokens(bare, max_tokens=12, logit_bias={"7": 20}, **{name: 2})
    assert forced[0] == 7 and (set(forced) == {7}) == (name == "presence_penalty"), forced


def test_samples_follow_the_softmax(bare):
    temperature, count = 1.7, 6 * 128
    drawn = [c["token_ids"][0] for seed in range(6) for c in ask(bare, temperature=temperature, seed=seed, n=128, max_tokens=1)]
    logits = LOGITS[0].astype(np.float64) / temperature
    expected = np.exp(logits - logits.max())
    expected /= expected.sum()
    observed = np.bincount(drawn, minlength=320) / count
    # Seeds are fixed, so the result is deterministic. The limit is five standard deviations for every token.
    assert (np.abs(observed - expected) <= 5 * np.sqrt(expected * (1 - expected) / count) + 1 / count).all()
    assert len(set(drawn)) > 5


@pytest.mark.parametrize("cut", ({"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}), ids=str)
def test_a_cut_keeps_the_likeliest(bare, cut):
    order = np.argsort(-LOGITS[0])
    chances = np.exp(LOGITS[0][order] - LOGITS[0].max()).astype(np.float64)
    chances /= chances.sum()
    if "top_k" in cut:
        kept = order[:3]
    elif "top_p" in cut:  # the smallest set that reaches p
        kept = order[: int(np.searchsorted(np.cumsum(chances), 0.8)) + 1]
    else:
        kept = order[chances >= 0.2 * chances[0]]
    drawn = {c["token_ids"][0] for seed in range(2) for c in ask(bare, temperature=1, seed=seed, n=128, max_tokens=1, **cut)}
    assert drawn <= set(kept.tolist()) and len(drawn) > 1


def test_logprobs_are_of_the_raw_logits(bare):
    """Temperature, bias and penalties do not change the reported logprobs."""
    choice = ask(bare, max_tokens=1, logprobs=5, temperature=0.3, seed=3, logit_bias={"9": 100}, presence_penalty=1)[0]
    x = LOGITS[0].astype(np.float64)
    reference = x - x.max() - np.log(np.exp(x - x.max()).sum())
    assert choice["token_ids"] == [9] and choice["logprobs"]["tokens"] == ["token_id:9"]
    assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(reference[9], abs=2e-4)
    top = choice["logprobs"]["top_logprobs"][0]
    likeliest = np.argsort(-reference)[:5]
    assert list(top)[:5] == [f"token_id:{token}" for token in likeliest]
    assert list(top.values())[:5] == pytest.approx(reference[likeliest].tolist(), abs=2e-4)


def test_prompt_logprobs_rank_the_prompt(bare):
    logits = GOLDEN["t37.logits"]
    first, *rest = ask(bare, max_tokens=1, prompt_logprobs=2)[0]["prompt_logprobs"]
    assert first is None
    for row, token, entry in zip(logits, PROMPT[1:], rest):
        assert entry[str(token)]["rank"] == 1 + (row > row[token]).sum()
        assert {str(t) for t in np.argsort(-row)[:2]} <= set(entry)


def test_a_stop_token_ends_the_output_after_min_tokens(bare):
    stop = GREEDY[3]
    first = GREEDY.index(stop)
    choice = ask(bare, stop_token_ids=[stop])[0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"][:first] == GREEDY[:first] and len(choice["token_ids"]) <= first + 1
    held = tokens(bare, stop_token_ids=[stop], min_tokens=8)
    assert stop not in held[:8] and held[:first] == GREEDY[:first] and len(held) >= 8


def test_several_end_of_sequence_ids(start, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(GOLDENS / "seed0/qwen3", checkpoint)
    ends = [319, GREEDY[5]]
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    cluster = start("--model", checkpoint, "--skip-tokenizer-init")
    first = min(GREEDY.index(end) for end in ends if end in GREEDY)
    choice = ask(cluster)[0]
    assert choice["finish_reason"] == "stop" and choice["token_ids"][:first] == GREEDY[:first]
    assert len(choice["token_ids"]) <= first + 1
    assert tokens(cluster, ignore_eos=True) == GREEDY
    assert GREEDY[5] not in tokens(cluster, min_tokens=16)


def test_defaults_come_from_the_checkpoint(start, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(GOLDENS / "seed0/qwen3", checkpoint)
    (checkpoint / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 1, "temperature": 0.6}))
    cluster = start("--model", checkpoint, "--skip-tokenizer-init")
    answer = cluster.complete(prompt=PROMPT.tolist(), return_token_ids=True)["choices"][0]
    assert answer["token_ids"] == GREEDY, "top_k 1 is greedy, and 16 tokens is the default"
    wide = cluster.complete(prompt=PROMPT.tolist(), return_token_ids=True, top_k=0, temperature=2, seed=1)["choices"][0]
    assert wide["token_ids"] != GREEDY
