"""Answers that follow schemas, sampled at temperature 1 and judged by Python's jsonschema.

The schemas are drawn by a seed, in families of keywords. Two models answer: one with random weights and a byte-level
tokenizer made for the test, and the shipped one. An answer that ends with `stop` must validate, and at least half of
them must end so. Then the same requests are sent under other conditions, and must get the same tokens. The exit code is
1 if an answer does not validate, if too few end, or if a token differs.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import pathlib
import random
import signal
import sys
import tempfile

import jsonschema
from byte_level_model import byte_level_model
from harness import Server, wait_for
from streams import Streams, signal_all
from structured_schemas import draw
from topologies import DISAGGREGATED, handovers
from tracing_cost import TICKS

MAX_TOKENS = 160
AT_ONCE = 8
# Pages of the small pool: enough for the longest request, and not for all that run at once. A page of the random model
# has 16 tokens.
SMALL_POOL_PAGES, PAGE_BYTES, RUNNING = 14, 28 << 10, 8
# Seconds after which the end of a worker does not count as an early exit (conductor/src/supervise/backoff.rs).
LIVED_WELL = 10

# Flags of the conditions. Each must give the tokens of "plain".
PLAIN = ("--workers", 1)
CONDITIONS = {
    "plain": PLAIN,
    "chunks of 1": ("--workers", 1, "--max-prefill-chunk-size", 1, "--no-prefix-cache"),
    "prefix hits": PLAIN,
    "preemption": ("--workers", 1, "--admission", "optimistic", "--max-running-requests", RUNNING, "--kv-cache-memory", SMALL_POOL_PAGES * PAGE_BYTES),
    "killed workers": ("--workers", 2, "--max-replays", 8, "--heartbeat-timeout", 60),
    "two ranks": ("--workers", 2, "--tp", 2),
    "hand-over": ("--topology", DISAGGREGATED),
}


@dataclasses.dataclass
class Answer:
    family: str
    schema: object
    text: str
    tokens: list
    reason: str


def options(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=39, help="draws the schemas (default: 39)")
    parser.add_argument("--count", type=int, default=500, help="number of schemas (default: 500)")
    parser.add_argument("--models", nargs="*", choices=("random", "shipped"), default=["random", "shipped"])
    parser.add_argument("--conditions", nargs="*", choices=list(CONDITIONS), default=list(CONDITIONS), help="of the random model")
    parser.add_argument("--short", action="store_true", help="40 schemas, the random model and three conditions")
    chosen = parser.parse_args(words)
    if chosen.short:
        chosen.count, chosen.models = 40, ["random"]
        chosen.conditions = ["plain", "chunks of 1", "killed workers"]
    return chosen


def request(number, schema):
    """The request for a schema. Half of the requests use vLLM's spelling."""
    body = {"prompt": f"Here is JSON, document {number}: ", "temperature": 1, "seed": number, "max_tokens": MAX_TOKENS, "return_token_ids": True}
    if number % 2:
        return body | {"structured_outputs": {"json": schema}}
    return body | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def answer(drawn, choice):
    family, schema = drawn
    (reason, _), = choice["ends"]
    return Answer(family, schema, choice["text"], choice["token_ids"], reason)


def ask_all(server, drawn, at_once=AT_ONCE, ask=None):
    """Returns the answers to all schemas. Requests run in groups, and `ask(server, bodies)` sends every fourth one."""
    ask, answers = ask or all_at_once, []
    for start in range(0, len(drawn), at_once):
        group = drawn[start : start + at_once]
        bodies = [request(start + n, schema) for n, (_, schema) in enumerate(group)]
        # A supervisor waits longer before each restart, so workers are killed in every fourth group.
        asks = ask if start // at_once % 4 == 0 else all_at_once
        answers += [answer(one, got["choices"][0]) for one, got in zip(group, asks(server, bodies))]
    return answers


def all_at_once(server, bodies):
    return Streams(server, "/v1/completions", bodies).results()


class Judge:
    """Says whether an answer is valid. What Python's checkers of formats do not know is not judged."""

    formats = jsonschema.FormatChecker(("ipv4", "ipv6", "uuid", "email"))

    def problem(self, answer):
        """Returns what is wrong with an answer that has ended, or None."""
        try:
            document = json.loads(answer.text)
        except ValueError as problem:
            return f"no JSON: {problem}"
        kind = jsonschema.validators.validator_for(answer.schema, jsonschema.Draft202012Validator)
        found = jsonschema.exceptions.best_match(kind(answer.schema, format_checker=self.formats).iter_errors(document))
        return found and found.message


def judged(answers, say):
    """Returns the problems of answers, and says how many of each family have ended."""
    judge, problems = Judge(), []
    counts = collections.defaultdict(collections.Counter)
    for number, one in enumerate(answers):
        counts[one.family][one.reason] += 1
        if one.reason == "stop" and (problem := judge.problem(one)):
            problems.append(f"schema {number}, {json.dumps(one.schema)}: {one.text!r}: {problem}")
    ended = sum(count["stop"] for count in counts.values())
    for family, count in counts.items():
        say(f"  {family:16} {count['stop']:3} of {count.total():3} ended")
    say(f"  {ended} of {len(answers)} answers ended, {len(problems)} of them do not validate")
    if 2 * ended < len(answers):
        problems.append(f"{ended} of {len(answers)} answers ended, fewer than half")
    return problems


def age(pid):
    """Returns the seconds since a process began."""
    begun = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / TICKS
    return float(pathlib.Path("/proc/uptime").read_text().split()[0]) - begun


def killing(server, bodies):
    """Kills all workers when half of the answers have begun. The first answers may end before."""
    victims = server.workers()
    # Workers that end before are a crash loop for the conductor, which then refuses requests.
    wait_for("workers that have lived long enough", lambda: min(map(age, victims)) > LIVED_WELL)
    in_flight = lambda: server.metrics()["tutti_requests_in_flight"]
    wait_for("the end of the group before", lambda: in_flight() == 0)
    streams = Streams(server, "/v1/completions", bodies, stopped=victims)
    # A request that arrives while no worker has the model would be refused.
    wait_for("all requests", lambda: in_flight() == len(bodies))
    streams.stop_in_the_middle(victims, len(bodies) // 2, tokens=2)
    signal_all(victims, signal.SIGKILL)
    found = streams.results()
    wait_for("replacements", lambda: not set(victims) & set(server.workers()) and server.metrics()["tutti_workers_ready"] == 2)
    return found


def under(condition, flags, drawn, directory):
    """Returns the answers under a condition, the answers that they are compared with if these are not those of "plain",
    and a text that proves that the condition occurred."""
    server = Server("conductor", (*CONDITIONS[condition], *flags), directory)
    try:
        server.wait_until_ready()
        if condition == "prefix hits":
            ask_all(server, drawn)
        # Sums over ranks are rounded differently, so two ranks are compared with themselves, one request at a time.
        expected = ask_all(server, drawn, at_once=1) if condition == "two ranks" else None
        answers = ask_all(server, drawn, ask=killing if condition == "killed workers" else None)
        metrics = server.metrics()
        proof = {
            "preemption": ("preemptions", metrics.get("tutti_worker_preemptions", 0)),
            "killed workers": ("replays", metrics.get("tutti_request_replays_total", 0)),
            "prefix hits": ("cached tokens", metrics.get("tutti_worker_cached_tokens", 0)),
            "hand-over": ("hand-overs", handovers(server)),
        }.get(condition)
        server.wait_until_idle()
        server.stop()
    except BaseException:
        server.destroy()
        raise
    assert proof is None or proof[1] > 0, f"{condition}: no {proof[0]}"
    return answers, expected, f", {proof[1]:.0f} {proof[0]}" if proof else ""


def differences(condition, expected, got):
    """Returns where tokens differ."""
    pairs = enumerate(zip(expected, got))
    return [f"{condition}: schema {n} gets {b.text!r}, not {a.text!r}" for n, (a, b) in pairs if (a.tokens, a.reason) != (b.tokens, b.reason)]


def run(chosen, say=print):
    """Runs the chosen models and conditions. Returns the problems."""
    drawn, problems = draw(random.Random(chosen.seed), chosen.count), []
    for model in chosen.models:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            flags = ("--model", byte_level_model(folder)) if model == "random" else ()
            conditions = chosen.conditions if model == "random" else []
            plain = None
            for condition in ["plain", *(other for other in conditions if other != "plain")]:
                logs = folder / condition.replace(" ", "-")
                logs.mkdir()
                answers, expected, proof = under(condition, flags, drawn, logs)
                plain = plain or answers
                say(f"{model} model, {condition}: {len(answers)} answers{proof}")
                problems += judged(answers, say) if answers is plain or expected else []
                problems += differences(condition, expected or plain, answers)
    return problems


def main():
    problems = run(options())
    for problem in problems:
        print(problem[:1000], file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
