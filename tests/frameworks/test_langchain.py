"""LangChain: `with_structured_output` in all its methods, `bind_tools`, streams, and an agent."""

import base64
import json

import omni_model
import pytest
from agent_scripts import ADA, LOOP, MODEL, PERSON, PERSON_TOOL, TEXT, question, weather
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from launcher import launcher
from pydantic import BaseModel, Field


class Person(BaseModel):
    """A person, and the languages that the person speaks."""

    name: str = Field(description="The whole name")
    age: int
    languages: list[str]


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return weather(city)


@pytest.fixture
def model(url):
    return ChatOpenAI(base_url=url, api_key="unused", model=MODEL, max_retries=0)


@pytest.mark.parametrize(
    "method, marker", [("json_schema", PERSON), ("json_mode", PERSON), ("function_calling", PERSON_TOOL)]
)
def test_structured_output(model, method, marker):
    chain = model.with_structured_output(Person, method=method)
    assert chain.invoke(question(marker, "Who is it? Answer as JSON.")) == Person(**ADA)


def test_the_default_of_structured_output(model):
    assert model.with_structured_output(Person).invoke(question(PERSON, "Who is it?")) == Person(**ADA)


def test_bound_tools_whole_and_streamed(model):
    bound = model.bind_tools([get_weather])
    whole = bound.invoke(question(LOOP))
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": "Paris"})]
    chunks = None
    for chunk in bound.stream(question(LOOP)):
        chunks = chunk if chunks is None else chunks + chunk
    assert [(call["name"], call["args"]) for call in chunks.tool_calls] == [("get_weather", {"city": "Paris"})]
    assert chunks.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ("any", "get_weather"))
def test_a_tool_that_must_be_called(model, choice):
    answer = model.bind_tools([get_weather], tool_choice=choice).invoke(question(LOOP))
    assert [call["args"] for call in answer.tool_calls] == [{"city": "Paris"}]


def test_an_agent(model):
    agent = create_agent(model, [get_weather], system_prompt="You know the weather.")
    messages = agent.invoke({"messages": [{"role": "user", "content": question(LOOP)}]})["messages"]
    assert messages[-1].content == TEXT
    assert [message.content for message in messages if message.type == "tool"] == [
        "sunny, 21 degrees",
        "snowy, -3 degrees",
    ]


def test_an_agent_that_streams(model):
    agent = create_agent(model, [get_weather])
    text, tools = "", []
    for chunk, _ in agent.stream({"messages": [{"role": "user", "content": question(LOOP)}]}, stream_mode="messages"):
        if chunk.type == "tool":
            tools.append(chunk.content)
        elif isinstance(chunk.content, str):
            text += chunk.content
    assert text.strip().endswith(TEXT) and tools == [weather("Paris"), weather("Oslo")]


def test_an_agent_with_an_answer_of_a_schema(model):
    agent = create_agent(model, [get_weather], response_format=Person)
    found = agent.invoke({"messages": [{"role": "user", "content": question(PERSON_TOOL, "Who is it?")}]})
    assert found["structured_response"] == Person(**ADA), json.dumps(ADA)


def test_a_picture_and_a_recording(tmp_path):
    start, finish = launcher(tmp_path)
    try:
        cluster = start("--workers", 1, *omni_model.write(tmp_path / "checkpoint"))
        chat = ChatOpenAI(base_url=f"{cluster.url}/v1", api_key="unused", model=cluster.model, max_retries=0, max_tokens=8, temperature=0)

        def block(kind, mime_type, data):
            return {"type": kind, "mime_type": mime_type, "base64": base64.b64encode(data).decode()}

        picture, sound = omni_model.png(40, 24, 1), omni_model.wav(6_500, 1)
        blocks = [block("image", "image/png", picture), block("audio", "audio/wav", sound)]
        answer = chat.invoke([HumanMessage([{"type": "text", "text": "What is this?"}, *blocks])])
        details = answer.usage_metadata["input_token_details"]
        assert details["audio"] > 0 and answer.usage_metadata["output_tokens"] > 0
        parts = [{"type": "text", "text": "What is this?"}, omni_model.image(picture), omni_model.audio(sound)]
        same = cluster.chat(messages=[{"role": "user", "content": parts}], max_tokens=8, temperature=0)
        assert answer.content == same["choices"][0]["message"]["content"]
    finally:
        finish()
