"""Traces of requests. Each request has one trace, from the client's span through router, conductor and workers to the
steps of the workers."""

import json
import secrets
import socket

import grpc
import pytest
from collector import Collector, tree
from harness import free_port, wait_for
from media_model import ask, audio, sound, text, write
from not_finite import ASK, POISON
from topologies import TOPOLOGIES
from tutti.v1 import inference_pb2, inference_pb2_grpc

# Spans are sent after a short time, so that a test need not end the processes to see them.
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
SERVER, CLIENT = 2, 3


@pytest.fixture
def collector():
    collector = Collector()
    yield collector
    collector.stop()


def traceparent(sampled=True):
    trace, span = secrets.token_hex(16), secrets.token_hex(8)
    return trace, span, f"00-{trace}-{span}-{'01' if sampled else '00'}"


def whole_trace(collector, trace, graphs):
    """Returns the spans of a trace, once it has the router's span and the spans of all graphs."""

    def complete():
        spans = collector.spans(trace)
        names = [span.name for span in spans]
        return spans if sum(name.startswith("graph ") for name in names) == graphs and "request" in names and any(
            "gen_ai.operation.name" in span.attributes for span in spans) else None

    wait_for("the whole trace", lambda: complete() is not None)
    return complete()


def named(spans, name):
    [span] = [span for span in spans if span.name == name]
    return span


def children(spans, parent):
    return sorted(span.name for span in spans if span.parent == parent.id)


def test_a_disaggregated_request_with_media_is_one_trace(start, collector, tmp_path):
    env = SOON | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}
    topology = TOPOLOGIES / "encoders-prefill-disaggregated.toml"
    model = write(tmp_path / "checkpoint")
    cluster = start("--topology", topology, "--max-step-tokens", 16, *model, env=env)
    trace, client_span, header = traceparent()
    body = ask(text("What is this? "), audio(sound(1, 40)), text("And why?"), max_tokens=12)
    answer = cluster.client.post("/v1/chat/completions", json={"model": cluster.model} | body, headers={"traceparent": header})
    usage = answer.raise_for_status().json()["usage"]
    spans = whole_trace(collector, trace, graphs=3)
    print("\n".join(tree(spans, client_span)))  # docs/tracing.md shows it

    by_id = {span.id: span for span in spans}
    assert all(span.parent in by_id or span.parent == client_span for span in spans)
    assert all(span.begin <= span.end for span in spans)

    [request] = [span for span in spans if span.parent == client_span]
    assert (request.name, request.kind, request.service) == (f"chat {cluster.model}", SERVER, "tutti-conductor")
    said = request.attributes
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.provider.name"] == "tutti"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == cluster.model
    assert said["gen_ai.request.max_tokens"] == 12 and said["gen_ai.request.temperature"] == 0
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 12
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    assert "first_token" in [name for name, _ in request.events]
    assert children(spans, request) == ["attempt", "tokenize"]
    assert all(request.begin <= span.begin and span.end <= request.end for span in spans if span.parent == request.id)
    attempt, inside = named(spans, "attempt"), named(spans, "request")
    assert inside.parent == attempt.id and attempt.kind == CLIENT
    assert children(spans, inside) == ["graph decode", "graph encode", "graph prefill", "queue"]
    roles = [said["tutti.graph.role"] for name, said in inside.events if name == "launched"]
    assert roles == ["decode", "prefill", "encode"]
    # The messages of two workers may arrive in either order.
    handed_over = [said["tutti.transfer.of"] for name, said in inside.events if name == "handed_over"]
    assert sorted(handed_over) == ["embeddings", "planes"]

    encode, prefill, decode = (named(spans, f"graph {role}") for role in ("encode", "prefill", "decode"))
    ranks = {graph.attributes["tutti.worker.rank"] for graph in (encode, prefill, decode)}
    assert ranks == {0, 1, 2}
    assert children(spans, encode) == ["encode", "queue", "transfer"]
    assert children(spans, prefill) == ["prefill", "transfer", "transfer"]
    assert children(spans, decode) == ["decode", "transfer"]
    assert {graph.attributes["tutti.graph.outcome"] for graph in (encode, prefill)} == {"handed_over"}
    assert decode.attributes["tutti.graph.outcome"] == "finished"

    # Every chunk of the prompt is an event, and each chunk begins where the previous one ends.
    chunks = [said for name, said in named(spans, "prefill").events if name == "chunk"]
    begins, ends = ([said[f"tutti.positions.{side}"] for said in chunks] for side in ("begin", "end"))
    assert len(chunks) > 1 and begins == [0, *ends[:-1]] and ends[-1] == usage["prompt_tokens"]
    # The first token comes from the prefill. Of the eleven decode steps, the steps 1, 2, 4 and 8 are shown.
    decoding = named(spans, "decode")
    assert decoding.attributes["tutti.rows"] == 11
    assert [name for name, _ in decoding.events] == ["step"] * 4
    steps = {(span.trace, span.id): span for span in collector.spans() if span.name == "step"}
    assert len(decoding.links) == 4
    for (_, event), link in zip(decoding.events, decoding.links):
        step = steps[link]
        assert step.trace != trace and (trace, decode.id) in step.links
        assert step.attributes["tutti.step"] == event["tutti.step"]
        assert step.attributes["tutti.step.rows"] == 1 and step.attributes["tutti.step.run_us"] > 0

    # An exemplar links the histogram to the trace, but only in the OpenMetrics format.
    ask_for = lambda accept: cluster.client.get("/metrics", headers={"accept": accept}).text
    assert f'trace_id="{trace}"' in ask_for("application/openmetrics-text; version=1.0.0")
    plain = ask_for("text/plain")
    assert "trace_id" not in plain
    labels = f'gen_ai_operation_name="chat",gen_ai_provider_name="tutti",gen_ai_request_model="{cluster.model}"'
    assert f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}} 1" in plain
    assert f"gen_ai_server_time_per_output_token_seconds_count{{{labels}}} 1" in plain


def test_clients_without_and_with_a_flag(start, collector):
    """A request without traceparent gets a new trace. A request whose traceparent is not sampled gets none."""
    cluster = start("--workers", 1, "--device", "sim", "--otlp-endpoint", collector.endpoint, env=SOON)
    unsampled, _, header = traceparent(sampled=False)
    body = {"model": cluster.model, "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    cluster.client.post("/v1/completions", json=body, headers={"traceparent": header}).raise_for_status()
    cluster.complete(prompt="hello", max_tokens=3, ignore_eos=True)
    sampled, span, header = traceparent()
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        wanted = inference_pb2.GenerateRequest(text="hello", stopping=inference_pb2.Stopping(max_tokens=3))
        list(stub.Generate(wanted, metadata=(("traceparent", header),)))

    def requests():
        return [span for span in collector.spans() if "gen_ai.operation.name" in span.attributes]

    # The requests ran one after another, so the spans of the first one would have arrived by now.
    wait_for("both traces", lambda: any(span.trace == sampled for span in requests()))
    own, by_grpc = sorted(requests(), key=lambda span: span.begin)
    assert own.parent == "" and own.trace not in (sampled, unsampled)
    assert (by_grpc.trace, by_grpc.parent) == (sampled, span)
    assert whole_trace(collector, own.trace, graphs=1)
    assert not collector.spans(unsampled)


def test_the_logs_of_all_processes_lead_to_the_trace(start, collector, poisoned):  # noqa: F811
    """Log lines of a worker name the graph. For a sampled request, the lines about launch and failure also name the
    trace. """
    log = ("--log", "debug", "--log-format", "json", "--otlp-endpoint", collector.endpoint)
    cluster = start("--workers", 1, "--model", poisoned, "--skip-tokenizer-init", *log, env=SOON)
    (sampled, _, with_trace), (unsampled, _, without) = traceparent(), traceparent(sampled=False)
    for header in (with_trace, without):
        body = ASK | dict(model=cluster.model, prompt=[5, POISON, 6], max_tokens=4)
        assert cluster.client.post("/v1/completions", json=body, headers={"traceparent": header}).status_code == 500
    whole_trace(collector, sampled, graphs=1)
    lines = lambda: [json.loads(line) for line in cluster.log().split("\n")[:-1] if line.startswith("{")]
    traced = lambda: [line for line in lines() if line.get("trace_id") == sampled]
    of_worker = lambda: [line for line in traced() if line["process"] == "worker"]
    launched, failed = wait_for("two lines", lambda: len(of_worker()) == 2 and of_worker())
    lines, traced = lines(), traced()
    assert any(line["process"] == "conductor" for line in traced)
    assert launched["role"] == "whole" and launched["key"] == failed["key"]
    assert failed["level"] == "WARN" and failed["outcome"] == "failed" and failed["error"]
    assert any(line.get("span", {}).get("trace_id") == sampled for line in lines)
    assert not any(line.get("trace_id") == unsampled for line in lines if line["process"] == "worker")


def test_a_sampler_that_takes_nothing_makes_no_connection(start):
    """With `always_off`, no span is sent, and not even a connection is opened. Without a collector, none is opened
    either. """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        off = SOON | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_TRACES_SAMPLER": "always_off"}
        cluster = start("--workers", 1, "--device", "sim", env=off)
        _, _, header = traceparent()
        body = {"model": cluster.model, "prompt": "hello", "max_tokens": 3}
        cluster.client.post("/v1/completions", json=body, headers={"traceparent": header}).raise_for_status()
        # At its end, the process sends the remaining spans.
        cluster.stop()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_an_unreachable_collector_costs_no_request(start):
    endpoint = f"http://127.0.0.1:{free_port()}"
    cluster = start("--workers", 2, "--device", "sim", "--otlp-endpoint", endpoint, env=SOON)
    for _ in range(50):
        assert cluster.complete(prompt="hello", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    cluster.wait_until_idle()
    assert cluster.metrics()["tutti_router_generations_total"] == 50
    assert 'tutti_router_generations_total{outcome="finished"} 50' in cluster.client.get("/metrics").text
    # The router in the conductor's process and each worker say so once, however many batches are lost.
    lost = "spans do not reach the collector and are lost"
    wait_for("the warnings of three processes", lambda: cluster.log().count(lost) == 3)
    collector = Collector(int(endpoint.rpartition(":")[2]))
    try:
        cluster.complete(prompt="hello", max_tokens=3, ignore_eos=True)
        wait_for("spans", lambda: collector.received)
        wait_for("the end of the failure", lambda: "spans reach the collector again" in cluster.log())
        assert cluster.log().count(lost) == 3
    finally:
        collector.stop()


@pytest.mark.parametrize("endpoint", ("127.0.0.1:4317", "", "ftp://127.0.0.1:4317"))
@pytest.mark.parametrize("name", ("conductor", "router"))
def test_an_address_that_is_no_collector_is_refused_before_anything_binds(spawn, name, endpoint):
    port = free_port()
    more = ("--device", "sim") if name == "conductor" else ("--conductor", "http://127.0.0.1:1")
    process = spawn(name, "--otlp-endpoint", endpoint, "--http", f"127.0.0.1:{port}", *more)
    assert process.wait() == 64
    assert f"{json.dumps(endpoint)} " in process.log() and "http://HOST:PORT" in process.log()
    assert "listens" not in process.log()


@pytest.mark.parametrize(
    "variables, named",
    [
        ({"OTEL_TRACES_SAMPLER": "sometimes"}, "OTEL_TRACES_SAMPLER"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}, "OTEL_TRACES_SAMPLER_ARG"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER"),
    ],
)
def test_wrong_variables_are_refused(spawn, variables, named):
    process = spawn("conductor", "--otlp-endpoint", "http://127.0.0.1:4317", "--device", "sim", env=variables)
    assert process.wait() == 64
    assert named in process.log()
