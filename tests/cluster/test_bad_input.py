"""Bad requests. Each gets the right status and an error that names the wrong field, and the next good request succeeds.
"""

import json

import grpc
import httpx
import pytest
from harness import GOLDENS

HUGE = 10**9


def check(cluster, response, status, param, *words):
    """Checks that an error has OpenAI's form, and that the cluster still serves."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"}
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    for word in words:
        assert word in error["message"], error
    still_serves(cluster)


def still_serves(cluster):
    prompt = "one" if cluster.client.post("/tokenize", json={"prompt": "a"}).status_code == 200 else [1]
    assert cluster.complete(prompt=prompt, max_tokens=1)["usage"]["completion_tokens"] == 1


# (fields, the wrong field, words of the message). The request has a good prompt unless the fields replace it.
EITHER = [
    # Fields that are unknown or have the wrong type.
    ({"temprature": 1}, "temprature", ["not a parameter"]),
    ({"temperature": "hot"}, "temperature", []),
    ({"max_tokens": "12"}, "max_tokens", []),
    ({"max_tokens": 1.5}, "max_tokens", []),
    ({"n": [1]}, "n", []),
    ({"stream": "yes"}, "stream", []),
    ({"seed": "abc"}, "seed", []),
    ({"stop": 5}, "stop", []),
    ({"logit_bias": {"one": 1}}, "logit_bias", ["one"]),
    ({"logit_bias": 3}, "logit_bias", []),
    # Values that are negative, or above a limit that the message names.
    ({"temperature": -0.1}, "temperature", ["-0.1"]),
    ({"temperature": 2.1}, "temperature", ["2.1"]),
    ({"top_p": 0}, "top_p", ["0"]),
    ({"top_p": 1.5}, "top_p", ["1.5"]),
    ({"top_k": -2}, "top_k", ["-2"]),
    ({"min_p": -1}, "min_p", ["-1"]),
    ({"min_p": 1.1}, "min_p", ["1.1"]),
    ({"max_tokens": -1}, "max_tokens", ["-1"]),
    ({"max_tokens": 0}, "max_tokens", ["0"]),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", ["9", "8"]),
    ({"n": 0}, "n", ["0"]),
    ({"n": HUGE}, "n", [str(HUGE)]),
    ({"presence_penalty": -2.1}, "presence_penalty", ["-2.1"]),
    ({"frequency_penalty": 2.1}, "frequency_penalty", ["2.1"]),
    ({"repetition_penalty": 0}, "repetition_penalty", ["0"]),
    ({"logit_bias": {"1": 101}}, "logit_bias", ["101", "100"]),
    ({"logit_bias": {str(HUGE): 1}}, "logit_bias", [str(HUGE)]),
    ({"stop_token_ids": [HUGE]}, "stop_token_ids", [str(HUGE)]),
    ({"stop": [""]}, "stop", []),
    ({"stop": ["a"] * 100}, "stop", ["100", "16"]),
    ({"stream_options": {"include_usage": True}}, "stream_options", ["stream"]),
]
COMPLETIONS = [
    ({"prompt": ""}, "prompt", ["empty"]),
    ({"prompt": []}, "prompt", ["empty"]),
    ({"prompt": [[]]}, "prompt", ["empty"]),
    ({"prompt": ["one", ""]}, "prompt", ["empty"]),
    ({"prompt": None}, "prompt", []),
    ({"prompt": {"text": "one"}}, "prompt", []),
    ({"prompt": [1, "one"]}, "prompt", []),
    ({"prompt": [-1]}, "prompt", []),
    ({"prompt": [1, HUGE]}, "prompt", [str(HUGE)]),
    ({"prompt": [1, 2**40]}, "prompt", [str(2**40)]),
    ({"prompt": [1] * 5000}, "prompt", ["5000", "4096"]),
    ({"prompt": [1] * 4000, "max_tokens": 97}, "max_tokens", ["4000", "97", "4096"]),
    ({"max_tokens": HUGE}, "max_tokens", [str(HUGE), "4096"]),
    ({"logprobs": 21}, "logprobs", ["21", "20"]),
    ({"logprobs": -1}, "logprobs", ["-1"]),
    ({"prompt_logprobs": 21}, "prompt_logprobs", ["21", "20"]),
    ({"messages": []}, "messages", ["not a parameter"]),
]
USER = {"role": "user", "content": "hi"}
CHAT = [
    ({"messages": []}, "messages", ["empty"]),
    ({"messages": "hi"}, "messages", []),
    ({"messages": [{"role": "user"}]}, "messages[0].content", []),
    ({"messages": [USER | {"content": 7}]}, "messages[0].content", []),
    ({"messages": [USER | {"colour": "red"}]}, "messages[0].colour", []),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", ["21", "20"]),
    ({"top_logprobs": 2}, "top_logprobs", ["logprobs"]),
    ({"max_completion_tokens": HUGE}, "max_completion_tokens", [str(HUGE)]),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", []),
    ({"response_format": {"type": "grammar"}}, "response_format.type", ["grammar", "json_schema"]),
    ({"guided_json": {"properties": {"a": {"not": {}}}}}, "guided_json.properties.a.not", ["cannot be enforced"]),
    ({"prompt": "hi"}, "prompt", ["not a parameter"]),
]


def name(value):
    return json.dumps(value)[:50] if isinstance(value, dict) else None


@pytest.mark.parametrize(("fields", "param", "words"), EITHER + COMPLETIONS, ids=name)
def test_a_bad_completion_request(tiny, fields, param, words):
    check(tiny, tiny.post("/v1/completions", {"prompt": "one"} | fields), 400, param, *words)


@pytest.mark.parametrize(("fields", "param", "words"), EITHER + CHAT, ids=name)
def test_a_bad_chat_request(tiny, fields, param, words):
    check(tiny, tiny.post("/v1/chat/completions", {"messages": [USER]} | fields), 400, param, *words)


@pytest.mark.parametrize("path", ("/v1/completions", "/v1/chat/completions"))
class TestBodies:
    def post(self, cluster, path, body, kind="application/json"):
        return cluster.client.post(path, content=body, headers={"content-type": kind})

    def good(self, cluster, path):
        prompt = {"prompt": "one"} if path == "/v1/completions" else {"messages": [USER]}
        return {"model": cluster.model, "max_tokens": 1} | prompt

    def test_an_unknown_model(self, tiny, path):
        body = self.good(tiny, path) | {"model": "gpt-0"}
        check(tiny, self.post(tiny, path, json.dumps(body)), 404, "model", "gpt-0")

    @pytest.mark.parametrize("number", ("NaN", "Infinity", "-Infinity", "1e999"))
    def test_a_number_that_json_does_not_have(self, tiny, path, number):
        body = json.dumps(self.good(tiny, path) | {"temperature": "X"}).replace('"X"', number)
        check(tiny, self.post(tiny, path, body), 400, "temperature")

    def test_invalid_utf8(self, tiny, path):
        body = json.dumps(self.good(tiny, path)).encode().replace(b"one", b"o\xff\xfe").replace(b'"hi"', b'"\xc3\x28"')
        check(tiny, self.post(tiny, path, body), 400, None, "UTF-8")

    def test_half_a_surrogate_pair(self, tiny, path):
        body = json.dumps(self.good(tiny, path)).replace("one", r"\ud83d").replace("hi", r"\ud83d")
        assert self.post(tiny, path, body).status_code == 400
        still_serves(tiny)

    @pytest.mark.parametrize("body", ("", "{", "[]", "null", "{}x"))
    def test_a_body_that_is_not_a_json_object(self, tiny, path, body):
        check(tiny, self.post(tiny, path, body), 400, None)

    def test_deeply_nested_json(self, tiny, path):
        check(tiny, self.post(tiny, path, "[" * 100_000), 400, None)

    def test_a_field_twice(self, tiny, path):
        body = json.dumps(self.good(tiny, path)).replace('"max_tokens"', '"max_tokens": 3, "max_tokens"')
        check(tiny, self.post(tiny, path, body), 400, "max_tokens", "max_tokens")

    def test_50_megabytes(self, tiny, path):
        body = json.dumps(self.good(tiny, path) | {"user": "u" * (50 << 20)})
        try:
            response = self.post(tiny, path, body)
        except httpx.TransportError:
            response = None  # the connection may close before the whole body is sent
        if response is not None:
            check(tiny, response, 413, None, str(32 << 20))
        still_serves(tiny)

    def test_the_wrong_method(self, tiny, path):
        check(tiny, tiny.client.get(path), 405, None)


def test_an_unknown_route(tiny):
    check(tiny, tiny.client.post("/v1/complete", json={}), 404, None, "/v1/complete")


def test_an_error_before_a_stream_is_a_status(tiny):
    check(tiny, tiny.post("/v1/completions", {"prompt": "", "stream": True}), 400, "prompt", "empty")


def test_text_without_a_tokenizer(bare):
    check(bare, bare.post("/v1/completions", {"prompt": "one"}), 400, "prompt", "skip_tokenizer_init")
    check(bare, bare.post("/v1/chat/completions", {"messages": [USER]}), 400, "messages", "skip_tokenizer_init")
    check(bare, bare.post("/v1/completions", {"prompt": [1], "stop": ["a"]}), 400, "stop", "skip_tokenizer_init")


def test_more_than_the_kv_pool_holds(start):
    # A token takes 3 layers x 2 heads x 32 elements x 2 (keys and values) x 4 bytes = 1536 bytes.
    args = ("--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init", "--kv-cache-memory", 1536 * 1024)
    cluster = start("--workers", 1, *args)
    check(cluster, cluster.post("/v1/completions", {"prompt": [1] * 2000, "max_tokens": 1}), 400, "prompt", "2000")
    refused = cluster.post("/v1/completions", {"prompt": [1] * 100, "max_tokens": 1000})
    check(cluster, refused, 400, "max_tokens", "100", "1000")
    most = cluster.complete(prompt=[1] * 600, max_tokens=300, ignore_eos=True)
    assert most["usage"]["completion_tokens"] == 300


NAN = float("nan")
# (section, fields, the wrong field)
GRPC = [
    ("sampling", {"temperature": NAN}, "sampling.temperature"),
    ("sampling", {"temperature": -1.0}, "sampling.temperature"),
    ("sampling", {"top_p": NAN}, "sampling.top_p"),
    ("sampling", {"top_p": 0.0}, "sampling.top_p"),
    ("sampling", {"min_p": NAN}, "sampling.min_p"),
    ("sampling", {"repetition_penalty": -1.0}, "sampling.repetition_penalty"),
    ("sampling", {"presence_penalty": NAN}, "sampling.presence_penalty"),
    ("sampling", {"frequency_penalty": float("inf")}, "sampling.frequency_penalty"),
    ("sampling", {"logit_bias": {1: NAN}}, "sampling.logit_bias"),
    ("sampling", {"logit_bias": {HUGE: 1.0}}, "sampling.logit_bias"),
    ("stopping", {"max_tokens": 0}, "stopping.max_tokens"),
    ("stopping", {"max_tokens": HUGE}, "stopping.max_tokens"),
    ("stopping", {"min_tokens": 9, "max_tokens": 8}, "stopping.min_tokens"),
    ("stopping", {"stop": [""]}, "stopping.stop"),
    ("stopping", {"stop_token_ids": [HUGE]}, "stopping.stop_token_ids"),
    ("output", {"logprobs": 21}, "output.logprobs"),
    ("output", {"prompt_logprobs": 21}, "output.prompt_logprobs"),
    (None, {"text": ""}, "text"),
    (None, {"token_ids": []}, "token_ids"),
    (None, {"token_ids": [1, HUGE]}, "token_ids"),
    (None, {"token_ids": [1] * 5000}, "token_ids"),
    (None, {"chat": []}, "chat.messages"),
    (None, {"nothing": True}, "prompt"),
    (None, {"n": 0}, "n"),
    (None, {"n": HUGE}, "n"),
]


class TestGrpc:
    @pytest.fixture
    def ask(self, tiny):
        from tutti.v1 import inference_pb2 as pb
        from tutti.v1 import inference_pb2_grpc

        sections = {"sampling": pb.Sampling, "stopping": pb.Stopping, "output": pb.Output}
        with grpc.insecure_channel(tiny.grpc, [("grpc.max_send_message_length", -1)]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            def ask(section=None, **fields):
                request = {"text": "one"} | ({} if section else fields)
                if section:
                    request[section] = sections[section](**fields)
                if ids := request.get("token_ids"):
                    request["token_ids"] = pb.TokenIds(ids=ids)
                for other in ("token_ids", "chat", "nothing"):
                    if other in request:
                        del request["text"]
                        empty = {"token_ids": pb.TokenIds(), "chat": pb.Chat()}
                        request[other] = request[other] or empty[other]
                request.pop("nothing", None)
                return list(stub.Generate(pb.GenerateRequest(**request)))

            yield ask

    @pytest.mark.parametrize(("section", "fields", "field"), GRPC)
    def test_a_bad_request(self, tiny, ask, section, fields, field):
        with pytest.raises(grpc.RpcError) as refused:
            ask(section, **fields)
        self.check(refused.value, grpc.StatusCode.INVALID_ARGUMENT, field)
        assert ask("stopping", max_tokens=1)[-1].usage.completion_tokens == 1
        still_serves(tiny)

    def test_an_unknown_model(self, ask):
        with pytest.raises(grpc.RpcError) as refused:
            ask(model="gpt-0")
        self.check(refused.value, grpc.StatusCode.NOT_FOUND, "model")

    def test_50_megabytes(self, ask):
        with pytest.raises(grpc.RpcError) as refused:
            ask(text="u" * (50 << 20))
        assert refused.value.code() in (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert ask("stopping", max_tokens=1)[-1].usage.completion_tokens == 1

    def check(self, error, code, field):
        assert error.code() == code, error
        assert dict(error.trailing_metadata()).get("tutti-error-field") == field, error
