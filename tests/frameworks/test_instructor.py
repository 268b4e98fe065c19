"""instructor: each of its modes, a question that is repeated because an answer breaks the client's rule, and streams of
partial answers."""

import instructor
import openai
import pytest
from agent_scripts import ADA, MODEL, PERSON, PERSON_TOOL, RETRY, question
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str
    age: int
    languages: list[str]


class Mortal(Person):
    age: int = Field(lt=150)


def ask(marker, **more):
    return (
        dict(model=MODEL, messages=[{"role": "user", "content": question(marker, "Who is it?")}], max_retries=0) | more
    )


@pytest.fixture
def client(url):
    def client(mode):
        return instructor.from_openai(openai.OpenAI(base_url=url, api_key="unused", max_retries=0), mode=mode)

    return client


MODES = [
    (instructor.Mode.TOOLS, PERSON_TOOL),
    (instructor.Mode.JSON, PERSON),
    (instructor.Mode.JSON_SCHEMA, PERSON),
    (instructor.Mode.MD_JSON, PERSON),
]


@pytest.mark.parametrize("mode, marker", MODES, ids=[mode.name for mode, _ in MODES])
def test_each_mode(client, mode, marker):
    answer = client(mode).chat.completions.create(response_model=Person, **ask(marker))
    # The answer's class is instructor's own, made of `Person`.
    assert isinstance(answer, Person) and answer.model_dump() == ADA


def test_an_answer_that_breaks_a_rule_is_asked_again(client):
    answer = client(instructor.Mode.JSON).chat.completions.create(response_model=Mortal, **ask(RETRY, max_retries=2))
    assert answer.model_dump() == ADA


def test_partial_answers(client):
    partial = client(instructor.Mode.JSON).chat.completions.create_partial(response_model=Person, **ask(PERSON))
    seen = list(partial)
    assert seen[-1].model_dump() == ADA and len({str(one) for one in seen}) > 1
