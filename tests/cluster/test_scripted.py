"""The scripted model (worker/models/src/sim_device/script.rs) gives exactly the tokens that a test has written, through
router, conductor and worker, whatever happens to the workers. Tests of clients and of formats rely on it."""

import os
import signal

import pytest
from scripted import Scripted
from streams import Streams

# Text with several languages, an emoji of four bytes, and JSON.
FIRST = 'Grüße aus Zürich, こんにちは 🎻!\n{"name": "play", "arguments": {"text": "ü\\n"}}'
SECOND = "The answer is 42. " * 60
MARKER, OTHER = "482915", "730164"
SCRIPTS = {MARKER: [FIRST, SECOND], OTHER: ["another"]}


@pytest.fixture
def scripted(tmp_path):
    return Scripted(tmp_path / "scripted", SCRIPTS)


def ask(turn, marker=MARKER, filler=""):
    """Returns the body of a chat whose answer is the marker's answer of this turn."""
    messages = [{"role": "user", "content": f"{filler}Do it ({marker})."}]
    for past in range(turn):
        messages += [{"role": "assistant", "content": f"{past}"}, {"role": "user", "content": "Go on."}]
    return {"messages": messages, "return_token_ids": True, "max_tokens": 2000}


def whole(cluster, *asked, **more):
    """Returns token ids, text and finish reason of a whole answer."""
    choice = cluster.chat(**ask(*asked, **more))["choices"][0]
    return choice["token_ids"], choice["message"]["content"], choice["finish_reason"]


def check(cluster, scripted):
    """Whole and streamed answers are those of the script, token by token."""
    for turn, text in enumerate(SCRIPTS[MARKER]):
        assert whole(cluster, turn) == (scripted.answer(MARKER, turn), text, "stop")
    assert whole(cluster, 0, OTHER)[1] == SCRIPTS[OTHER][0]
    events = list(cluster.stream("/v1/chat/completions", **ask(0)))
    deltas = [choice for event in events for choice in event["choices"]]
    assert [id for delta in deltas for id in delta.get("token_ids") or []] == scripted.answer(MARKER)
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == FIRST


def test_answers_are_those_of_the_script_in_any_chunks_and_after_any_prompt(start, scripted):
    cluster = scripted.start(start, "--workers", 1, "--max-step-tokens", 17)
    check(cluster, scripted)
    # A prompt that is longer than the shipped model's context; the second time, its prefix is in the cache.
    for _ in range(2):
        assert whole(cluster, 1, filler="Text before it. " * 3000)[1] == SECOND
    # Answers do not depend on the seed, the temperature, or the streams beside them.
    bodies = [
        ask(turn, marker) | {"seed": seed, "temperature": 1}
        for seed, (turn, marker) in enumerate([(0, MARKER), (1, MARKER), (0, OTHER)] * 4)
    ]
    wanted = [scripted.answer(MARKER, 0), scripted.answer(MARKER, 1), scripted.answer(OTHER)] * 4
    assert [
        answer["choices"][0]["token_ids"] for answer in Streams(cluster, "/v1/chat/completions", bodies).results()
    ] == wanted
    cluster.wait_until_idle()


def test_answers_of_a_group_of_two_ranks_are_the_same(start, scripted):
    check(scripted.start(start, "--workers", 2, "--tp", 2), scripted)


def test_a_prompt_without_a_marker_ends_at_once(start, scripted):
    cluster = scripted.start(start, "--workers", 1)
    answer = cluster.chat(messages=[{"role": "user", "content": "Hello"}])
    assert (answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]) == ("", 1)


@pytest.mark.parametrize("tp", (1, 2))
def test_answers_survive_the_death_of_their_worker(start, scripted, tp):
    cluster = scripted.start(start, "--workers", 2 * tp, "--tp", tp, env={"TUTTI_SIM__FIXED_US": "500"})
    victim = cluster.workers_by_rank()[0]
    bodies = [ask(1) for _ in range(6)]
    streams = Streams(cluster, "/v1/chat/completions", bodies, stopped=[victim])
    streams.stop_in_the_middle([victim], begun=3, tokens=20)
    os.kill(victim, signal.SIGKILL)
    for answer in streams.results():
        choice = answer["choices"][0]
        assert (choice["token_ids"], choice["ends"]) == (scripted.answer(MARKER, 1), [("stop", None)])
    assert cluster.metrics()["tutti_request_replays_total"] >= 1
    cluster.wait_until_idle()


def test_a_script_that_cannot_be_followed_is_refused_by_name(spawn, scripted):
    file = scripted.directory / "script.json"
    file.write_text(file.read_text().replace('"end": ', '"end": 9'))
    conductor = spawn("conductor", *scripted.arguments, "--http=127.0.0.1:0", "--grpc=127.0.0.1:0")
    conductor.says("script.json: token id 9")
