"""Output that follows a constraint, through router and conductor, on two workers of which one dies in the middle: the
tokens are those of an undisturbed run, and what ends by itself is valid."""

import concurrent.futures
import json
import os
import re
import signal
import threading

import grpc
import pytest
from harness import GOLDENS, wait_for

# Steps of the simulated device are so long that a worker dies in the middle of its outputs.
SIM = ("--device", "sim")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["small", "large"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 8, "maxItems": 30},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
PATTERN = "[a-z]{10,30}(-[0-9]{4}){4,20}"
STREAMS = 16


class Client:
    """Streams constrained requests, and counts the tokens of all."""

    def __init__(self, server):
        from tutti.v1 import inference_pb2 as pb
        from tutti.v1 import inference_pb2_grpc

        self.pb, self.channel = pb, grpc.insecure_channel(server.grpc)
        self.stub = inference_pb2_grpc.InferenceStub(self.channel)
        self.tokens, self.lock = 0, threading.Lock()

    def request(self, number):
        pb = self.pb
        if number % 2:
            constraint = pb.Constraint(regex=PATTERN)
        else:
            constraint = pb.Constraint(json_schema=pb.JsonSchema(schema=json.dumps(SCHEMA)))
        return pb.GenerateRequest(
            text=f"request {number}",
            constraint=constraint,
            sampling=pb.Sampling(temperature=1, seed=number),
            stopping=pb.Stopping(max_tokens=220),
        )

    def stream(self, number):
        """Returns the token ids, the text and the reason of the end."""
        ids, text, reason = [], "", None
        for message in self.stub.Generate(self.request(number)):
            ids += message.token_ids
            text += message.text
            with self.lock:
                self.tokens += len(message.token_ids)
            if message.HasField("finish"):
                reason = message.finish.reason
        return ids, text, reason

    def all(self, pool):
        return [pool.submit(self.stream, number) for number in range(STREAMS)]


def is_valid(number, text):
    if number % 2:
        return re.fullmatch(PATTERN, text) is not None
    value = json.loads(text)
    sizes = value["sizes"]
    return (
        list(value) == ["name", "kind", "sizes"]
        and len(value["name"]) <= 12
        and value["kind"] in ("small", "large")
        and 8 <= len(sizes) <= 30
        and all(type(size) is int for size in sizes)
    )


def in_flight(steps):
    return {"TUTTI_SIM__STEPS_IN_FLIGHT": str(steps)}


def test_steps_in_flight_change_no_token(start):
    outputs = []
    for steps in (1, 2, 3):
        cluster = start("--workers", 1, *SIM, env=in_flight(steps))
        client = Client(cluster)
        with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
            outputs.append([stream.result() for stream in client.all(pool)])
        cluster.wait_until_idle()
        cluster.stop()
    assert outputs[1] == outputs[0] and outputs[2] == outputs[0]


@pytest.mark.parametrize("steps", (1, 2))
def test_the_death_of_a_worker_changes_no_token(start, steps):
    cluster = start("--workers", 2, *SIM, env=in_flight(steps))
    client = Client(cluster)
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        undisturbed = [stream.result() for stream in client.all(pool)]
        ended = [(number, text) for number, (_, text, reason) in enumerate(undisturbed) if reason == client.pb.Finish.STOP]
        assert len(ended) >= STREAMS // 2
        assert all(is_valid(number, text) for number, text in ended)
        client.tokens = 0
        streams = client.all(pool)
        wait_for("tokens", lambda: client.tokens > 20 * STREAMS)
        os.kill(cluster.workers()[0], signal.SIGKILL)
        disturbed = [stream.result() for stream in streams]
    assert disturbed == undisturbed
    seen = cluster.metrics()
    assert seen["tutti_request_replays_total"] >= 2
    assert seen["tutti_worker_masks"] > 0 and seen["tutti_worker_constraints_compiled"] >= 2
    assert seen["tutti_worker_masks_awaited"] == 0
    cluster.wait_until_idle()


def test_without_a_tokenizer_a_constraint_is_refused(start):
    cluster = start("--workers", 1, "--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init")
    client = Client(cluster)
    request = client.pb.GenerateRequest(
        token_ids=client.pb.TokenIds(ids=[1, 2]), constraint=client.pb.Constraint(regex="a")
    )
    with pytest.raises(grpc.RpcError) as refused:
        list(client.stub.Generate(request))
    assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
    assert "tokenizer" in refused.value.details()
