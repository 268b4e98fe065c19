"""Makes the texts of the two skills that tutti-tiny learns after its first training: calling a tool that the prompt
shows, and answering as JSON.

Prompts are rendered by the chat template of the checkpoint, so that training, evaluation and serving see the same text.
One prompt in ten is kept from every training document, by a hash of the function's name, the wording and the values.
"""

import functools
import json
import random
from dataclasses import dataclass

import jinja2

import corpus
from corpus import IM_END, WORDS, Mix, Segment
from export import CHAT_TEMPLATE
from functions import FUNCTIONS, ITEMS, NEW_NAMES, OPERANDS, ROOMS, SKIES, city, name, number, one_of
from topics import SYSTEM_PROMPTS


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


@functools.cache
def template():
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = dumps
    return environment.from_string(CHAT_TEMPLATE)


def render(messages, tools=None, **more):
    return template().render(messages=messages, tools=tools, **more)


def pick(rng, names, test_new=False):
    """Returns one of the names in a text. Names of functions that are tested as new are only chosen for that test."""
    names = names.split()
    new = [name for name in names if name in NEW_NAMES]
    return rng.choice(new if test_new and new else [name for name in names if name not in NEW_NAMES])


def made_up_name(rng):
    """Returns a function's name of no list, so that the model learns to copy the name that it is shown."""
    parts = [corpus.made_up_word, lambda rng: rng.choice(WORDS)]
    return "_".join(rng.choice(parts)(rng) for _ in range(rng.randint(1, 3)))


def declare(rng, function, name, names):
    """Returns a tool as clients declare it."""
    properties = {}
    for parameter, chosen in zip(function.parameters, names):
        properties[chosen] = {"type": parameter.type}
        if rng.random() < 0.15:
            properties[chosen]["description"] = rng.choice(parameter.names.split())
    schema = {"type": "object", "properties": properties}
    if names and rng.random() < 0.85:
        schema["required"] = list(names)
    if rng.random() < 0.1:
        schema["additionalProperties"] = False
    declared = {"name": name}
    if rng.random() < 0.8 or name not in function.names.split():
        declared["description"] = rng.choice(function.descriptions) + rng.choice(("", "."))
    return {"type": "function", "function": {**declared, "parameters": schema}}


@dataclass(frozen=True)
class Chat:
    """A conversation: messages, the tools that the client declares, and the number of messages before the answer."""

    messages: list
    tools: list | None
    asked: int

    def segments(self):
        """Returns the text. Only answers of the model count in the loss."""
        segments, done = [], 0
        for end, message in enumerate(self.messages):
            if message["role"] != "assistant" or end < self.asked:
                continue
            prompt = render(self.messages[:end], self.tools, add_generation_prompt=True)
            whole = render(self.messages[: end + 1], self.tools)
            answer = whole[len(prompt) :].removesuffix(IM_END + "\n")
            segments += [Segment(prompt[done:], 0), Segment(answer, 1), Segment(IM_END, 1)]
            done = len(whole) - 1
        return [*segments, Segment("\n", 0)]


def system(rng, share=0.2):
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < share else []


def past(rng):
    """Returns an earlier turn, in some conversations."""
    if rng.random() < 0.85:
        return []
    turn = corpus.any_turn(rng, PAST)
    return [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]


PAST = Mix(turns={corpus.addition_turn: 1, corpus.chat_turn: 1, corpus.repeat_turn: 1}, documents={})


def question_of(rng, text):
    return (
        corpus.phrased(rng, text, "?" if text.startswith(corpus.QUESTION_WORDS) else ".")
        if rng.random() < 0.85
        else text
    )


def tool_chat(rng, test=False, new_name=False, made_up_share=0):
    """Returns a conversation in which one of the tools that are shown answers the question. A share of the functions
    has names of no list."""

    def make(rng):
        candidates = [
            function for function in FUNCTIONS if not new_name or set(function.names.split()) & set(NEW_NAMES)
        ]
        function = rng.choice(candidates)
        chosen, wording = pick(rng, function.names, new_name), rng.choice(function.questions)
        values = [parameter.value(rng) for parameter in function.parameters]
        # Values alone could not be held out where there are few, nor wordings where there are two.
        return f"tool/{chosen}/{wording}/{values}", (function, chosen, wording, values)

    function, chosen, wording, values = corpus.from_split(rng, test, make)
    if made_up_share and rng.random() < made_up_share:
        chosen = made_up_name(rng)
    names = [pick(rng, parameter.names) for parameter in function.parameters]
    tools = [declare(rng, function, chosen, names)]
    for other in rng.sample(FUNCTIONS, rng.choices((0, 1, 2), (45, 40, 15))[0]):
        if other is not function:
            tools.append(declare(rng, other, pick(rng, other.names), [pick(rng, p.names) for p in other.parameters]))
    rng.shuffle(tools)
    before = system(rng) + past(rng)
    call = {"type": "function", "function": {"name": chosen, "arguments": dict(zip(names, values))}}
    messages = [
        *before,
        {"role": "user", "content": question_of(rng, wording.format(*values))},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    if not test and rng.random() < 0.4:
        result = str(function.result(rng, *values))
        messages += [{"role": "tool", "content": result}, {"role": "assistant", "content": told(result)}]
    return Chat(messages, tools, len(before) + 1)


def told(result):
    """Returns the answer to a tool's result."""
    return f"The answer is: {result}"


def result_chat(rng, test=False):
    """Returns a conversation that ends with the answer to a tool's result, whose call is part of the prompt."""
    while (
        len((chat := tool_chat(rng)).messages) < 2
        or chat.messages[-1]["role"] != "assistant"
        or chat.messages[-1].get("tool_calls")
    ):
        pass
    return Chat(chat.messages, chat.tools, len(chat.messages) - 1)


def declined_chat(rng, test=False):
    """Returns a conversation in which no tool fits the question, so that it is answered as without tools."""
    function = rng.choice([function for function in FUNCTIONS if function.parameters != OPERANDS])
    tools = [declare(rng, function, pick(rng, function.names), [pick(rng, p.names) for p in function.parameters])]
    turn = (
        rng.choice((corpus.addition_turn, corpus.subtraction_turn))(rng, test)
        if rng.random() < 0.5
        else corpus.chat_turn(rng)
    )
    before = system(rng)
    return Chat(
        [*before, {"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}],
        tools,
        len(before) + 1,
    )


# Answers as JSON. A field has names and a type.
FIELDS = {
    "who": ("name person user first_name", {"type": "string"}),
    "age": ("age years", {"type": "integer"}),
    "city": ("city town place home", {"type": "string"}),
    "sky": ("weather sky condition", {"type": "string"}),
    "degrees": ("temperature degrees", {"type": "integer"}),
    "count": ("count quantity amount", {"type": "integer"}),
    "item": ("item product thing", {"type": "string"}),
    "room": ("room where", {"type": "string"}),
    "on": ("on is_on lit", {"type": "boolean"}),
    "answer": ("answer reply response text", {"type": "string"}),
    "words": ("words list items", {"type": "array", "items": {"type": "string"}}),
}
STATEMENTS = (
    (
        ("who", "age"),
        (
            "{who} is {age} years old",
            "{who} is {age}",
            "my name is {who} and I am {age}",
            "I am {who}, {age} years old",
            "{who}, {age}",
            "this is {who}, age {age}",
            "hi, I am {who} and I am {age} years old",
        ),
    ),
    (
        ("who", "age", "city"),
        (
            "{who} is {age} years old and lives in {city}",
            "my name is {who}, I am {age} and I live in {city}",
            "{who}, {age}, from {city}",
        ),
    ),
    (("who", "city"), ("{who} lives in {city}", "I am {who} from {city}", "my name is {who} and I live in {city}")),
    (("sky", "degrees", "city"), ("it is {sky} and {degrees} degrees in {city}", "{city}: {sky}, {degrees} degrees")),
    (("count", "item"), ("I want {count} {item}", "{count} {item}, please", "I would like to buy {count} {item}")),
    (("who", "count", "item"), ("{who} has {count} {item}", "{who} wants {count} {item}")),
    (("room", "on"), ("the light in the {room} is {on}", "the {room} light is {on}")),
)
VALUES = {
    "who": name,
    "age": number,
    "city": city,
    "sky": one_of(*SKIES),
    "degrees": number,
    "count": number,
    "item": one_of(*ITEMS),
    "room": one_of(*ROOMS),
    "on": one_of(True, False),
}


def statement(rng, test):
    """Returns a text and the values of its fields."""

    def make(rng):
        fields, wordings = rng.choice(STATEMENTS)
        wording, values = rng.choice(wordings), {field: VALUES[field](rng) for field in fields}
        return f"json/{wording}/{values}", (wording, values)

    wording, values = corpus.from_split(rng, test, make)
    shown = {
        field: {True: "on", False: "off"}.get(value, value) if field == "on" else value
        for field, value in values.items()
    }
    return corpus.phrased(rng, wording.format(**shown), "."), values


def task(rng, test):
    """Returns a question that is no statement, and the values of the answer's fields.

    The model works a sum out behind its operands, as in the answers of its first training: results that stand alone, or
    behind fields with the operands, went wrong in one case of three and more. So the whole answer is a field.
    """
    kind = rng.random()
    if kind < 0.2 and not test:
        # Questions about Tutti are not held out.
        turn = corpus.chat_turn(rng)
        return turn.question, {"answer": turn.answer}
    if kind < 0.7:
        turn = rng.choice((corpus.addition_turn, corpus.subtraction_turn))(rng, test)
        return turn.question, {"answer": turn.answer}
    turn = (corpus.repeat_turn if kind < 0.85 else corpus.reverse_turn)(rng, test)
    return turn.question, {"words": turn.answer.replace(",", "").split(" ")}


@dataclass(frozen=True)
class JsonAnswer:
    """A prompt, and its answer in fields."""

    messages: list
    fields: dict

    def segments(self, is_shown):
        """Returns the text. Where the prompt shows no schema, a grammar forces the keys, so that they do not count."""
        prompt = render(self.messages, add_generation_prompt=True)
        if is_shown:
            return [Segment(prompt, 0), Segment(dumps(self.fields), 1), Segment(IM_END, 1), Segment("\n", 0)]
        segments, before = [Segment(prompt, 0)], "{"
        for key, value in self.fields.items():
            segments += [Segment(f'{before}"{key}":', 0.05), Segment(f" {dumps(value)}", 1)]
            before = ", "
        return [*segments, Segment("}", 1), Segment(IM_END, 1), Segment("\n", 0)]


def json_answer(rng, is_shown, test=False):
    """Returns a prompt whose answer is JSON. ``is_shown`` says that the prompt asks for it and shows the schema."""
    question, values = statement(rng, test) if rng.random() < 0.65 else task(rng, test)
    fields = rng.sample(list(values), len(values) if rng.random() < 0.75 else rng.randint(1, len(values)))
    if rng.random() < 0.5:
        fields = [field for field in values if field in fields]
    keys = {field: rng.choice(FIELDS[field][0].split()) for field in fields}
    answer = {keys[field]: values[field] for field in fields}
    before = system(rng, 0 if is_shown else 0.2)
    if is_shown:
        properties = {keys[field]: FIELDS[field][1] for field in fields}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        if rng.random() < 0.2:
            schema["additionalProperties"] = False
        form = rng.random()
        if form < 0.5:
            before = [{"role": "system", "content": rng.choice(SHOWN).format(schema=dumps(schema))}]
        elif form < 0.75:
            question += "\n" + rng.choice(SHOWN).format(schema=dumps(schema))
        else:
            question += "\n" + rng.choice(NAMED).format(keys=" and ".join(properties))
    return JsonAnswer([*before, {"role": "user", "content": question}], answer)


SHOWN = (
    "Answer as JSON with this schema: {schema}",
    "Answer with JSON that follows this schema: {schema}",
    "JSON schema: {schema}",
)
NAMED = ("Answer as JSON with the keys {keys}.", "Answer as JSON: {keys}", "Reply with JSON that has the keys {keys}.")


# Step from which more documents are those of the first training, and more functions have made-up names.
LATE_STEP = 550


def document(rng, step):
    """Returns a document of the skills, or one of the first training so that nothing of it is lost."""
    is_late = step >= LATE_STEP
    tools, declined, answers = (0.3, 0.36, 0.58) if is_late else (0.32, 0.38, 0.62)
    kind = rng.random()
    if kind < tools:
        return tool_chat(rng, made_up_share=0.35 if is_late else 0.15).segments()
    if kind < declined:
        return declined_chat(rng).segments()
    if kind < answers:
        is_shown = rng.random() < (0.65 if is_late else 0.6)
        return json_answer(rng, is_shown).segments(is_shown)
    return corpus.document(rng, corpus.LATE_MIX if rng.random() < 0.5 else corpus.FINAL_MIX)


def tokenizer_texts(rng, count=4000):
    """Returns texts that show what the tokenizer still cuts into many pieces."""
    texts = []
    for _ in range(count):
        texts.append("".join(segment.text for segment in tool_chat(rng).segments()))
        texts.append("".join(segment.text for segment in json_answer(rng, True).segments(True)))
    return texts


def test_sets(seed=3, count=200):
    """Returns held-out prompts by task, as pairs (prompt, right answer)."""
    rng = random.Random(seed)

    def asked(chat):
        prompt = render(chat.messages[: chat.asked], chat.tools, add_generation_prompt=True)
        return prompt, render(chat.messages[: chat.asked + 1], chat.tools)[len(prompt) :].removesuffix(IM_END + "\n")

    def shown(answer):
        return render(answer.messages, add_generation_prompt=True), dumps(answer.fields)

    return {
        "tool call": [asked(tool_chat(rng, test=True)) for _ in range(count)],
        "tool call, new function name": [asked(tool_chat(rng, test=True, new_name=True)) for _ in range(count)],
        "answer to a tool's result": [asked(result_chat(rng)) for _ in range(count)],
        "no tool fits": [asked(declined_chat(rng, test=True)) for _ in range(count)],
        "JSON, schema in the prompt": [shown(json_answer(rng, True, test=True)) for _ in range(count)],
    }


def constrained_test_set(seed=4, count=200):
    """Returns held-out prompts that show no schema, as pairs (prompt, fields): a grammar forces the keys."""
    rng = random.Random(seed)
    answers = [json_answer(rng, False, test=True) for _ in range(count)]
    return [(render(answer.messages, add_generation_prompt=True), answer.fields) for answer in answers]
