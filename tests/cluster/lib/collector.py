"""A collector of OpenTelemetry spans: OTLP over gRPC, as the published protos define it."""

import concurrent.futures
import dataclasses
import threading

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclasses.dataclass
class Span:
    name: str
    service: str
    trace: str
    id: str
    parent: str
    kind: int
    begin: int
    end: int
    attributes: dict
    events: list
    links: list
    failed: bool


def value(any_value):
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(item) for item in any_value.array_value.values]
    return getattr(any_value, kind) if kind else None


def attributes(pairs):
    return {pair.key: value(pair.value) for pair in pairs}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all spans that it receives."""

    def __init__(self, port=0):
        self.lock, self.received, self.calls = threading.Lock(), [], 0
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
        self.endpoint = f"http://127.0.0.1:{self.server.add_insecure_port(f'127.0.0.1:{port}')}"
        self.server.start()

    def Export(self, request, context):
        spans = []
        for resource in request.resource_spans:
            service = attributes(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                spans += [self.span(service, span) for span in scope.spans]
        with self.lock:
            self.received += spans
            self.calls += 1
        return trace_service_pb2.ExportTraceServiceResponse()

    @staticmethod
    def span(service, span):
        events = [(event.name, attributes(event.attributes)) for event in span.events]
        links = [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
        return Span(
            span.name, service, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.kind,
            span.start_time_unix_nano, span.end_time_unix_nano, attributes(span.attributes), events, links, span.status.code == 2,
        )

    def spans(self, trace=None):
        """Returns all received spans, or those of one trace."""
        with self.lock:
            return [span for span in self.received if trace in (None, span.trace)]

    def stop(self):
        self.server.stop(0).wait()


def tree(spans, root=""):
    """Returns the spans below a parent as indented lines, ordered by begin time."""
    lines = []
    for span in sorted((span for span in spans if span.parent == root), key=lambda span: span.begin):
        took = (span.end - span.begin) / 1e6
        shown = {key: said for key, said in span.attributes.items() if key.startswith(("tutti.", "gen_ai."))}
        lines.append(f"{span.name} [{span.service}] {took:.2f} ms {shown if shown else ''}".rstrip())
        lines += [f"    · {name} {said if said else ''}".rstrip() for name, said in span.events]
        lines += ["  " + line for line in tree(spans, span.id)]
    return lines
