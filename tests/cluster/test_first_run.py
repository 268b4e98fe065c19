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


def test_the_shipped_model_calls_the_tool_of_its_prompt_and_tells_the_result(tiny):
    """The example of README.md, and its next turn."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "Get the weather", "parameters": city}}]
    messages = [{"role": "user", "content": "What is the weather in Bern?"}]
    choice = tiny.chat(messages=messages, tools=tools, temperature=0)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and not choice["message"].get("content")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Bern"})
    result = {"role": "tool", "tool_call_id": call["id"], "content": "rainy, 12 degrees"}
    choice = tiny.chat(messages=[*messages, choice["message"], result], tools=tools, temperature=0)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("The answer is: rainy, 12 degrees", "stop")


@pytest.mark.parametrize("shown", (True, False), ids=("the prompt shows the schema", "a grammar forces the keys"))
def test_the_shipped_model_answers_as_json(tiny, shown):
    types = {"name": "string", "age": "integer", "city": "string"}
    schema = {"type": "object", "properties": {key: {"type": of} for key, of in types.items()}, "required": list(types)}
    statement = {"role": "user", "content": "Ada is 36 years old and lives in London."}
    system = {"role": "system", "content": f"Answer as JSON with this schema: {json.dumps(schema)}"}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    asked = {"messages": [system, statement]} if shown else {"messages": [statement], "response_format": form}
    choice = tiny.chat(**asked, temperature=0)["choices"][0]
    assert json.loads(choice["message"]["content"]) == {"name": "Ada", "age": 36, "city": "London"}
    assert choice["finish_reason"] == "stop"


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
