"""Encoders apart: what a request's media are encoded to goes from worker to worker, and the answer is the same to the last bit."""

import grpc
import pytest
from harness import wait_for
from media_model import PLACEHOLDER, PLACEHOLDER_TEXT, ask, audio, sound, text, write
from test_topology import TOPOLOGIES

APART, ALL_APART = TOPOLOGIES / "encoders-apart.toml", TOPOLOGIES / "encoders-prefill-apart.toml"


@pytest.fixture
def model(tmp_path):
    """The arguments that serve a model with an audio encoder."""
    return write(tmp_path / "checkpoint")


def zoo():
    """Chats with audio at every place, and some without."""
    logprobs = dict(logprobs=True, top_logprobs=3, return_token_ids=True)
    yield ask(text("What is this? "), audio(sound(1, 40)), text("And why?"), **logprobs)
    yield ask(audio(sound(2, 1)), **logprobs)
    yield ask(audio(sound(3, 100)), audio(sound(4, 3)), text("Which is longer?"), **logprobs)
    yield ask(text("long " * 60), audio(sound(5, 17)), text(" end"), **logprobs, max_tokens=1)
    yield ask(text("no sound"), **logprobs)
    yield ask(audio(sound(1, 40)), text("again"), **logprobs | dict(temperature=1, seed=7, n=3))


def answers(cluster, bodies):
    got = [cluster.chat(**body)["choices"] for body in bodies]
    cluster.wait_until_idle()
    return got


def test_wherever_it_is_encoded_and_however_it_is_cut_the_answer_is_the_same(start, model):
    bodies = list(zoo())
    together = start("--workers", 1, *model)
    expected = answers(together, bodies)
    assert len({str(choices) for choices in expected}) == len(bodies)
    for shape in (("--workers", 1, "--max-step-tokens", 16), ("--workers", 2, "--chunking", "off"), ("--topology", APART), ("--topology", ALL_APART, "--max-step-tokens", 24)):
        cluster = start(*shape, *model)
        # Twice: the second time with what the prefix cache has.
        assert answers(cluster, bodies) == expected, shape
        assert answers(cluster, bodies) == expected, shape
        cluster.stop()
