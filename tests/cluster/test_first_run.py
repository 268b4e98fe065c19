"""The first run that README.md describes. Tests that the shipped model answers. test_docs.py runs the examples."""

import json

import pytest
from harness import REPO

ORACLE = json.loads((REPO / "tests/tutti-tiny/oracle.json").read_text())


def label(item):
    return item.get("prompt") or item["messages"][-1]["content"]


@pytest.mark.parametrize("item", ORACLE, ids=label)
def test_the_shipped_model_answers_as_its_reference_does(tiny, item):
    if "messages" in item:
        choice = tiny.chat(messages=item["messages"], temperature=0, max_completion_tokens=200)["choices"][0]
        assert choice["message"]["content"] == item["answer"]
    else:
        choice = tiny.complete(prompt=item["prompt"], temperature=0, max_tokens=200)["choices"][0]
        assert choice["text"] == item["completion"]
    assert choice["finish_reason"] == "stop"


def test_defaults_make_sense(tiny):
    """A first-time user sends only a question."""
    answer = tiny.chat(messages=[{"role": "user", "content": "What is Tutti?"}])
    assert "tutti" in answer["choices"][0]["message"]["content"].lower()


def test_text_survives_tokenising_and_detokenising(tiny):
    text = "Zwölf Boxkämpfer 🎺 jagen\n\tViktor 漢字"
    ids = tiny.client.post("/tokenize", json={"prompt": text}).json()
    assert ids["count"] == len(ids["tokens"])
    assert tiny.client.post("/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"] == text


def test_a_streamed_character_is_never_split(tiny):
    """A high temperature makes incomplete characters likely. A delta must never contain part of a character."""
    ask = dict(prompt="🎺 漢字", max_tokens=200, temperature=2, seed=3, ignore_eos=True)
    whole = tiny.complete(**ask)["choices"][0]["text"]
    deltas = [c["text"] for event in tiny.stream("/v1/completions", **ask) for c in event["choices"]]
    assert "".join(deltas) == whole


def test_probes_and_metrics_answer(tiny):
    for path in ("/health", "/ready"):
        assert tiny.client.get(path).status_code == 200
    metrics = tiny.client.get("/metrics")
    assert "openmetrics" in metrics.headers["content-type"] and metrics.text.endswith("# EOF\n")
