"""Questions of clients and the scripted model's answers, for tool calls and structured output. Each
client is a test of its own in tests/cluster/test_agents.py and in tests/frameworks."""

import json

from scripted import Scripted

MODEL = "scripted"

# Markers of the scripts (scripted.py). A prompt of a test contains one.
LOOP, PERSON, RETRY, PARALLEL, PLAIN, NO_ARGUMENTS, PERSON_TOOL = (
    "482915",
    "730164",
    "615823",
    "904178",
    "271640",
    "358092",
    "846203",
)

WEATHER = {"Paris": "sunny, 21 degrees", "Oslo": "snowy, -3 degrees"}
TEXT = "In Paris it is sunny, in Oslo it snows: 24 degrees apart. ❄"
ADA = {"name": "Ada Lovelace", "age": 36, "languages": ["English", "Français"]}


def call(name, /, **arguments):
    """A tool call as Qwen3 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


# Three turns: a call, another call by its result, and the answer.
LOOP_TURNS = [
    call("get_weather", city="Paris"),
    "Now the other one.\n" + call("get_weather", city="Oslo"),
    TEXT,
]

SCRIPTS = {
    LOOP: LOOP_TURNS,
    PERSON: [json.dumps(ADA, ensure_ascii=False)],
    # The first answer breaks a rule that only the client knows, so that it asks again.
    RETRY: [json.dumps(ADA | {"age": 360}), json.dumps(ADA, ensure_ascii=False)],
    PARALLEL: [f"{call('get_weather', city='Paris')}\n{call('get_weather', city='Oslo')}", TEXT],
    PLAIN: [TEXT],
    NO_ARGUMENTS: [call("list_cities"), "Paris and Oslo."],
    PERSON_TOOL: [call("Person", **ADA)],
}


def question(marker, text="How is the weather in Paris and in Oslo?"):
    return f"{text} ({marker})"


def weather(city):
    return WEATHER[city]


def serve(directory, launch, *arguments):
    """Starts a cluster of two workers whose model follows the scripts. Steps take time, so that streams have several
    events."""
    scripted = Scripted(directory / "scripted", SCRIPTS)
    steps = {"TUTTI_SIM__FIXED_US": "2000"}
    return scripted.start(launch, "--workers", 2, "--served-model-name", MODEL, *arguments, env=steps)
