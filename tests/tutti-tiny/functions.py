"""The functions that tutti-tiny learns to call, the ways of asking for them, and the values in questions."""

from dataclasses import dataclass

import corpus
from corpus import NAMES, WORDS

CITIES = """Amsterdam Athens Berlin Bern Boston Cairo Chicago Delhi Dublin Geneva Hamburg Helsinki Kyoto Lagos Lima
Lisbon London Lyon Madrid Miami Milan Munich Nairobi Naples Osaka Oslo Paris Porto Prague Quito Riga Rome Seoul Sofia
Sydney Tokyo Toronto Turin Vienna Warsaw Zurich""".split()
ITEMS = "apples pears plums lemons books pens chairs tables lamps stones roses drums flutes harps doors trains".split()
ROOMS = "kitchen bedroom bathroom hall office garage garden cellar attic".split()
LANGUAGES = "French German Spanish Italian Dutch Greek Latin Polish".split()
SKIES = "sunny cloudy rainy windy foggy snowy stormy clear".split()


def word(rng):
    return rng.choice(WORDS) if rng.random() < 0.85 else corpus.made_up_word(rng)


def words(rng, most=4):
    return " ".join(word(rng) for _ in range(rng.randint(1, most)))


def city(rng):
    """Returns a city. Made-up ones teach the model to copy any name."""
    return rng.choice(CITIES) if rng.random() < 0.7 else corpus.made_up_word(rng).capitalize() + rng.choice("nsra")


def name(rng):
    return rng.choice(NAMES) if rng.random() < 0.7 else corpus.made_up_word(rng).capitalize() + rng.choice("nsra")


def number(rng):
    return rng.randint(0, corpus.LARGEST)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function: its names, its JSON type, and values."""

    names: str
    type: str
    value: object


@dataclass(frozen=True)
class Function:
    """Functions that do the same under several names. ``questions`` have the index of a parameter in braces."""

    names: str
    descriptions: tuple
    parameters: tuple
    questions: tuple
    result: object


def one_of(*choices):
    return lambda rng: rng.choice(choices)


def templates(texts, *slots):
    return tuple(text.format(**dict(slots)) for text in texts)


OPERANDS = (Parameter("a x first left", "integer", number), Parameter("b y second right", "integer", number))
CITY = Parameter("city location place town", "string", city)
PERSON = Parameter("name person who", "string", name)
FUNCTIONS = (
    Function(
        "add add_numbers sum plus addition",
        ("Add two numbers", "Adds two numbers", "The sum of two numbers"),
        OPERANDS,
        templates(corpus.ADDITION, ("a", "{0}"), ("b", "{1}")),
        lambda rng, a, b: a + b,
    ),
    Function(
        "subtract minus subtract_numbers difference",
        ("Subtract two numbers", "Subtracts the second number"),
        OPERANDS,
        (
            "{0} - {1}",
            "what is {0} - {1}",
            "{0} minus {1}",
            "what is {0} minus {1}",
            "compute {0} - {1}",
            "how much is {0} minus {1}",
        ),
        lambda rng, a, b: a - b,
    ),
    Function(
        "multiply times product multiply_numbers",
        ("Multiply two numbers", "The product of two numbers"),
        OPERANDS,
        (
            "{0} * {1}",
            "what is {0} * {1}",
            "{0} times {1}",
            "what is {0} times {1}",
            "multiply {0} by {1}",
            "compute {0} * {1}",
        ),
        lambda rng, a, b: a * b,
    ),
    Function(
        "get_weather weather current_weather get_current_weather fetch_weather",
        ("Get the weather", "The weather of a city", "Get the current weather in a city"),
        (CITY,),
        (
            "what is the weather in {0}",
            "how is the weather in {0}",
            "weather in {0}",
            "is it raining in {0}",
            "what's the weather like in {0}",
            "how warm is it in {0}",
            "do I need an umbrella in {0}",
            "what is the weather like in {0} today",
            "tell me the weather in {0}",
        ),
        lambda rng, city: f"{rng.choice(SKIES)}, {number(rng)} degrees",
    ),
    Function(
        "get_time current_time time_in clock",
        ("Get the time", "The time in a city", "Get the current time"),
        (CITY,),
        (
            "what time is it in {0}",
            "time in {0}",
            "what is the time in {0}",
            "tell me the time in {0}",
            "how late is it in {0}",
        ),
        lambda rng, city: f"{rng.randint(0, 23)}:{rng.randint(10, 59)}",
    ),
    Function(
        "get_population population count_people",
        ("The population of a city", "How many people live in a city"),
        (CITY,),
        ("how many people live in {0}", "what is the population of {0}", "population of {0}", "how big is {0}"),
        lambda rng, city: rng.randint(100, 999),
    ),
    Function(
        "get_age age_of find_age",
        ("The age of a person", "Get the age of a person"),
        (PERSON,),
        ("how old is {0}", "what is the age of {0}", "age of {0}", "tell me how old {0} is"),
        lambda rng, who: number(rng),
    ),
    Function(
        "find_phone phone_number get_phone lookup_phone",
        ("The phone number of a person", "Look up a phone number"),
        (PERSON,),
        ("what is the phone number of {0}", "phone number of {0}", "how can I call {0}", "find the number of {0}"),
        lambda rng, who: rng.randint(100, 9999),
    ),
    Function(
        "send_message send message text_person",
        ("Send a message to a person", "Send a message"),
        (Parameter("name to recipient person", "string", name), Parameter("text message body", "string", words)),
        ("tell {0}: {1}", "send {0} the message {1}", "write to {0}: {1}", 'send "{1}" to {0}', "message {0}: {1}"),
        lambda rng, to, text: "sent",
    ),
    Function(
        "play_music play play_song start_song",
        ("Play a song", "Play music"),
        (Parameter("song title name", "string", words),),
        ("play {0}", "play the song {0}", "I want to hear {0}", "put on {0}", "start the song {0}"),
        lambda rng, song: "playing",
    ),
    Function(
        "set_light light switch_light",
        ("Switch the light in a room", "Turn a light on or off"),
        (Parameter("room where", "string", one_of(*ROOMS)), Parameter("state power", "string", one_of("on", "off"))),
        (
            "turn {1} the light in the {0}",
            "switch {1} the light in the {0}",
            "light {1} in the {0}",
            "turn the {0} light {1}",
            "switch the {0} light {1}",
        ),
        lambda rng, room, state: "done",
    ),
    Function(
        "set_timer timer start_timer",
        ("Set a timer", "Start a timer"),
        (Parameter("minutes time duration", "integer", number),),
        (
            "set a timer for {0} minutes",
            "timer for {0} minutes",
            "start a timer of {0} minutes",
            "wake me in {0} minutes",
        ),
        lambda rng, minutes: "started",
    ),
    Function(
        "remind_me add_reminder reminder",
        ("Add a reminder", "Remind the user"),
        (Parameter("text task what", "string", words), Parameter("minutes delay", "integer", number)),
        ("remind me of {0} in {1} minutes", "in {1} minutes remind me of {0}", "reminder in {1} minutes: {0}"),
        lambda rng, text, minutes: "added",
    ),
    Function(
        "translate translate_word translation",
        ("Translate a word", "Translate a text"),
        (Parameter("word text", "string", word), Parameter("language to target", "string", one_of(*LANGUAGES))),
        ("translate {0} to {1}", "what is {0} in {1}", "how do you say {0} in {1}", "say {0} in {1}"),
        lambda rng, text, language: corpus.made_up_word(rng),
    ),
    Function(
        "search web_search search_web find",
        ("Search the web", "Search for a text"),
        (Parameter("query q text", "string", words),),
        ("search for {0}", "look up {0}", "find {0} on the web", "search the web for {0}", "google {0}"),
        lambda rng, query: f"{number(rng)} results",
    ),
    Function(
        "get_price price price_of",
        ("The price of an item", "Get a price"),
        (Parameter("item product", "string", one_of(*ITEMS)),),
        ("how much are {0}", "what do {0} cost", "price of {0}", "what is the price of {0}"),
        lambda rng, item: f"{number(rng)} euros",
    ),
    Function(
        "roll_dice roll dice",
        ("Roll a die", "Roll dice"),
        (Parameter("sides faces", "integer", number),),
        ("roll a die with {0} sides", "roll a die of {0} sides", "throw a die with {0} sides"),
        lambda rng, sides: number(rng),
    ),
    Function(
        "get_status status health",
        ("The status of the cluster", "Get the status"),
        (),
        (
            "what is the status",
            "status",
            "is everything all right",
            "how is the cluster",
            "show me the status",
            "tell me the status",
            "what is the state of the cluster",
            "how are the workers",
            "are all workers well",
            "is the cluster healthy",
            "check the health",
            "is everything running",
        ),
        lambda rng: "all workers are ready",
    ),
    Function(
        "get_date today date",
        ("The date of today", "Get the date"),
        (),
        (
            "what day is it",
            "what is the date",
            "which day is it today",
            "date of today",
            "tell me the date",
            "what is the date of today",
            "which day is today",
            "today's date",
        ),
        lambda rng: f"day {rng.randint(1, 31)}",
    ),
)

# Names of functions that no training document has: a tool of a user is one.
NEW_NAMES = (
    "sum",
    "fetch_weather",
    "clock",
    "find_age",
    "text_person",
    "start_song",
    "switch_light",
    "translation",
    "price_of",
)
