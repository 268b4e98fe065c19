"""Makes every text that tutti-tiny is trained and measured on, from a seed.

A document is a list of ``Segment``s: text with the weight that its tokens have in the loss. The tokens of answers have
weight 1. Those of a user's text have a weight near 0, because nobody asks the model to predict questions.

Held-out items never occur in training. A problem's key is hashed, and one key in ten is kept from every training
document. Keys ignore order (12 + 30 and 30 + 12 share one), so that the mirrored problem is held out, too.
"""

import hashlib
import random
from dataclasses import dataclass

from topics import (NOT_KNOWN, NOT_LEARNED, PROSE, SYSTEM_PROMPTS, TOO_LARGE, TOPICS, UNKNOWN_QUESTIONS, UNKNOWN_THINGS)

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
LARGEST = 99
TRAINED_KEY = "always trained"
PROMPT_WEIGHT = 0.02
OPERAND_WEIGHT = 0.02
ALWAYS_TRAINED_QUESTIONS = 2

WORDS = """red green blue yellow black white brown gold cat dog bird fish horse cow lion bear apple pear plum lemon bread
milk cheese honey sun moon star sky rain snow wind fire river lake hill tree leaf rose stone sand house door table chair
lamp book pen paper king queen ship train road bridge drum flute harp song happy big small old new fast slow hot cold
one two three four five six seven eight nine ten hello world good night day blue tutti music play all""".split()
WORDS = sorted(set(WORDS))

NAMES = """Ada Alan Alex Alice Anna Ben Bob Carl Clara David Emma Eva Frank Grace Hugo Ida Jack Jane John Kim Leo Lucy
Maria Max Mia Noah Nina Oscar Paul Peter Rosa Sam Sara Tom Uma Vera Zoe""".split()

ADDITION = ["{a} + {b}", "{a}+{b}", "{a} + {b} =", "{a} + {b} = ?", "{a}+{b}=?", "what is {a} + {b}", "what is {a}+{b}",
            "what is {a} plus {b}", "{a} plus {b}", "add {a} and {b}", "add {a} to {b}", "what's {a} + {b}",
            "what is the sum of {a} and {b}", "sum of {a} and {b}", "calculate {a} + {b}", "compute {a} + {b}",
            "how much is {a} + {b}", "how much is {a} plus {b}", "what do you get if you add {a} and {b}",
            "can you add {a} and {b}", "{a} and {b} together", "and {a} + {b}", "now add {a} and {b}"]
SUBTRACTION = ["{a} - {b}", "{a}-{b}", "{a} - {b} =", "{a} - {b} = ?", "{a}-{b}=?", "what is {a} - {b}", "what is {a}-{b}",
               "what is {a} minus {b}", "{a} minus {b}", "subtract {b} from {a}", "take {b} from {a}", "what's {a} - {b}",
               "take {b} away from {a}", "calculate {a} - {b}", "compute {a} - {b}", "how much is {a} - {b}",
               "how much is {a} minus {b}", "{a} take away {b}", "can you subtract {b} from {a}", "and {a} - {b}",
               "now subtract {b} from {a}"]
COUNT_UP = ["count from {a} to {b}", "count {a} to {b}", "can you count from {a} to {b}", "count up from {a} to {b}",
            "list the numbers from {a} to {b}", "numbers from {a} to {b}"]
COUNT_FROM_ONE = ["count to {b}", "can you count to {b}", "count up to {b}"]
COUNT_DOWN = ["count down from {a} to {b}", "count backwards from {a} to {b}", "count from {a} down to {b}",
              "count from {a} to {b}"]
REPEAT = ["repeat: {words}", "repeat {words}", "repeat after me: {words}", "say {words}", "say: {words}", "echo {words}",
          "repeat the words {words}", "repeat this: {words}", 'say "{words}"', "echo: {words}", "can you say {words}"]
REVERSE = ["reverse: {words}", "reverse {words}", "reverse the words {words}", "reverse the words: {words}",
           "reverse this: {words}", "say backwards: {words}", "say in reverse order: {words}", "backwards: {words}",
           "reverse the order of: {words}", 'reverse "{words}"', "reverse the list: {words}", "now reverse {words}"]
NAME_GIVEN = ["my name is {name}", "I am {name}", "call me {name}", "hello, my name is {name}", "hi, I am {name}",
              "I'm {name}"]
NAME_ASKED = ["what is my name", "what's my name", "do you know my name", "who am I", "do you remember my name",
              "can you tell me my name"]


@dataclass(frozen=True)
class Segment:
    text: str
    weight: float


@dataclass(frozen=True)
class Turn:
    task: str
    question: str
    answer: str


def held_out(key):
    """True for one key in ten. The key alone decides, so that the split is the same for every seed."""
    return hashlib.sha256(key.encode()).digest()[0] % 10 == 0


def from_split(rng, want_held_out, make):
    """Calls ``make``, which returns a key and an item, until the item belongs to the wanted split. Returns the item."""
    while True:
        key, item = make(rng)
        if held_out(key) == want_held_out:
            return item


def phrased(rng, question, mark):
    """Returns a question as people type it: polite or not, capitalised or not, with its closing mark or without."""
    style = rng.random()
    if style < 0.08:
        question = "please " + question
    elif style < 0.14:
        question = question + " please"
    if rng.random() < 0.55:
        question = question[0].upper() + question[1:]
    if rng.random() < 0.6:
        question += mark
    return question


def pair_key(kind, first, second):
    return f"{kind}/{min(first, second)}/{max(first, second)}"


def addition_problem(rng):
    a, b = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
    return pair_key("add", a, b), (a, b)


def subtraction_problem(rng):
    a, b = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
    return pair_key("subtract", a, b), (a, b)


def equation(sign, a, b):
    return f"{a} {sign} {b} = {a + b if sign == '+' else a - b}"


def sum_turn(rng, task, templates, sign, problem):
    a, b = problem
    question = rng.choice(templates).format(a=a, b=b)
    closed = question.endswith(("=", "?"))
    question = phrased(rng, question, "" if closed else "?") if question[0].isalpha() or not closed else question
    return Turn(task, question, equation(sign, a, b))


def addition_turn(rng, test=False):
    return sum_turn(rng, "add", ADDITION, "+", from_split(rng, test, addition_problem))


def subtraction_turn(rng, test=False):
    return sum_turn(rng, "subtract", SUBTRACTION, "-", from_split(rng, test, subtraction_problem))


def count_range(rng, short_below, middling_below):
    size = rng.random()
    if size < short_below:
        span = rng.randint(1, 11)
    elif size < middling_below:
        span = rng.randint(10, 25)
    else:
        span = rng.randint(25, LARGEST - 1)
    low = 1 if rng.random() < 0.25 else rng.randint(0, LARGEST - span)
    return low, low + span


def numbers(first, last):
    step = 1 if last >= first else -1
    return " ".join(str(n) for n in range(first, last + step, step))


def count_turn(rng, test=False, spans=(0.87, 0.97), from_one_is_trained=False):
    def make(rng):
        low, high = count_range(rng, *spans)
        key = TRAINED_KEY if from_one_is_trained and low == 1 else pair_key("count", low, high)
        return key, (low, high)

    low, high = from_split(rng, test, make)
    if rng.random() < 0.35:
        question = rng.choice(COUNT_DOWN).format(a=high, b=low)
        return Turn("count down", phrased(rng, question, "."), numbers(high, low))
    templates = COUNT_FROM_ONE if low == 1 and rng.random() < 0.6 else COUNT_UP
    question = rng.choice(templates).format(a=low, b=high)
    return Turn("count up", phrased(rng, question, "."), numbers(low, high))


def final_count_turn(rng, test=False):
    """Longer counts, where the model must look at both digits to stop. All counts from one are trained, because people
    ask for them."""
    return count_turn(rng, test, spans=(0.5, 0.96), from_one_is_trained=True)


def made_up_word(rng):
    """Returns a word of no list, so that the model learns to copy any word rather than to choose among known words."""
    return "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))


def word_list(rng, most, made_up_share):
    def make(rng):
        words = rng.sample(WORDS, rng.randint(min(2, most), most))
        return "words/" + " ".join(sorted(words)), words

    words = from_split(rng, False, make)
    return [made_up_word(rng) if rng.random() < made_up_share else word for word in words]


def held_out_words(rng, most):
    def make(rng):
        words = rng.sample(WORDS, rng.randint(2, most))
        return "words/" + " ".join(sorted(words)), words

    return from_split(rng, True, make)


def repeat_turn(rng, test=False):
    words = held_out_words(rng, 6) if test else word_list(rng, 7, rng.choice([0, 0, 0.3, 1]))
    if not test and rng.random() < 0.15:
        words = [words[0].capitalize(), *words[1:]]
    text = " ".join(words)
    return Turn("repeat", phrased_words(rng, REPEAT, text), text)


def reverse_turn(rng, test=False):
    words = held_out_words(rng, 5) if test else word_list(rng, 5, 0.3 if rng.random() < 0.1 else 0)
    joint = ", " if rng.random() < 0.15 else " "
    return Turn("reverse", phrased_words(rng, REVERSE, joint.join(words)), joint.join(reversed(words)))


def phrased_words(rng, templates, words):
    """Rephrases only the instruction. The words get no closing mark, because the mark would count as one of the words.
    """
    question = rng.choice(templates).format(words=words)
    if rng.random() < 0.08:
        question = "please " + question
    return question[0].upper() + question[1:] if rng.random() < 0.55 else question


QUESTION_WORDS = ("what", "who", "why", "how", "which", "where", "is", "are", "can", "do", "does", "am", "in which")


def chat_questions(test):
    pairs = []
    for topic, (answer, questions) in TOPICS.items():
        for index, question in enumerate(questions):
            kept_back = index >= ALWAYS_TRAINED_QUESTIONS and held_out(f"chat/{topic}/{question}")
            if kept_back == test:
                pairs.append((question, answer))
    return pairs


TRAINED_QUESTIONS = chat_questions(test=False)
HELD_OUT_QUESTIONS = chat_questions(test=True)


def chat_turn(rng, pair=None):
    question, answer = pair or rng.choice(TRAINED_QUESTIONS)
    question = question.replace("tutti", "Tutti") if rng.random() < 0.5 else question
    mark = "?" if question.lower().startswith(QUESTION_WORDS) else rng.choice(".!")
    return Turn("chat", phrased(rng, question, mark), answer)


def limit_turn(rng, test=False):
    """Requests that the model cannot serve, and answers that say so: other subjects, large numbers, multiplication."""
    kind = rng.random()
    if kind < 0.7:
        def make(rng):
            question, thing = rng.choice(UNKNOWN_QUESTIONS), rng.choice(UNKNOWN_THINGS)
            return f"unknown/{question}/{thing}", question.format(thing=thing)

        return Turn("limits", phrased(rng, from_split(rng, test, make), "?"), NOT_KNOWN)
    a, b = rng.randint(0, LARGEST), rng.randint(0, LARGEST)
    if kind < 0.85:
        large = rng.randint(100, 9999)
        a, b = rng.choice([(large, b), (a, large), (large, rng.randint(100, 9999))])
        question = rng.choice(rng.choice([ADDITION, SUBTRACTION])).format(a=a, b=b)
        return Turn("limits", question, TOO_LARGE)
    question = rng.choice(["{a} * {b}", "{a} times {b}", "multiply {a} by {b}", "{a} / {b}", "divide {a} by {b}",
                           "{a} divided by {b}", "{a}*{b}", "the square root of {a}", "{a} x {b}"]).format(a=a, b=b)
    return Turn("limits", rng.choice(["", "what is "]) + question, NOT_LEARNED)


def name_given_turn(rng, name):
    return Turn("name", phrased(rng, rng.choice(NAME_GIVEN).format(name=name), "."), f"Nice to meet you, {name}!")


def name_asked_turn(rng, name):
    answer = f"Your name is {name}." if name else "You have not told me your name."
    return Turn("name", phrased(rng, rng.choice(NAME_ASKED), "?"), answer)


@dataclass(frozen=True)
class Mix:
    """Weights by which tasks and kinds of documents are drawn."""

    turns: dict
    documents: dict


def any_turn(rng, mix):
    return rng.choices(list(mix.turns), list(mix.turns.values()))[0](rng)


def conversation_turns(rng, mix):
    count = rng.choices([1, 2, 3, 4, 5], [50, 24, 16, 6, 4])[0]
    turns = [any_turn(rng, mix) for _ in range(count)]
    if rng.random() < 0.06:
        name = rng.choice(NAMES) if rng.random() < 0.8 else None
        if name:
            turns.insert(0, name_given_turn(rng, name))
        turns.append(name_asked_turn(rng, name))
    return turns


def conversation(rng, mix):
    segments = []
    if rng.random() < 0.3:
        segments += [Segment(f"{IM_START}system\n", 0), Segment(rng.choice(SYSTEM_PROMPTS), 0), Segment(f"{IM_END}\n", 0)]
    for turn in conversation_turns(rng, mix):
        segments += [Segment(f"{IM_START}user\n", 0), Segment(turn.question, PROMPT_WEIGHT),
                     Segment(f"{IM_END}\n{IM_START}assistant\n", 0), Segment(turn.answer, 1), Segment(IM_END, 1),
                     Segment("\n", 0)]
    return segments


def equation_lines(rng, _mix):
    """Sums in plain text. The text of a single sum ends after it. A page of several sums begins with a heading, so that
    each prompt has only one right end.

    One answer in four follows a separate space, as after the prompt ``12 + 30 = ``.
    """
    count = rng.choice([1, 1, 2, 3, 4, 6, 8])
    segments = [] if count == 1 else [Segment("Sums:\n", 0)]
    for line in range(count):
        sign, make = rng.choice([("+", addition_problem), ("-", subtraction_problem)])
        left, right = equation(sign, *from_split(rng, False, make)).split(" = ")
        split_space = rng.random() < 0.25
        segments += [Segment(left, OPERAND_WEIGHT), Segment(" = " if split_space else " =", 0.2),
                     Segment(right if split_space else " " + right, 1)]
        if line + 1 < count:
            segments.append(Segment("\n", 0.05))
    return [*segments, Segment(END_OF_TEXT, 1 if count == 1 else 0.05)]


def prose(rng, _mix):
    first, second, rest = rng.choice(PROSE).split(" ", 2)
    return [Segment(first + " " + second, 0.1), Segment(" " + rest, 0.5), Segment(END_OF_TEXT, 1)]


def number_run(rng, _mix):
    """A run of numbers up to a multiple of ten, so that each start has one right continuation and end."""
    first = rng.randint(0, 89)
    last = (first // 10 + 1) * 10
    if last - first < 3:
        last += 10
    shown = min(3, last - first)
    head = numbers(first, first + shown - 1)
    return [Segment(head, OPERAND_WEIGHT), Segment(numbers(first, last)[len(head):], 1), Segment(END_OF_TEXT, 1)]


# The early mix has many sums, because sums are learned first. The late mix has more copying and counting.
EARLY_MIX = Mix(
    turns={addition_turn: 24, subtraction_turn: 30, chat_turn: 20, count_turn: 7, repeat_turn: 6, reverse_turn: 15,
           limit_turn: 4},
    documents={conversation: 62, equation_lines: 30, prose: 5, number_run: 3},
)
LATE_MIX = Mix(
    turns={addition_turn: 15, subtraction_turn: 26, chat_turn: 14, count_turn: 14, repeat_turn: 18, reverse_turn: 12,
           limit_turn: 3},
    documents={conversation: 72, equation_lines: 22, prose: 3, number_run: 3},
)

FINAL_MIX = Mix(
    turns={addition_turn: 14, subtraction_turn: 24, chat_turn: 10, final_count_turn: 34, repeat_turn: 5,
           reverse_turn: 11, limit_turn: 2},
    documents={conversation: 82, equation_lines: 14, prose: 2, number_run: 2},
)


def document(rng, mix):
    kind = rng.choices(list(mix.documents), list(mix.documents.values()))[0]
    return kind(rng, mix)


def tokenizer_texts(rng):
    """Returns texts for training the tokenizer. Each word is so frequent that it becomes a token, with and without a
    space before it."""
    texts = []
    for word in WORDS:
        texts += [word + "\n"] * 300 + [f": {word} {word}"] * 150
    for answer, questions in TOPICS.values():
        texts += [answer] * 30
        texts += [question for question in questions for _ in range(4)]
    texts += PROSE * 10 + [NOT_KNOWN, TOO_LARGE, NOT_LEARNED] * 30
    texts += ["user\n", "assistant\n", "system\n"] * 600
    texts += [turn.question for _ in range(3000) for turn in conversation_turns(rng, EARLY_MIX)]
    return texts


def test_sets(seed=1):
    """Returns held-out questions by task as pairs (history, turn). The history has only trained turns."""
    rng = random.Random(seed)

    def alone(make, count):
        return [([], make(rng, True)) for _ in range(count)]

    def past():
        return any_turn(rng, EARLY_MIX)

    sums = alone(addition_turn, 300)
    differences = alone(subtraction_turn, 600)
    positive = [item for item in differences if " = -" not in item[1].answer]
    negative = [item for item in differences if " = -" in item[1].answer]
    after_history = [([past(), past()], rng.choice([addition_turn, subtraction_turn])(rng, True)) for _ in range(200)]
    names = []
    for _ in range(100):
        name = rng.choice(NAMES)
        names.append(([name_given_turn(rng, name), past()], name_asked_turn(rng, name)))
    return {
        "add": sums,
        "subtract, result >= 0": positive,
        "subtract, result < 0": negative,
        "add or subtract, third turn": after_history,
        "count": [([], count_turn(rng, True, from_one_is_trained=True)) for _ in range(200)],
        "repeat": alone(repeat_turn, 200),
        "reverse": alone(reverse_turn, 300),
        "chat, new phrasing": [([], chat_turn(rng, pair)) for pair in HELD_OUT_QUESTIONS],
        "chat, known phrasing": [([], chat_turn(rng)) for _ in range(200)],
        "limits": alone(limit_turn, 100),
        "name, third turn": names,
    }


def plain_test_set(seed=2, count=200):
    """Returns held-out sums as plain completion prompts."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        sign, make = rng.choice([("+", addition_problem), ("-", subtraction_problem)])
        left, right = equation(sign, *from_split(rng, True, make)).split(" = ")
        pairs.append((left + " = ", right))
    return pairs
