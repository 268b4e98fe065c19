"""Faults that make alerts fire. Each fault is a cluster and an action on it."""

import contextlib
import os
import signal
import threading

import grpc
import httpx
from api_keys import line
from certificates import ROLES, Authority
from harness import REPO, Server, wait_for

SIM = ("--device", "sim")
TOPOLOGY = REPO / "deploy/topology/disaggregated.toml"
LONG = 4000  # tokens of a stream that lasts for the rest of a test

FAULTS = []


def fault(cluster, *alerts):
    """Declares a fault: a generator that gets the servers of `cluster` and yields each alert when the alert must fire.

    If it yields an alert with a server, the alert must be about this server.
    """

    def declare(function):
        function.cluster, function.alerts = contextlib.contextmanager(cluster), alerts
        FAULTS.append(function)
        return function

    return declare


def conductor(*flags, env=None):
    """Returns a function that starts a cluster of one conductor with its embedded router, and stops it after use."""

    def cluster(directory):
        server = Server("conductor", [*SIM, *flags], directory, env)
        try:
            yield [server.wait_until_ready()]
        finally:
            server.destroy()

    return cluster


def routed(conductors, *router_flags):
    """Returns a function that starts a cluster of a router and conductors, and stops it after use.

    The function yields the list of servers, the router first.
    """

    def cluster(directory):
        servers = []
        try:
            for _ in range(conductors):
                servers.append(Server("conductor", [*SIM, "--no-router"], directory).wait_until_ready())
            reach = [flag for server in servers for flag in ("--conductor", f"http://{server.cluster}")]
            servers.insert(0, Server("router", [*reach, *router_flags], directory).wait_until_ready())
            yield servers
        finally:
            for server in servers:
                server.destroy()

    return cluster


class Stream:
    """A stream that a separate thread reads. It may end with an error."""

    def __init__(self, server, tokens=LONG, prompt=(1, 2, 3)):
        self.seen, self.status = 0, None
        body = {"prompt": list(prompt), "max_tokens": tokens, "ignore_eos": True, "stream": True}
        self.thread = threading.Thread(target=self.read, args=(server.url, body), daemon=True)
        self.thread.start()

    def read(self, url, body):
        with contextlib.suppress(httpx.HTTPError), httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
            self.status = response.status_code
            for text in response.iter_lines():
                self.seen += text.startswith("data: {")

    def wait(self, tokens=2):
        wait_for("tokens of a stream", lambda: self.seen >= tokens, 60)
        return self


@fault(routed(1), "TuttiConductorUnreachable", "TuttiNotReady", "TuttiProcessDown")
def a_conductor_stops_and_a_router_dies(router, conductor):
    conductor.signal(signal.SIGSTOP)
    yield "TuttiConductorUnreachable"
    yield "TuttiNotReady"
    router.signal(signal.SIGKILL)
    yield "TuttiProcessDown", router


@fault(conductor("--drain-timeout", 300), "TuttiDrainSlow")
def a_drain_waits_for_a_stream(conductor):
    Stream(conductor).wait()
    conductor.signal(signal.SIGTERM)
    yield "TuttiDrainSlow"


@fault(conductor("--workers", 2, "--heartbeat-timeout", 2), "TuttiWorkerFenced", "TuttiWorkerRestarts", "TuttiWorkersMissing")
def workers_stop_and_die(conductor):
    os.kill(conductor.workers_by_rank()[0], signal.SIGSTOP)
    yield "TuttiWorkerFenced"
    ended = threading.Event()

    def kill():
        while not ended.is_set():
            with contextlib.suppress(KeyError, ProcessLookupError):
                os.kill(conductor.workers_by_rank()[1], signal.SIGKILL)
            ended.wait(0.1)

    # A death only counts if the worker was ready before, so each kill waits for a restarted worker.
    for restarts in range(1, 4):
        os.kill(wait_for("worker 1", lambda: conductor.workers_by_rank().get(1)), signal.SIGKILL)
        wait_for("a restart", lambda: conductor.metrics()["tutti_worker_restarts_total"] >= restarts + 1, 60)
        wait_for("both workers", lambda: conductor.metrics()["tutti_workers_ready"] == 2, 60)
    yield "TuttiWorkerRestarts"
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield "TuttiWorkersMissing"
    finally:
        ended.set()
        killer.join()


@fault(routed(2), "TuttiConductorLost")
def a_conductor_dies_under_its_streams(router, *conductors):
    streams = [Stream(router, prompt=[number] * 9).wait() for number in range(4)]
    busy = wait_for("a busy conductor", lambda: next((c for c in conductors if c.metrics()["tutti_requests_in_flight"]), None))
    busy.destroy()
    yield "TuttiConductorLost"
    assert all(stream.status == 200 for stream in streams)


@fault(routed(1, "--max-replays", 0), "TuttiRequestsFailing")
def the_only_conductor_dies_under_its_streams(router, conductor):
    for _ in range(4):
        Stream(router).wait()
    conductor.destroy()
    yield "TuttiRequestsFailing"


# There are pages for one request of maximum length.
@fault(conductor("--kv-cache-memory", "32KiB", "--max-running-requests", 1, "--max-queued-requests", 1), "TuttiKvFull", "TuttiQueueOld", "TuttiQueueFull", "TuttiFirstTokenSlow")
def memory_and_queue_are_full(conductor):
    Stream(conductor).wait()
    yield "TuttiKvFull"
    Stream(conductor)
    wait_for("a waiting request", lambda: conductor.metrics()["tutti_conductor_requests_waiting"] == 1)
    assert conductor.post("/v1/completions", {"prompt": [1], "max_tokens": LONG}).status_code == 503
    yield "TuttiQueueFull"
    yield "TuttiQueueOld"
    # The waiting stream gets its first token when the first stream has ended.
    yield "TuttiFirstTokenSlow"


@fault(conductor(env={"TUTTI_CONNECTIONS__MAX_OPEN": "4"}), "TuttiConnectionsRefused")
def all_connections_are_busy(conductor):
    # The streams use gRPC, because the HTTP connections are limited and Prometheus needs one.
    from tutti.v1 import inference_pb2 as messages
    from tutti.v1 import inference_pb2_grpc

    ask = messages.GenerateRequest(token_ids=messages.TokenIds(ids=[1, 2, 3]), stopping=messages.Stopping(ignore_eos=True, max_tokens=LONG))
    with contextlib.ExitStack() as stack:
        for number in range(4):
            # gRPC channels with equal options would share a connection.
            channel = stack.enter_context(grpc.insecure_channel(conductor.grpc, options=[("tutti.test", number)]))
            answers = inference_pb2_grpc.InferenceStub(channel).Generate(ask)
            stack.callback(answers.cancel)
            next(answers)
        fifth = stack.enter_context(grpc.insecure_channel(conductor.grpc, options=[("tutti.test", 4)]))
        fifth.subscribe(lambda _: None, try_to_connect=True)
        yield "TuttiConnectionsRefused"


def guarded(directory):
    keys = directory / "some-keys"
    keys.write_text(line("alice", "one"))
    yield from conductor("--api-key-file", keys)(directory)


@fault(guarded, "TuttiUnauthenticated")
def a_client_guesses_keys(conductor):
    for _ in range(600):
        # The server may close a connection on which it has refused a request without reading its body.
        with contextlib.suppress(httpx.RemoteProtocolError):
            refused = conductor.client.post("/v1/completions", json={}, headers={"authorization": "Bearer guess"})
            assert refused.status_code in (401, 429)
    yield "TuttiUnauthenticated"


def certified(directory):
    authority = Authority(directory)
    issue = lambda days: authority.issue("some", *ROLES.values(), days=days)
    cert, key = issue(90)
    for servers in conductor("--cluster-tls-cert", cert, "--cluster-tls-key", key, "--cluster-tls-ca", authority.ca)(directory):
        servers[0].certify = issue
        yield servers


@fault(certified, "TuttiCertificateEnds")
def a_certificate_is_about_to_end(conductor):
    # The process reads the files again.
    conductor.certify(2)
    yield "TuttiCertificateEnds"


@fault(conductor("--topology", TOPOLOGY, "--transfer-timeout", 1, "--heartbeat-timeout", 60), "TuttiTransfersFailing")
def the_decode_worker_hangs_in_a_transfer(conductor):
    decode = conductor.workers_by_rank()[1]
    failed = lambda: 'outcome="failed"} 0' not in conductor.client.get("/metrics").text.split("tutti_worker_transfers{worker=\"0\"", 1)[-1]
    streams = []
    # The worker must stop during a transfer. A stop at another time only delays the stream, so there are several tries.
    for number in range(40):
        streams.append(Stream(conductor, 200, [number + 1] * 2000))
        if number % 4 == 3:
            os.kill(decode, signal.SIGSTOP)
            try:
                threading.Event().wait(2)
            finally:
                os.kill(decode, signal.SIGCONT)
    yield "TuttiTransfersFailing"
