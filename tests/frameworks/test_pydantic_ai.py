"""pydantic-ai: an agent with tools, and answers of a type in all its output modes."""

import asyncio

import pytest
from agent_scripts import ADA, LOOP, MODEL, PERSON, PERSON_TOOL, PLAIN, TEXT, question, weather
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int
    languages: list[str]


@pytest.fixture
def model(url):
    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="unused"))


def weather_agent(model):
    agent = Agent(model, instructions="You know the weather.")

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return weather(city)

    return agent


def test_an_agent_calls_its_tools(model):
    result = weather_agent(model).run_sync(question(LOOP))
    assert result.output == TEXT
    assert result.usage.requests == 3


def test_an_agent_that_streams(model):
    async def main():
        async with weather_agent(model).run_stream(question(PLAIN)) as result:
            return [text async for text in result.stream_text(debounce_by=None)]

    texts = asyncio.run(main())
    assert texts[-1] == TEXT and len(texts) > 1


OUTPUTS = [
    (ToolOutput(Person, name="Person"), PERSON_TOOL),
    (NativeOutput(Person), PERSON),
    (PromptedOutput(Person), PERSON),
]


@pytest.mark.parametrize("output, marker", OUTPUTS, ids=("tool", "native", "prompted"))
def test_an_answer_of_a_type(model, output, marker):
    result = Agent(model, output_type=output).run_sync(question(marker, "Who is it?"))
    assert result.output == Person(**ADA)
