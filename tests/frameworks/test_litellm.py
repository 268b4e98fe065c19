"""LiteLLM: as a library, and as a proxy in front of the cluster with openai-python as its client."""

import json
import os
import subprocess
import sys

import httpx
import litellm
import openai
import pytest
from agent_scripts import ADA, LOOP, MODEL, PERSON, TEXT, question, weather
from harness import START_S, free_port, wait_for
from pydantic import BaseModel

# The proxy takes half a minute to import its packages, and minutes on a loaded machine.
PROXY_START_S = 4 * START_S
pytestmark = pytest.mark.timeout(2 * PROXY_START_S)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


class Person(BaseModel):
    name: str
    age: int
    languages: list[str]


def messages(marker):
    return [{"role": "user", "content": question(marker)}]


def test_the_library(url):
    ask = dict(model=f"openai/{MODEL}", api_base=url, api_key="unused", num_retries=0)
    message = litellm.completion(messages=messages(LOOP), tools=TOOLS, **ask).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}
    content = litellm.completion(messages=messages(PERSON), response_format=Person, **ask).choices[0].message.content
    assert json.loads(content) == ADA


@pytest.fixture(scope="module")
def proxy(url, tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("litellm"), free_port()
    listed = [
        {"model_name": "front", "litellm_params": {"model": f"openai/{MODEL}", "api_base": url, "api_key": "unused"}}
    ]
    config = folder / "config.yaml"
    # JSON is YAML.
    config.write_text(json.dumps({"model_list": listed, "general_settings": {"master_key": "sk-front"}}))
    command = [
        os.path.join(os.path.dirname(sys.executable), "litellm"),
        "--config",
        config,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    # Otherwise it asks the network for prices.
    env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with open(folder / "log", "wb") as log:
        child = subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)

    def ready():
        assert child.poll() is None, (folder / "log").read_text()[-4000:]
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for("the proxy", ready, PROXY_START_S, every=0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        child.terminate()
        child.wait()


@pytest.mark.parametrize("way", ("whole", "streamed"))
def test_the_proxy_passes_a_loop_of_tools(proxy, way):
    client = openai.OpenAI(base_url=proxy, api_key="sk-front", max_retries=0)
    asked = messages(LOOP)
    for _ in range(3):
        ask = dict(model="front", messages=asked, tools=TOOLS)
        if way == "whole":
            message = client.chat.completions.create(**ask).choices[0].message
        else:
            with client.chat.completions.stream(**ask) as stream:
                message = stream.get_final_completion().choices[0].message
        asked.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or []:
            result = weather(**json.loads(call.function.arguments))
            asked.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert message.content == TEXT and len([one for one in asked if one["role"] == "tool"]) == 2


def test_the_proxy_passes_a_schema(proxy):
    client = openai.OpenAI(base_url=proxy, api_key="sk-front", max_retries=0)
    answer = client.chat.completions.parse(model="front", messages=messages(PERSON), response_format=Person)
    assert answer.choices[0].message.parsed == Person(**ADA)
