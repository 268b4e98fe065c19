"""Pictures, recordings and videos of a Qwen3-Omni over HTTP: files in, tokens out, wherever the encoders run."""

import os
import signal

import openai
import pytest
from harness import wait_for
from media_model import ask, text
from omni_model import audio, image, png, video, wav, write
from streams import Streams

ENCODERS = 'nodes = ["audio_encoder", "vision_encoder"]'
DISAGGREGATED = f'[[group]]\nname = "encode"\n{ENCODERS}\n\n[[group]]\nname = "think"\nnodes = ["thinker"]\n'


@pytest.fixture
def model(tmp_path):
    return write(tmp_path / "checkpoint")


@pytest.fixture
def disaggregated(tmp_path):
    path = tmp_path / "topology.toml"
    path.write_text(DISAGGREGATED)
    return "--topology", path


def zoo():
    """Yields chats with media of each kind, and one without."""
    more = dict(logprobs=True, top_logprobs=3, return_token_ids=True)
    yield ask(text("What is this? "), image(png(40, 24, 1)), text("And why?"), **more)
    yield ask(image(png(40, 24, 2)), text("What is this?"), **more)
    yield ask(audio(wav(6_500, 1)), audio(wav(9_000, 2)), text("Which is longer?"), **more)
    yield ask(video([png(32, 24, n) for n in range(5)], 2), text("What happens?"), **more)
    # Sound stands on both sides of a picture, and is encoded together.
    yield ask(audio(wav(4_000, 1)), image(png(64, 64, 3)), audio(wav(8_000, 4)), video([png(16, 16, 1)] * 2, 1), text("all"), **more)
    yield ask(text("no media"), **more)


def answers(cluster, bodies):
    got = [cluster.chat(**body)["choices"] for body in bodies]
    cluster.wait_until_idle()
    return got


def test_answers_do_not_depend_on_the_encoders_worker_or_on_chunks(start, model, disaggregated):
    bodies = list(zoo())
    expected = answers(start("--workers", 1, "--no-prefix-cache", *model), bodies)
    assert len({str(choices) for choices in expected}) == len(bodies)
    for shape in (("--workers", 1, "--max-step-tokens", 16), disaggregated, (*disaggregated, "--max-prefill-chunk-size", 5)):
        cluster = start(*shape, *model)
        # In the second round, the prefix cache contains the prompts.
        assert answers(cluster, bodies) == expected, shape
        assert answers(cluster, bodies) == expected, shape


def test_two_ranks_have_the_same_bits_beside_the_encoders_and_apart(start, model, tmp_path):
    bodies, path = list(zoo())[1:5], tmp_path / "topology.toml"
    path.write_text(DISAGGREGATED + "tp = 2\n")
    colocated = start("--workers", 2, "--tp", 2, *model)
    assert answers(start("--topology", path, *model), bodies) == answers(colocated, bodies)


def test_usage_counts_the_tokens_of_media_and_hits_only_the_same_picture(start, model):
    cluster = start("--workers", 1, *model)
    usage = lambda seed: cluster.chat(**ask(text("A text of some length before the picture. "), image(png(128, 128, seed))))["usage"]
    first, other, again = usage(1), usage(2), usage(1)
    # 128 × 128 pixels are 32 × 32 patches, 16 × 16 tokens.
    assert first["prompt_tokens_details"]["image_tokens"] == 256
    cached = lambda usage: usage["prompt_tokens_details"]["cached_tokens"]
    assert cached(other) < 64 and cached(again) >= 256


def test_every_stream_survives_the_death_of_the_encoders_worker(start, model, disaggregated):
    def body(seed):
        parts = [text(f"Number {seed}: "), image(png(64, 64, seed)), audio(wav(5_000 + 100 * seed, seed)), text("?")]
        return ask(*parts, max_tokens=60, return_token_ids=True)

    bodies = [body(seed) for seed in range(24)]
    alone = start("--workers", 1, *model)
    expected = [answer["choices"][0]["token_ids"] for answer in Streams(alone, "/v1/chat/completions", bodies).results()]
    alone.stop()
    cluster = start(*disaggregated, "--heartbeat-timeout", 2, *model)
    streams = Streams(cluster, "/v1/chat/completions", bodies)
    wait_for("some that have begun", lambda: sum(seen > 3 for seen in streams.seen) >= 2, every=0.002)
    pid = cluster.workers_by_rank()[0]
    os.kill(pid, signal.SIGKILL)
    assert [answer["choices"][0]["token_ids"] for answer in streams.results()] == expected
    wait_for("a replacement", lambda: cluster.workers_by_rank().get(0, pid) != pid)
    cluster.wait_until_ready()
    cluster.wait_until_idle()


def test_openai_sends_a_picture_and_a_recording(start, model):
    cluster = start("--workers", 1, *model)
    parts = [text("What is this? "), image(png(40, 24, 1)), audio(wav(6_500, 1))]
    expected = cluster.chat(**ask(*parts))
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        sent = ask(*parts) | {"model": cluster.model}
        more = {key: sent.pop(key) for key in list(sent) if key in ("ignore_eos", "min_tokens")}
        whole = client.chat.completions.create(**sent, extra_body=more)
        assert whole.choices[0].message.content == expected["choices"][0]["message"]["content"]
        counted = whole.usage.prompt_tokens_details.to_dict()
        assert counted["audio_tokens"] > 0 and counted["image_tokens"] > 0
        chunks = client.chat.completions.create(**sent, extra_body=more, stream=True)
        deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(deltas) == whole.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match=r"image_url"):
            client.chat.completions.create(**sent | {"messages": ask(image(b"no picture"))["messages"]})
