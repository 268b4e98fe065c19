"""The client openai-python, as agents use it: tools streamed and whole, loops of several turns, answers parsed into
pydantic models. The model follows a script, so that every answer is known.

tests/agents has the frameworks that stand on this client.
"""

import json

import openai
import pydantic
import pytest
from agent_scripts import (
    ADA,
    LOOP,
    MODEL,
    NO_ARGUMENTS,
    PARALLEL,
    PERSON,
    PLAIN,
    TEXT,
    question,
    serve,
    weather,
)


class Person(pydantic.BaseModel):
    name: str
    age: int
    languages: list[str]


class GetWeather(pydantic.BaseModel):
    """The weather of a city."""

    city: str


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "list_cities", "description": "All cities"}},
]


@pytest.fixture(scope="module")
def cluster(shared, tmp_path_factory):
    return serve(tmp_path_factory.mktemp("agents"), shared)


@pytest.fixture(scope="module")
def client(cluster):
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


def chat(marker, **more):
    return {"model": MODEL, "messages": [{"role": "user", "content": question(marker)}], "tools": TOOLS} | more


def streamed(client, **ask):
    """Returns the message and the finish reason that a client builds from a stream, as openai's cookbook does."""
    content, calls, finish, usage = "", {}, None, None
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for delta in choice.delta.tool_calls or []:
                if delta.index not in calls:
                    assert delta.id and delta.type == "function" and delta.function.name
                    calls[delta.index] = [delta.id, delta.function.name, ""]
                else:
                    assert not delta.id and not delta.function.name, "name and id come once"
                calls[delta.index][2] += delta.function.arguments or ""
            finish = choice.finish_reason or finish
    return content, [calls[index] for index in sorted(calls)], finish, usage


def called(calls):
    return [(name, json.loads(arguments)) for _, name, arguments in calls]


def as_lists(message):
    return [[call.id, call.function.name, call.function.arguments] for call in message.tool_calls or []]


def test_a_call_is_the_same_streamed_and_whole(client):
    whole = client.chat.completions.create(**chat(LOOP))
    message = whole.choices[0].message
    assert called(as_lists(message)) == [("get_weather", {"city": "Paris"})]
    assert whole.choices[0].finish_reason == "tool_calls" and not message.content
    content, calls, finish, usage = streamed(client, **chat(LOOP))
    assert (content, called(calls), finish) == ("", called(as_lists(message)), "tool_calls")
    assert calls[0][2] == message.tool_calls[0].function.arguments, "byte by byte"
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_calls_side_by_side_have_an_index_and_an_id_each(client):
    message = client.chat.completions.create(**chat(PARALLEL)).choices[0].message
    assert called(as_lists(message)) == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Oslo"})]
    assert len({call.id for call in message.tool_calls}) == 2
    assert called(streamed(client, **chat(PARALLEL))[1]) == called(as_lists(message))
    one = client.chat.completions.create(**chat(PARALLEL, parallel_tool_calls=False)).choices[0].message
    assert called(as_lists(one)) == [("get_weather", {"city": "Paris"})]


def test_a_function_without_parameters_gets_an_empty_object(client):
    message = client.chat.completions.create(**chat(NO_ARGUMENTS)).choices[0].message
    assert called(as_lists(message)) == called(streamed(client, **chat(NO_ARGUMENTS))[1]) == [("list_cities", {})]


@pytest.mark.parametrize("way", ("whole", "streamed"))
def test_a_loop_of_three_turns(client, way):
    messages = chat(LOOP)["messages"]
    contents = []
    for _ in range(3):
        if way == "whole":
            choice = client.chat.completions.create(**chat(LOOP, messages=messages)).choices[0]
            content, calls, finish = choice.message.content, as_lists(choice.message), choice.finish_reason
            # A client sends the message back as it came, with all its members.
            messages.append(choice.message.model_dump())
        else:
            content, calls, finish, _ = streamed(client, **chat(LOOP, messages=messages))
            entries = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
                for id, name, text in calls
            ]
            messages.append(
                {"role": "assistant", "content": content or None} | ({"tool_calls": entries} if entries else {})
            )
        contents.append((content or "").strip())
        if finish == "stop":
            break
        assert finish == "tool_calls"
        for id, name, arguments in calls:
            assert name == "get_weather"
            messages.append({"role": "tool", "tool_call_id": id, "content": weather(**json.loads(arguments))})
    assert contents == ["", "Now the other one.", TEXT]
    assert [message["content"] for message in messages if message["role"] == "tool"] == [
        "sunny, 21 degrees",
        "snowy, -3 degrees",
    ]


def test_the_clients_own_stream_of_events(client):
    names, arguments = [], ""
    with client.chat.completions.stream(**chat(LOOP)) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                arguments += event.arguments_delta
            if event.type == "tool_calls.function.arguments.done":
                names.append(event.name)
    assert (names, json.loads(arguments)) == (["get_weather"], {"city": "Paris"})
    assert stream.get_final_completion().choices[0].finish_reason == "tool_calls"


def test_tools_that_are_offered_need_not_be_called(client):
    for ask in (chat(PLAIN), chat(PLAIN, tool_choice="none"), chat(PLAIN, tool_choice="auto")):
        choice = client.chat.completions.create(**ask).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (TEXT, None, "stop")
        assert streamed(client, **ask)[:3] == (TEXT, [], "stop")


@pytest.mark.parametrize(
    "choice", ("required", {"type": "function", "function": {"name": "get_weather"}}), ids=("required", "named")
)
def test_a_call_that_is_demanded(client, choice):
    ask = chat(LOOP, tool_choice=choice)
    whole = client.chat.completions.create(**ask).choices[0]
    assert (called(as_lists(whole.message)), whole.finish_reason) == (
        [("get_weather", {"city": "Paris"})],
        "tool_calls",
    )
    _, calls, finish, _ = streamed(client, **ask)
    assert (called(calls), finish) == ([("get_weather", {"city": "Paris"})], "tool_calls")


def test_a_tool_made_of_a_pydantic_model_is_parsed(client):
    """The client declares it as strict."""
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    message = client.chat.completions.parse(**chat(LOOP, tools=[tool])).choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris")


def test_an_answer_is_parsed_into_a_pydantic_model(client):
    ask = dict(
        model=MODEL, messages=[{"role": "user", "content": question(PERSON, "Who is it?")}], response_format=Person
    )
    assert client.chat.completions.parse(**ask).choices[0].message.parsed == Person(**ADA)
    with client.chat.completions.stream(**ask) as stream:
        seen = [event.parsed for event in stream if event.type == "content.delta"]
    assert stream.get_final_completion().choices[0].message.parsed == Person(**ADA)
    assert len(seen) > 1, "it was streamed"


def test_an_answer_in_json_mode(client):
    ask = dict(
        messages=[{"role": "user", "content": question(PERSON, "Answer as JSON.")}],
        response_format={"type": "json_object"},
    )
    assert json.loads(client.chat.completions.create(model=MODEL, **ask).choices[0].message.content) == ADA
