"""The first run that README.md and docs/api.md describe. Tests that the shipped model answers, and that every example
works."""

import json
import os
import re
import subprocess
import sys

import pytest
from harness import ANSWER_S, REPO

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


def examples():
    """Returns the fenced bash and python blocks of README and docs/api.md that use a running cluster."""
    text = "\n".join((REPO / page).read_text() for page in ("README.md", "docs/api.md"))
    blocks = re.findall(r"^```(bash|sh|python)\n(.*?)^```", text, re.M | re.S)
    return [(kind, text) for kind, text in blocks if re.search(r":(8000|50051)\b", text)]


EXAMPLES = examples()


def test_readme_has_an_example_for_each_client():
    text = "\n".join(text for _, text in EXAMPLES)
    for word in ("curl", "import openai", "import grpc", '"stream": true'):
        assert word in text.replace("from openai import", "import openai"), f"neither README.md nor docs/api.md has an example with {word}"


@pytest.mark.parametrize(("kind", "text"), EXAMPLES, ids=[str(i) for i in range(len(EXAMPLES))])
def test_the_examples_of_readme_work(tiny, tmp_path, kind, text):
    text = re.sub(r"(localhost|127\.0\.0\.1):8000", f"127.0.0.1:{tiny.http_port}", text)
    text = re.sub(r"(localhost|127\.0\.0\.1):50051", tiny.grpc, text)
    # Installation lines are left out, because this venv has the packages. The generated stubs are in target/stubs.
    text = "\n".join(line for line in text.splitlines() if not re.match(r"\s*(\S*pip3? install|uv pip)", line))
    command = ["bash", "-euo", "pipefail", "-c", text] if kind != "python" else [sys.executable, "-c", text]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(REPO / "target/stubs")}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=ANSWER_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and '"error"' not in done.stdout, done.stdout
