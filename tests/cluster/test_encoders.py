"""Disaggregated encoders. Tests that embeddings of media are sent from worker to worker, and that answers are
bit-identical."""

import concurrent.futures
import os
import re
import signal

import grpc
import pytest
from harness import run_to_exit, wait_for
from media_model import BYTES_PER_TOKEN, PLACEHOLDER, PLACEHOLDER_TEXT, ask, audio, sound, text, write
from streams import Streams
from topologies import TOPOLOGIES

SIM = ("--device", "sim")
DISAGGREGATED, ALL_DISAGGREGATED = TOPOLOGIES / "encoders-disaggregated.toml", TOPOLOGIES / "encoders-prefill-disaggregated.toml"


@pytest.fixture
def model(tmp_path):
    """Returns the arguments that serve a model with an audio encoder."""
    return write(tmp_path / "checkpoint")


def zoo():
    """Yields chats with audio at every position, and some without audio."""
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


@pytest.mark.parametrize(
    "shape",
    [
        ("--workers", 1, "--max-step-tokens", 16),
        ("--workers", 2, "--chunking", "off", "--no-prefix-cache"),
        ("--topology", DISAGGREGATED),
        ("--topology", ALL_DISAGGREGATED, "--max-step-tokens", 24),
    ],
    ids=("cut", "whole", "encoders-disaggregated", "all-disaggregated"),
)
def test_answers_do_not_depend_on_the_encoder_s_worker_or_on_chunks(start, model, shape):
    bodies = list(zoo())
    colocated = start("--workers", 1, *model)
    expected = answers(colocated, bodies)
    assert len({str(choices) for choices in expected}) == len(bodies)
    cluster = start(*shape, *model)
    # In the second round, the prefix cache contains the prompts.
    assert answers(cluster, bodies) == expected
    assert answers(cluster, bodies) == expected
    if DISAGGREGATED in shape:
        # There is one transfer per choice with audio, and one row per audio item. Text does not go to an encoder.
        shown = lambda: cluster.client.get("/metrics").text
        wait_for("all counted", lambda: 'tutti_worker_transfers{worker="0",outcome="handed_over"} 14\n' in shown())
        assert 'tutti_step_rows_total{worker="0",kind="prefill"} 16\n' in shown()


def test_two_ranks_are_bit_identical_to_two_ranks(start, model, tmp_path):
    bodies, topology = list(zoo())[:3], tmp_path / "topology.toml"
    topology.write_text(DISAGGREGATED.read_text().replace("replicas = 2", "tp = 2"))
    colocated = start("--workers", 2, "--tp", 2, *model)
    assert answers(start("--topology", topology, *model), bodies) == answers(colocated, bodies)


@pytest.mark.parametrize("topology", (None, DISAGGREGATED), ids=("colocated", "disaggregated"))
def test_the_prefix_cache_distinguishes_media(start, model, topology):
    cluster = start(*(("--topology", topology) if topology else ("--workers", 1)), *model)
    # With a topology, two replicas run the thinker. Both must give the same answer.
    times = 2 if topology else 1

    def answer(data):
        got = [cluster.chat(**ask(text("A text before the sound, of some length. "), audio(data), text("?"), logprobs=True)) for _ in range(times)]
        assert all(one["choices"] == got[0]["choices"] for one in got)
        return got[0]["choices"][0]["logprobs"], got[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]

    fresh = [answer(sound(seed, 60))[0] for seed in (1, 2)]
    again = [answer(sound(seed, 60)) for seed in (1, 2, 3)]
    assert [logprobs for logprobs, _ in again[:2]] == fresh and fresh[0] != fresh[1] != again[2][0]
    # The tokens before the sound are cached for any sound. The sound's tokens are only cached if the same sound was
    # sent before.
    assert all(cached >= 60 for _, cached in again[:2]) and again[2][1] < 60
    undisturbed = start("--workers", 1, "--no-prefix-cache", *model)
    body = ask(text("A text before the sound, of some length. "), audio(sound(3, 60)), text("?"), logprobs=True)
    assert undisturbed.chat(**body)["choices"][0]["logprobs"] == again[2][0]


class TestGrpc:
    """Requests with token ids, which have one placeholder per media item."""

    @staticmethod
    def generate(cluster, ids, media, **output):
        from tutti.v1 import inference_pb2 as messages
        from tutti.v1 import inference_pb2_grpc

        with grpc.insecure_channel(cluster.grpc) as channel:
            request = messages.GenerateRequest(
                token_ids=messages.TokenIds(ids=ids),
                media=[messages.Media(kind=messages.Media.AUDIO, format=kind, data=data) for kind, data in media],
                sampling=messages.Sampling(temperature=0),
                stopping=messages.Stopping(max_tokens=12, ignore_eos=True),
                output=messages.Output(**output),
            )
            parts = list(inference_pb2_grpc.InferenceStub(channel).Generate(request))
        return [id for part in parts for id in part.token_ids], parts

    def test_media_replace_their_placeholders(self, start, model):
        ids, media = [5, PLACEHOLDER, 6, 7, PLACEHOLDER], [("wav", sound(1, 30)), ("wav", sound(2, 2))]
        seen = []
        for shape in (("--workers", 1), ("--topology", ALL_DISAGGREGATED)):
            cluster = start(*shape, *model)
            tokens, parts = self.generate(cluster, ids, media, prompt_logprobs=1)
            scores = [score.logprob for part in parts for score in part.prompt_logprobs]
            assert len(tokens) == 12 and len(scores) == parts[-1].usage.prompt_tokens == 3 + 30 + 2
            assert self.generate(cluster, ids, media[::-1])[0] != tokens
            seen.append((tokens, scores))
        assert seen[0] == seen[1]

    def test_media_that_do_not_match_are_refused_by_name(self, start, model):
        cluster = start("--workers", 1, *SIM, *model)
        wav = ("wav", sound(1, 2))
        for ids, media, words in (
            ([5], [wav], "has 0 placeholders for media"),
            ([PLACEHOLDER, PLACEHOLDER], [wav], "has 2 placeholders for media"),
            ([PLACEHOLDER], [], "has 1 placeholders for media"),
            ([PLACEHOLDER], [("flac", wav[1])], 'is "flac", but audio must be one of wav'),
            ([PLACEHOLDER], [("wav", b"")], "is empty"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                self.generate(cluster, ids, media)
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT and words in refused.value.details()
        cluster.wait_until_idle()


def test_wrong_media_are_refused_by_name(start, model, tiny):
    cluster = start("--workers", 1, *SIM, *model)
    tokens = start("--workers", 1, *SIM, *model, env={"TUTTI_ROUTER__CHAT_SPECIAL_TOKENS": "tokens"})
    good = audio(sound(1, 3))
    broken = {"type": "input_audio", "input_audio": {"data": "no base64!", "format": "wav"}}
    mp3 = {"type": "input_audio", "input_audio": good["input_audio"] | {"format": "mp3"}}
    empty = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
    path = "messages[0].content[0]"
    for server, parts, param, words in (
        (cluster, [broken], f"{path}.input_audio.data", "is not base64"),
        (cluster, [mp3], f"{path}.input_audio.format", 'is "mp3", but audio must be one of wav'),
        (cluster, [empty], f"{path}.input_audio.data", "is empty"),
        (cluster, [{"type": "input_audio"}], f"{path}.input_audio", "is required"),
        (cluster, [{"type": "video", "video": 1}], f"{path}.type", "must be one of text, image_url, input_audio"),
        (tokens, [text(PLACEHOLDER_TEXT)], "messages", "has 1 placeholders for media"),
        (tokens, [text(PLACEHOLDER_TEXT), good], "messages", "has 2 placeholders for media"),
        (cluster, [audio(sound(1, 5000))], "messages", "more than 4096"),
        (tiny, [good], f"{path}.input_audio", "audio, which the model does not take"),
    ):
        response = server.post("/v1/chat/completions", ask(*parts))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param) and words in error["message"], (parts, error)
    # By default a placeholder in a client's text is text, beside media or not.
    for parts in ([text(PLACEHOLDER_TEXT)], [text(PLACEHOLDER_TEXT), good]):
        assert cluster.post("/v1/chat/completions", ask(*parts)).status_code == 200, parts
    response = cluster.post("/tokenize", {"messages": ask(good)["messages"]})
    assert response.status_code == 400 and "only text can be tokenised" in response.text
    cluster.wait_until_idle()


@pytest.mark.parametrize(
    "text, words",
    [
        ("[[group]]\nname = 'g'\nnodes = ['audio_encoder']\n", 'group "g": nodes: they encode, and no group runs the rest'),
        ("[[group]]\nname = 'g'\nnodes = ['thinker']\n", 'group "g": nodes: neither it nor another group runs prefill_audio'),
        ("[[group]]\nname = 'g'\nnodes = ['thinker']\nwalks = ['prefill_audio']\n", 'walk "prefill_audio" passes node "audio_encoder"'),
        ("[[group]]\nname = 'g'\nnodes = ['audio']\n", 'the model has no node "audio"; it has thinker, audio_encoder'),
        (DISAGGREGATED.read_text().replace("nodes = [\"audio_encoder\"]", "nodes = [\"audio_encoder\"]\ntp = 2"), "tp: is 2, but encoders"),
        ("[[group]]\nname = 'g'\nwalks = ['audio_encoder_step']\n", "only batches others"),
    ],
)
@pytest.mark.parametrize("device", ("sim", "cpu"))
def test_impossible_topologies_are_refused_by_name(model, tmp_path, text, words, device):
    path = tmp_path / "topology.toml"
    path.write_text(text)
    arguments = ("--topology", path, "--device", device, *model, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    code, log = run_to_exit("conductor", arguments, tmp_path)
    assert code == 64 and words in log, log


def bodies_of_every_kind(count):
    for seed in range(count):
        parts = [text(f"Number {seed}: "), audio(sound(seed, 10 + 20 * (seed % 7))), text(" and?")]
        body = ask(*(parts if seed % 4 else [text("no sound " * seed)]), max_tokens=60, temperature=1, seed=seed)
        yield body | dict(return_token_ids=True)


@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGSTOP), ids=("killed", "stopped"))
@pytest.mark.parametrize("topology, victim", ((DISAGGREGATED, 0), (DISAGGREGATED, 1), (ALL_DISAGGREGATED, 0), (ALL_DISAGGREGATED, 1), (ALL_DISAGGREGATED, 2)))
def test_every_stream_survives_the_death_of_any_worker(start, model, topology, victim, number):
    bodies = list(bodies_of_every_kind(24))
    alone = start("--workers", 1, *SIM, *model)
    expected = [answer["choices"][0]["token_ids"] for answer in Streams(alone, "/v1/chat/completions", bodies).results()]
    prompts = alone.metrics()["tutti_prompt_tokens_total"]
    alone.stop()
    cluster = start("--topology", topology, "--heartbeat-timeout", 2, *SIM, *model)
    streams = Streams(cluster, "/v1/chat/completions", bodies)
    # A request is only accepted while every role that it needs has a worker.
    wait_for("all accepted", lambda: cluster.metrics().get("tutti_prompt_tokens_total", 0) >= prompts, every=0.005)
    wait_for("some that have begun", lambda: sum(seen > 3 for seen in streams.seen) >= 2, every=0.002)
    pid = cluster.workers_by_rank()[victim]
    os.kill(pid, number)
    assert [answer["choices"][0]["token_ids"] for answer in streams.results()] == expected
    wait_for("a replacement", lambda: cluster.workers_by_rank().get(victim, pid) != pid)
    cluster.wait_until_ready()
    cluster.wait_until_idle()


def test_requests_wait_for_an_encoder_and_those_without_media_do_not(start, model):
    # The encoder is stopped, but not for long enough to count as dead.
    cluster = start("--topology", DISAGGREGATED, "--heartbeat-timeout", 60, "--transfer-timeout", 60, *SIM, *model)
    heard = cluster.chat(**ask(audio(sound(1, 4))))["choices"]
    encoder = cluster.workers_by_rank()[0]
    os.kill(encoder, signal.SIGSTOP)
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waits = pool.submit(lambda: cluster.chat(**ask(audio(sound(1, 4))))["choices"])
            late = pool.submit(cluster.post, "/v1/chat/completions", ask(audio(sound(2, 4)), timeout_ms=300))
            for seed in range(8):
                cluster.chat(**ask(text("no sound"), seed=seed))
            assert late.result().status_code == 504, late.result().text
            assert not waits.done()
            os.kill(encoder, signal.SIGCONT)
            assert waits.result() == heard
    finally:
        os.kill(encoder, signal.SIGCONT)
    cluster.wait_until_idle()


def test_clients_that_leave_while_their_media_are_encoded_leave_nothing(start, model):
    cluster = start("--topology", ALL_DISAGGREGATED, *SIM, *model)
    for seed in range(12):
        body = ask(audio(sound(seed, 3000)), stream=True, max_tokens=500)
        with cluster.client.stream("POST", "/v1/chat/completions", json={"model": cluster.model} | body) as response:
            assert response.status_code == 200
    cluster.wait_until_idle()
    assert len(cluster.chat(**ask(audio(sound(1, 3000)), return_token_ids=True))["choices"][0]["token_ids"]) == 24
    bytes_in_all = re.findall(r'^tutti_worker_transfer_bytes\{worker="0",transport="shared_memory"\} (\d+)', cluster.client.get("/metrics").text, re.M)
    # A simulated embedding has 16 bytes.
    assert bytes_in_all and int(bytes_in_all[0]) % 16 == 0 and int(bytes_in_all[0]) >= 3000 * 16
    assert BYTES_PER_TOKEN == 32
