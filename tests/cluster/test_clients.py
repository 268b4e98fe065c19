"""Real clients, openai and grpcio from PyPI, against the shipped model."""

import asyncio
import itertools
import json
import math
import socket

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from harness import wait_for

QUESTION = [{"role": "user", "content": "What is Tutti?"}]


@pytest.fixture(scope="module")
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="unused", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def channel(tiny):
    with grpc.insecure_channel(tiny.grpc) as channel:
        yield channel


@pytest.fixture(scope="module")
def rpc(channel):
    from tutti.v1 import inference_pb2 as messages
    from tutti.v1 import inference_pb2_grpc

    return inference_pb2_grpc.InferenceStub(channel), messages


class TestOpenAi:
    def test_models_lists_the_served_model(self, client, tiny):
        assert [model.id for model in client.models.list()] == [tiny.model]
        assert client.models.retrieve(tiny.model).id == tiny.model

    def test_a_streamed_completion_equals_the_whole_one(self, client, tiny):
        ask = dict(model=tiny.model, prompt="Tutti is", max_tokens=24, temperature=0.8, seed=5)
        plain = client.completions.create(**ask)
        assert plain.object == "text_completion" and plain.id.startswith("cmpl-")
        chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        *chunks, last = chunks
        assert last.choices == [] and last.usage == plain.usage
        assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons[:-1] == [None] * (len(reasons) - 1) and reasons[-1] == plain.choices[0].finish_reason
        assert len({chunk.id for chunk in chunks}) == 1

    def test_a_streamed_chat_equals_the_whole_one(self, client, tiny):
        ask = dict(model=tiny.model, messages=QUESTION, max_completion_tokens=32, temperature=0)
        plain = client.chat.completions.create(**ask)
        message = plain.choices[0].message
        assert plain.object == "chat.completion" and message.role == "assistant" and message.content
        chunks = list(client.chat.completions.create(**ask, stream=True))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
        assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason

    def test_logprobs_add_up(self, client, tiny):
        answer = client.completions.create(
            model=tiny.model, prompt="one two three", max_tokens=4, temperature=0, logprobs=5, echo=True
        )
        logprobs = answer.choices[0].logprobs
        assert "".join(logprobs.tokens) == answer.choices[0].text
        assert logprobs.token_logprobs[0] is None, "the first token has no context"
        assert all(value <= 0 for value in logprobs.token_logprobs[1:])
        generated = slice(-answer.usage.completion_tokens, None)
        for token, value, top in zip(
            logprobs.tokens[generated], logprobs.token_logprobs[generated], logprobs.top_logprobs[generated]
        ):
            assert max(top.values()) == value == top[token], "greedy takes the likeliest"
            assert sum(map(math.exp, top.values())) <= 1 + 1e-6

    def test_chat_logprobs(self, client, tiny):
        answer = client.chat.completions.create(
            model=tiny.model, messages=QUESTION, max_completion_tokens=8, temperature=0, logprobs=True, top_logprobs=2
        )
        content = answer.choices[0].logprobs.content
        assert len(content) == answer.usage.completion_tokens or answer.choices[0].finish_reason == "stop"
        for entry in content:
            assert bytes(entry.bytes).decode(errors="replace") == entry.token
            assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob == entry.logprob

    def test_choices_differ_and_each_is_seeded(self, client, tiny):
        ask = dict(model=tiny.model, prompt="word", max_tokens=12, temperature=1.5, seed=11, n=4)
        texts = [choice.text for choice in client.completions.create(**ask).choices]
        assert [choice.text for choice in client.completions.create(**ask).choices] == texts
        assert len(set(texts)) > 1
        alone = client.completions.create(**ask | dict(n=1)).choices[0].text
        assert alone == texts[0], "the first choice has the request's own seed"

    def test_a_stop_string_is_cut_off(self, client, tiny):
        ask = dict(model=tiny.model, messages=QUESTION, max_completion_tokens=32, temperature=0)
        whole = client.chat.completions.create(**ask).choices[0].message.content
        middle = len(whole) // 2
        stop = whole[middle : middle + 3]
        want = whole[: whole.index(stop)]
        cut = client.chat.completions.create(**ask, stop=[stop, "never in it"]).choices[0]
        assert (cut.message.content, cut.finish_reason) == (want, "stop")
        streamed = client.chat.completions.create(**ask, stop=stop, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == want

    def test_errors_are_the_clients_own_types(self, client, tiny):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model=tiny.model, prompt="x", temperature=-1)
        assert refused.value.param == "temperature" and refused.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError) as refused:
            client.completions.create(model="another", prompt="x")
        assert refused.value.param == "model"

    def test_many_async_streams_at_once(self, tiny):
        async def main():
            async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="unused", max_retries=0) as client:

                async def one(seed):
                    ask = dict(model=tiny.model, prompt="count", max_tokens=16, seed=seed, stream=True)
                    return "".join([chunk.choices[0].text async for chunk in await client.completions.create(**ask)])

                seeds = [1, 2, 3, 4] * 4
                return list(zip(seeds, await asyncio.gather(*map(one, seeds))))

        answers = asyncio.run(main())
        assert len(set(answers)) == 4, "the same seed gives the same text"


class TestGrpc:
    def ask(self, messages, **fields):
        fields = dict(text="Tutti is", stopping=messages.Stopping(max_tokens=24)) | fields
        if not {"chat", "token_ids"}.isdisjoint(fields):
            del fields["text"]
        return messages.GenerateRequest(sampling=messages.Sampling(temperature=0), **fields)

    def test_the_model_is_described(self, rpc, tiny):
        stub, messages = rpc
        model = stub.GetModel(messages.GetModelRequest())
        assert model.name == tiny.model and model.has_tokenizer and model.has_chat_template
        assert model.vocab_size > 0 and model.max_context_tokens > 0 and model.eos_token_ids

    def test_text_in_text_out_is_what_http_answers(self, rpc, tiny):
        stub, messages = rpc
        parts = list(stub.Generate(self.ask(messages)))
        http = tiny.complete(prompt="Tutti is", max_tokens=24, temperature=0)
        assert "".join(part.text for part in parts) == http["choices"][0]["text"]
        assert [part.HasField("finish") for part in parts].count(True) == 1
        assert [part.HasField("usage") for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].usage.completion_tokens == http["usage"]["completion_tokens"]
        assert len({part.id for part in parts}) == 1

    def test_a_chat(self, rpc, tiny):
        stub, messages = rpc
        chat = messages.Chat(messages=[messages.ChatMessage(role="user", content="What is Tutti?")])
        text = "".join(part.text for part in stub.Generate(self.ask(messages, chat=chat)))
        http = tiny.chat(messages=QUESTION, max_completion_tokens=24, temperature=0)
        assert text == http["choices"][0]["message"]["content"]

    def test_token_ids_and_logprobs(self, rpc, tiny):
        stub, messages = rpc
        ids = tiny.client.post("/tokenize", json={"prompt": "Tutti is"}).json()["tokens"]
        want = messages.Output(logprobs=2, prompt_logprobs=0)
        parts = list(stub.Generate(self.ask(messages, token_ids=messages.TokenIds(ids=ids), output=want)))
        tokens = [t for part in parts for t in part.token_ids]
        logprobs = [entry for part in parts for entry in part.logprobs]
        assert tokens and [entry.token_id for entry in logprobs] == tokens
        assert all(entry.rank == 1 and len(entry.top) == 2 for entry in logprobs)
        prompt = parts[0].prompt_logprobs
        assert [entry.token_id for entry in prompt] == ids
        assert [entry.HasField("logprob") for entry in prompt] == [False] + [True] * (len(ids) - 1)

    def test_choices_have_indices(self, rpc):
        stub, messages = rpc
        parts = list(stub.Generate(self.ask(messages, n=3)))
        texts = {index: "" for index in range(3)}
        for part in parts:
            texts[part.index] += part.text
        assert texts[0] and texts[0] == texts[1] == texts[2], "greedy choices are equal"
        assert sum(part.HasField("finish") for part in parts) == 3

    def test_a_cancelled_call_frees_its_pages(self, rpc, tiny):
        stub, messages = rpc
        stopping = messages.Stopping(max_tokens=400, ignore_eos=True)
        call = stub.Generate(self.ask(messages, stopping=stopping))
        list(itertools.islice(call, 2))
        call.cancel()
        tiny.wait_until_idle()

    def test_a_deadline_ends_the_call_and_frees_its_pages(self, rpc, tiny):
        stub, messages = rpc
        stopping = messages.Stopping(max_tokens=400, ignore_eos=True)
        with pytest.raises(grpc.RpcError) as failed:
            list(stub.Generate(self.ask(messages, stopping=stopping, timeout_ms=1)))
        assert failed.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        tiny.wait_until_idle()

    def test_health(self, channel):
        check = health_pb2_grpc.HealthStub(channel).Check
        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("", "tutti.v1.Inference"):
            assert check(health_pb2.HealthCheckRequest(service=service)).status == serving

    def test_reflection_names_the_service_and_its_methods(self, channel):
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "tutti.v1.Inference" in database.get_services()
        file = database.FindFileContainingSymbol("tutti.v1.Inference")
        assert [method.name for method in file.service[0].method] == ["Generate", "GetModel"]


LONG = {"prompt": "go on", "max_tokens": 4000, "ignore_eos": True}


def in_use(cluster):
    return cluster.metrics()["tutti_kv_pages_used"] > 0


def test_a_client_that_leaves_a_stream_frees_its_pages(tiny):
    with tiny.client.stream("POST", "/v1/completions", json=LONG | {"model": tiny.model, "stream": True}) as response:
        lines = response.iter_lines()  # kept, since its drop would close the stream
        next(lines)
        wait_for("pages in use", lambda: in_use(tiny), every=0.005)
    tiny.wait_until_idle()


def test_a_client_that_leaves_a_whole_answer_frees_its_pages(tiny):
    """The answer is not streamed, so the server writes nothing before its end and cannot notice the disconnect by a
    failed write."""
    body = json.dumps(LONG | {"model": tiny.model}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    generated = lambda: tiny.metrics().get("tutti_generated_tokens_total", 0)
    before = generated()
    with socket.create_connection(("127.0.0.1", tiny.http_port)) as connection:
        connection.sendall(head + body)
        wait_for("pages in use", lambda: in_use(tiny), every=0.005)
    tiny.wait_until_idle()
    assert generated() - before < LONG["max_tokens"], "the request ran to its end"
