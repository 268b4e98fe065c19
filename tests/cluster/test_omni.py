"""Pictures, recordings and videos of a Qwen3-Omni over HTTP: files in, tokens out, wherever the encoders run."""

import http.server
import io
import itertools
import json
import os
import re
import signal
import threading

import openai
import pytest
from harness import run_to_exit, wait_for
from media_model import ask, text
from omni_model import FIRST_TOKEN, TOKENS, audio, image, png, video, wav, write
from PIL import Image
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


# The part behind each video is its sound.
WITH_SOUND = dict(mm_processor_kwargs={"use_audio_in_video": True})


def film():
    """Returns the parts of a recording, of a video with its sound, and of another one whose sound is shorter."""
    first = (video([png(32, 24, n) for n in range(6)], 4), audio(wav(20_000, 1)))
    return audio(wav(6_000, 3)), text("Look: "), *first, text(", and "), video([png(16, 16, n) for n in range(5)], 0.7), audio(wav(9_000, 2))


def zoo():
    """Yields chats with media of each kind, and one without."""
    more = dict(logprobs=True, top_logprobs=3, return_token_ids=True)
    yield ask(text("What is this? "), image(png(40, 24, 1)), text("And why?"), **more)
    yield ask(image(png(40, 24, 2)), text("What is this?"), **more)
    yield ask(audio(wav(6_500, 1)), audio(wav(9_000, 2)), text("Which is longer?"), **more)
    yield ask(video([png(32, 24, n) for n in range(5)], 2), text("What happens?"), **more)
    # Sound stands on both sides of a picture, and is encoded together.
    yield ask(audio(wav(4_000, 1)), image(png(64, 64, 3)), audio(wav(8_000, 4)), video([png(16, 16, 1)] * 2, 1), text("all"), **more)
    yield ask(*film(), text("Who speaks?"), **WITH_SOUND, **more)
    yield ask(text("no media"), **more)


def answers(cluster, bodies):
    got = [cluster.chat(**body)["choices"] for body in bodies]
    cluster.wait_until_idle()
    return got


def test_answers_do_not_depend_on_the_encoders_worker_or_on_chunks(start, model, disaggregated):
    bodies = list(zoo())
    expected = answers(start("--workers", 1, "--no-prefix-cache", *model), bodies)
    assert len({str(choices) for choices in expected}) == len(bodies)
    small = ("--workers", 1, "--max-step-tokens", 16)
    # With so little memory, one request after another holds embeddings.
    tight = ("--encoder-cache-memory", 0, "--embedding-memory", 1)
    for shape in (small, (*small, "--media-prefill", "atomic"), disaggregated, (*disaggregated, "--max-prefill-chunk-size", 5), (*disaggregated, *tight)):
        cluster = start(*shape, *model)
        # In the second round, the prefix cache contains the prompts.
        assert answers(cluster, bodies) == expected, shape
        assert answers(cluster, bodies) == expected, shape


def test_padding_of_encoders_changes_no_bit_and_is_counted(start, model, disaggregated):
    bodies = list(zoo())
    plain = start("--workers", 1, "--no-prefix-cache", *model)
    expected = answers(plain, bodies)
    padding = lambda cluster: cluster.metrics()["tutti_worker_encoder_padding_tokens"]
    assert padding(plain) == 0
    plain.stop()
    # The context, which is the most tokens of a call.
    shapes = ("--encoder-shapes", "16,64,4096")
    for shape in (("--workers", 1), disaggregated):
        cluster = start(*shape, *shapes, "--encoder-cache-memory", 0, "--no-prefix-cache", *model)
        assert answers(cluster, bodies) == expected, shape
        assert padding(cluster) > 100
        cluster.stop()
    cluster = start("--workers", 1, "--encoder-shapes", "4096", "--encoder-cache-memory", 0, *model)
    cluster.chat(**ask(image(png(64, 64, 5))))
    cluster.wait_until_idle()
    assert padding(cluster) == 4096 - 64


def test_shapes_of_encoders_that_hold_no_full_call_are_refused_at_the_start(tmp_path, model):
    flags = ("--workers", 1, "--encoder-shapes", "16,4095", "--http=127.0.0.1:0", "--grpc=127.0.0.1:0", *model)
    code, log = run_to_exit("conductor", flags, tmp_path)
    assert code == 64 and "encoder_shapes" in log and "has up to 4096 tokens" in log, f"{code}: {log}"


def test_two_ranks_have_the_same_bits_beside_the_encoders_and_apart(start, model, tmp_path):
    bodies, path = list(zoo())[1:5], tmp_path / "topology.toml"
    path.write_text(DISAGGREGATED + "tp = 2\n")
    colocated = start("--workers", 2, "--tp", 2, *model)
    assert answers(start("--topology", path, *model), bodies) == answers(colocated, bodies)
    weights = r'^tutti_worker_memory_bytes\{worker="(\d)",kind="weights"\} (\d+)'
    weights = {rank: int(size) for rank, size in re.findall(weights, colocated.client.get("/metrics").text, re.M)}
    assert weights["0"] > weights["1"], "only the leader encodes, so only the leader has the encoders"


def test_usage_counts_the_tokens_of_media_and_hits_only_the_same_picture(start, model):
    cluster = start("--workers", 1, *model)
    usage = lambda seed: cluster.chat(**ask(text("A text of some length before the picture. "), image(png(128, 128, seed))))["usage"]
    first, other, again = usage(1), usage(2), usage(1)
    # 128 × 128 pixels are 32 × 32 patches, 16 × 16 tokens.
    assert first["prompt_tokens_details"]["image_tokens"] == 256
    cached = lambda usage: usage["prompt_tokens_details"]["cached_tokens"]
    assert cached(other) < 64 and cached(again) >= 256


def test_sound_within_a_video_takes_turns_with_its_frames(start, model):
    cluster = start("--workers", 1, *model)
    asked = ask(*film(), text("?"), **WITH_SOUND, return_token_ids=True)
    answer = cluster.chat(**asked)
    name = {FIRST_TOKEN + n: name.strip("<|>") for n, name in enumerate(TOKENS)}
    found = [(token, len(list(run))) for token, run in itertools.groupby(name[id] for id in answer["prompt_token_ids"] if id in name)]
    # 32 × 24 pixels are 12 tokens, 3 patches of frames half a second from each other; 16 × 16 pixels are 4 tokens. The
    # first sound is of 125 frames. Of 57 frames, 60 beside the longest, only tokens before the second patch of frames.
    around = lambda runs: [("vision_start", 1), ("audio_start", 1), *runs, ("audio_end", 1), ("vision_end", 1)]
    alone = [("audio_start", 1), ("audio_pad", 5), ("audio_end", 1)]
    first = [("video_pad", 12), ("audio_pad", 7), ("video_pad", 12), ("audio_pad", 6), ("video_pad", 12), ("audio_pad", 4)]
    assert found == alone + around(first) + around([("video_pad", 4), ("audio_pad", 8), ("video_pad", 8)])
    counted = answer["usage"]["prompt_tokens_details"]
    assert (counted["audio_tokens"], counted["video_tokens"]) == (5 + 17 + 8, 3 * 12 + 3 * 4)
    separate = cluster.chat(**{key: value for key, value in asked.items() if key != "mm_processor_kwargs"})
    assert separate["usage"]["prompt_tokens_details"]["audio_tokens"] == counted["audio_tokens"]
    assert separate["prompt_token_ids"] != answer["prompt_token_ids"]

    def refused(parts, path, words, **more):
        error = cluster.post("/v1/chat/completions", ask(*parts, **WITH_SOUND | more))
        assert error.status_code == 400 and error.json()["error"]["param"] == path and words in error.text, error.text

    frames = video([png(16, 16, 1)] * 2, 1)
    refused([frames, text("?"), audio(wav(9_000, 2))], "messages[0].content[0].video_url", "has no sound")
    rateless = {"type": "video_url", "video_url": {"url": frames["video_url"]["url"]}}
    refused([rateless, audio(wav(9_000, 2))], "messages[0].content[0].video_url.fps", "required")
    refused([text("?")], "mm_processor_kwargs.fps", "not a parameter", mm_processor_kwargs={"fps": 2})


def encoder_counts(cluster):
    seen = cluster.metrics()
    return tuple(int(seen[f"tutti_worker_encoder_cache_{name}"]) for name in ("hits", "misses"))


@pytest.mark.parametrize("is_apart", (False, True), ids=("colocated", "disaggregated"))
def test_a_picture_is_encoded_once_whatever_stands_in_front_of_it(start, model, disaggregated, is_apart):
    picture, webp = png(64, 64, 5), io.BytesIO()
    Image.open(io.BytesIO(picture)).save(webp, "WEBP", lossless=True, exact=True)
    more = dict(logprobs=True, top_logprobs=3)
    bodies = [
        ask(text("What is this? "), image(picture), **more),
        ask(text("In another conversation, that begins otherwise: "), image(webp.getvalue()), **more),
        # The first clip is the same, but what is encoded beside it is not.
        ask(audio(wav(6_500, 1)), audio(wav(9_000, 2)), **more),
        ask(audio(wav(6_500, 1)), audio(wav(9_000, 3)), **more),
        ask(text("again: "), audio(wav(6_500, 1)), audio(wav(9_000, 2)), **more),
    ]
    shape = disaggregated if is_apart else ("--workers", 1)
    never = start(*shape, *model, "--no-prefix-cache", "--encoder-cache-memory", 0)
    expected = answers(never, bodies)
    assert encoder_counts(never) == (0, 5) and never.metrics()["tutti_worker_encoder_cache_bytes"] == 0
    never.stop()
    cluster = start(*shape, *model)
    assert answers(cluster, bodies) == expected
    assert encoder_counts(cluster) == (2, 3)
    # The salt keeps callers apart: the time of an answer would tell one what another has sent.
    cluster.chat(**bodies[0], cache_salt="of another caller")
    cluster.wait_until_idle()
    assert encoder_counts(cluster) == (2, 4)
    # A picture of 64 tokens with three levels of 64 elements, twice, and two calls of clips.
    assert 2 * 64 * 3 * 64 * 4 < cluster.metrics()["tutti_worker_encoder_cache_bytes"] < 256 << 10


def test_a_text_goes_on_while_an_encoder_is_busy_with_a_picture(start, model, disaggregated):
    cluster = start(*disaggregated, "--heartbeat-timeout", 60, "--transfer-timeout", 60, *model)
    asked = ask(text("Look: "), image(png(128, 128, 1)), return_token_ids=True)
    texts = [ask(text(f"Number {seed}"), seed=seed, max_tokens=100) for seed in range(4)]
    alone = [cluster.chat(**body)["choices"] for body in texts]
    encoder = cluster.workers_by_rank()[0]
    os.kill(encoder, signal.SIGSTOP)
    try:
        pictures = Streams(cluster, "/v1/chat/completions", [asked])
        wait_for("the picture's request", lambda: cluster.metrics()["tutti_requests_in_flight"] == 1)
        assert [cluster.chat(**body)["choices"] for body in texts] == alone
        assert pictures.seen == [0]
    finally:
        os.kill(encoder, signal.SIGCONT)
    assert len(pictures.results()[0]["choices"][0]["token_ids"]) == 24
    cluster.wait_until_idle()


@pytest.mark.parametrize("prefill", ("chunked", "atomic"))
def test_a_text_goes_on_beside_the_prefill_of_a_picture(start, model, tmp_path, prefill):
    trace = tmp_path / "steps"
    cluster = start("--workers", 1, "--max-step-tokens", 16, "--media-prefill", prefill, "--trace-steps", trace, *model)
    # The text has far more tokens than the picture's prefill has steps.
    streams = Streams(cluster, "/v1/chat/completions", [ask(text("Count."), max_tokens=3000, return_token_ids=True)])
    streams.wait_for_tokens(5)
    seen = cluster.chat(**ask(text("Look: "), image(png(128, 128, 1)), max_tokens=1))
    assert seen["usage"]["prompt_tokens_details"]["image_tokens"] == 256
    assert len(streams.results()[0]["choices"][0]["token_ids"]) == 3000
    cluster.stop()
    steps = [json.loads(line)["rows"] for line in trace.with_name("steps.rank0").read_text().splitlines()[1:]]
    lengths = lambda rows, walk: [end - begin for row in rows if row["walk"] == walk for begin, end in [row["range"]]]
    decodes = [bool(lengths(rows, "thinker_decode")) for rows in steps]
    first = decodes.index(True)
    prefills = {at: lengths(rows, "prefill_text") for at, rows in enumerate(steps) if at > first and lengths(rows, "prefill_text")}
    if prefill == "chunked":
        assert len(prefills) > 15 and all(decodes[at] for at in prefills), prefills
        assert max(map(sum, prefills.values())) < 16
    else:
        # The whole prompt is one row of one step, which is alone, and texts have the steps before it and behind it.
        [(at, [length])] = prefills.items()
        assert length > 256 and not decodes[at] and decodes[at - 1] and decodes[at + 1]


class Files(http.server.BaseHTTPRequestHandler):
    """Serves a picture and a recording, and notes what is asked."""

    files, asked = {"/a.png": png(40, 24, 1), "/a.wav": wav(6_500, 1), "/text": b"hello"}, []

    def do_GET(self):
        self.asked.append((self.path, self.headers["authorization"], self.headers["cookie"]))
        data = self.files.get(self.path, b"")
        self.send_response(200 if data else 302)
        self.send_header("location", "/a.png")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_files_are_fetched_from_allowed_origins_alone(start, model):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        origin = f"http://127.0.0.1:{server.server_port}"
        picture = lambda path: {"type": "image_url", "image_url": {"url": origin + path}}
        sound = {"type": "audio_url", "audio_url": {"url": f"{origin}/a.wav"}}
        cluster = start("--workers", 1, *model, env={"TUTTI_ROUTER__MEDIA_ORIGINS": json.dumps([origin])})
        expected = cluster.chat(**ask(text("What? "), image(png(40, 24, 1)), audio(wav(6_500, 1)), n=3, logprobs=True))["choices"]
        assert cluster.chat(**ask(text("What? "), picture("/a.png"), sound, n=3, logprobs=True))["choices"] == expected
        assert Files.asked == [("/a.png", None, None), ("/a.wav", None, None)], "once for all choices, and nothing of the client's"

        def refused(server, part, path, words):
            error = server.post("/v1/chat/completions", ask(text("What? "), part))
            assert error.status_code == 400, error.text
            assert (error.json()["error"]["param"], words in error.text) == (f"messages[0].content[1].{path}", True), error.text

        elsewhere = {"type": "image_url", "image_url": {"url": f"http://localhost:{server.server_port}/a.png"}}
        refused(cluster, elsewhere, "image_url.url", "not in media_origins")
        refused(cluster, picture("/moved"), "image_url.url", "a redirect, which is not followed")
        refused(cluster, picture("/text"), "image_url", "")
        closed, before = start("--workers", 1, *model), len(Files.asked)
        refused(closed, picture("/a.png"), "image_url.url", "not in media_origins")
        assert len(Files.asked) == before
        server.shutdown()


def test_every_stream_survives_the_death_of_the_encoders_worker(start, model, disaggregated):
    def body(seed):
        parts = [text(f"Number {seed}: "), image(png(64, 64, seed)), audio(wav(5_000 + 100 * seed, seed)), text("?")]
        return ask(*parts, max_tokens=60, return_token_ids=True)

    bodies = [body(seed) for seed in range(24)]
    alone = start("--workers", 1, *model)
    expected = [answer["choices"][0]["token_ids"] for answer in Streams(alone, "/v1/chat/completions", bodies).results()]
    prompts = alone.metrics()["tutti_prompt_tokens_total"]
    alone.stop()
    cluster = start(*disaggregated, "--heartbeat-timeout", 2, *model)
    streams = Streams(cluster, "/v1/chat/completions", bodies)
    # A request is only accepted while every role that it needs has a worker.
    wait_for("all accepted", lambda: cluster.metrics().get("tutti_prompt_tokens_total", 0) >= prompts, every=0.005)
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
