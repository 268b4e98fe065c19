"""Priorities and deadlines of requests over HTTP and gRPC, with simulated devices."""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from harness import STOP_S, events, wait_for

PATH = "/v1/completions"
# Only one request runs at a time, so that the scheduler's order is visible.
ONE_AT_A_TIME = ("--workers", 1, "--device", "sim", "--max-running-requests", 1)

# A deadline that is long enough for a request to reach the conductor on a busy machine.
LATE_MS = 800


def asked(max_tokens, **more):
    return {"prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0} | more


def rpc(cluster, max_tokens, timeout=None, **more):
    """Sends a request over gRPC and reads it to its end."""
    from tutti.v1 import inference_pb2 as messages
    from tutti.v1 import inference_pb2_grpc

    request = messages.GenerateRequest(
        token_ids=messages.TokenIds(ids=[5, 6, 7]),
        stopping=messages.Stopping(max_tokens=max_tokens, ignore_eos=True),
        **more,
    )
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return list(stub.Generate(request, timeout=timeout))


@contextlib.contextmanager
def occupied(cluster):
    """A context in which the only running request is a stream that does not end by itself."""
    body = {"model": cluster.model, "stream": True} | asked(3000)
    with cluster.client.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()  # kept, since its drop would close the stream
        next(lines)
        yield


def wait_until_waiting(cluster, count):
    wait_for(f"{count} waiting requests", lambda: cluster.metrics()["tutti_requests_waiting"] == count)


def outcomes(cluster):
    """Returns the conductor's counts of requests by outcome, and of refusals by reason."""
    found = {}
    for line in cluster.client.get("/metrics").text.splitlines():
        for name in ("tutti_requests_total", "tutti_requests_refused_total"):
            if line.startswith(name + "{"):
                labels, count = line.removeprefix(name).split()
                found[labels.split('"')[1]] = int(count)
    return found


@pytest.mark.parametrize("surface", ["http", "grpc"])
def test_a_high_priority_overtakes_a_queue_of_low_ones(start, surface):
    cluster = start(*ONE_AT_A_TIME)
    ended = []

    def run(name, priority):
        if surface == "http":
            cluster.complete(**asked(20), priority=priority)
        else:
            rpc(cluster, 20, priority=priority)
        ended.append(name)

    queue = [("low 1", 1), ("low 2", 1), ("ordinary", 0), ("lowest", 8), ("high", -8)]
    with ThreadPoolExecutor() as pool:
        with occupied(cluster):
            runs = []
            for waiting, (name, priority) in enumerate(queue, 1):
                runs.append(pool.submit(run, name, priority))
                wait_until_waiting(cluster, waiting)
        for done in runs:
            done.result()
    assert ended == ["high", "ordinary", "low 1", "low 2", "lowest"]
    cluster.wait_until_idle()


def test_a_low_priority_waits_longer_but_not_forever(start):
    cluster = start(*ONE_AT_A_TIME)
    enough, served = threading.Event(), []

    def flood():
        """Sends requests of higher priority one after the other, so that one of them waits nearly always."""
        while not enough.is_set() and len(served) < 400:
            cluster.complete(**asked(8))
            served.append(None)

    with ThreadPoolExecutor(10) as pool:
        with occupied(cluster):
            floods = [pool.submit(flood) for _ in range(3)]
            wait_until_waiting(cluster, 3)
            low = pool.submit(cluster.complete, **asked(1), priority=1)
            wait_until_waiting(cluster, 4)
            # These come later and are served earlier, even if this process is slow to send further ones.
            floods += [pool.submit(flood) for _ in range(6)]
            wait_until_waiting(cluster, 10)
        low.result()
        overtaken = len(served)
        enough.set()
        for done in floods:
            done.result()
    # Three requests waited ahead of the request with the lower priority. One priority level is a head start of 256
    # steps, which is as long as 32 of the other requests.
    assert 3 < overtaken < 60


@pytest.fixture(scope="module")
def cluster(shared):
    return shared(*ONE_AT_A_TIME)


class TestDeadlines:
    """Deadlines of requests that wait, that decode, and that cannot finish in time."""

    def check_http(self, response):
        assert response.status_code == 504, response.text
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "deadline_exceeded")
        return error["message"]

    def test_a_waiting_request_fails_at_its_deadline_on_every_surface(self, cluster):
        before = outcomes(cluster)
        with occupied(cluster), ThreadPoolExecutor() as pool:
            whole = pool.submit(cluster.post, PATH, asked(4, timeout_ms=LATE_MS))
            chat = {"messages": [{"role": "user", "content": "hi"}], "timeout_ms": LATE_MS}
            chat = pool.submit(cluster.post, "/v1/chat/completions", chat)
            streamed = pool.submit(cluster.post, PATH, asked(4, timeout_ms=LATE_MS, stream=True))
            called = pool.submit(rpc, cluster, 4, timeout_ms=LATE_MS)
            timed = pool.submit(rpc, cluster, 4, timeout=LATE_MS / 1000)
            assert "was not done within" in self.check_http(whole.result())
            self.check_http(chat.result())
            # The stream had begun with status 200, so the error is its last event.
            assert streamed.result().status_code == 200
            assert '"deadline_exceeded"' in streamed.result().text and "[DONE]" not in streamed.result().text
            for call in (called, timed):
                with pytest.raises(grpc.RpcError) as late:
                    call.result()
                assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            # The worker has removed the requests, although the request ahead of them still runs.
            wait_until_waiting(cluster, 0)
            assert cluster.metrics()["tutti_requests_running"] == 1
        cluster.wait_until_idle()
        # If the client has the same deadline, the server may see the client's disconnect first.
        late = outcomes(cluster)["deadline_exceeded"] - before.get("deadline_exceeded", 0)
        assert late in (4, 5)

    def test_a_decoding_request_ends_at_its_deadline_and_frees_its_pages(self, cluster):
        began = time.monotonic()
        body = {"model": cluster.model, "stream": True} | asked(3000, timeout_ms=400)
        with cluster.client.stream("POST", PATH, json=body) as response:
            lines = [line for line in response.iter_lines() if line]
        assert 0.4 <= time.monotonic() - began < STOP_S
        *tokens, last = events([*lines, "data: [DONE]"])
        assert len(tokens) > 10 and last["error"]["code"] == "deadline_exceeded"
        cluster.wait_until_idle()

    def test_a_timeout_of_zero_is_refused_on_arrival(self, cluster):
        steps = cluster.metrics()["tutti_worker_steps"]
        self.check_http(cluster.post(PATH, asked(4, timeout_ms=0)))
        self.check_http(cluster.post(PATH, asked(4, timeout_ms=0, stream=True)))
        with pytest.raises(grpc.RpcError) as late:
            rpc(cluster, 4, timeout_ms=0)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert cluster.metrics()["tutti_worker_steps"] == steps

    def test_a_sufficient_timeout_changes_nothing(self, cluster):
        free, timed = cluster.complete(**asked(20)), cluster.complete(**asked(20), timeout_ms=60_000, priority=3)
        assert timed["choices"] == free["choices"]


def test_a_prompt_that_is_too_long_for_its_deadline_is_not_started(start):
    # A token takes one millisecond, so 1,000 tokens take a second even on an idle worker.
    costs = {"TUTTI_SIM__PREFILL_NS_PER_TOKEN": "1000000", "TUTTI_SIM__FIXED_US": "0"}
    cluster = start("--workers", 1, "--device", "sim", "--max-step-tokens", 128, "--no-prefix-cache", env=costs)
    for _ in range(3):
        cluster.complete(**asked(1, prompt=[5] * 128))
    steps = cluster.metrics()["tutti_worker_steps"]
    hopeless = cluster.post(PATH, asked(1, prompt=[5] * 1000, timeout_ms=300))
    assert hopeless.status_code == 504 and "the prompt takes at least" in hopeless.text, hopeless.text
    cluster.wait_until_idle()
    assert cluster.metrics()["tutti_worker_steps"] == steps
    assert outcomes(cluster)["deadline_exceeded"] == 1
    cluster.complete(**asked(1, prompt=[5] * 1000, timeout_ms=60_000))


def test_refusals_and_missed_deadlines_are_counted_by_reason(start):
    cluster = start(*ONE_AT_A_TIME, "--max-queued-requests", 1)
    with ThreadPoolExecutor() as pool, occupied(cluster):
        waits = pool.submit(cluster.post, PATH, asked(4, timeout_ms=LATE_MS))
        wait_until_waiting(cluster, 1)
        wait_for("an age of the queue", lambda: cluster.metrics()["tutti_queue_age_seconds"] > 0)
        assert cluster.post(PATH, asked(4)).status_code == 503
        assert cluster.post(PATH, asked(4, priority=9)).json()["error"]["param"] == "priority"
        assert waits.result().status_code == 504
    cluster.wait_until_idle()
    # The router refuses invalid requests. The conductor refuses requests for which it has no room.
    text = cluster.client.get("/metrics").text
    for line in (
        'tutti_requests_refused_total{reason="overloaded"} 1',
        'tutti_requests_total{outcome="deadline_exceeded"} 1',
        'tutti_router_generations_refused_total{reason="overloaded"} 1',
        'tutti_router_generations_refused_total{reason="invalid"} 1',
        'tutti_router_generations_total{outcome="deadline_exceeded"} 1',
    ):
        assert line in text.splitlines(), line


def test_a_deadline_ends_a_request_on_a_worker_that_hangs(start):
    faults = {"TUTTI_SIM__HANG_AFTER": "20", "TUTTI_SIM__PROFILE": "instant"}
    cluster = start("--workers", 1, "--device", "sim", env=faults)
    cluster.complete(**asked(10))
    # The worker never answers again, so the conductor ends the requests in time.
    began = time.monotonic()
    running = cluster.post(PATH, asked(30, timeout_ms=500))
    queued = cluster.post(PATH, asked(1, timeout_ms=500))
    assert (running.status_code, queued.status_code) == (504, 504), running.text + queued.text
    with pytest.raises(grpc.RpcError) as late:
        rpc(cluster, 1, timeout_ms=500)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 1.5 <= time.monotonic() - began < STOP_S
    # The requests count as in flight until the worker has ended, because it may still hold their pages.
    assert cluster.metrics()["tutti_requests_in_flight"] == 3
    for pid in cluster.workers():
        os.kill(pid, signal.SIGKILL)
    wait_for("an answer of the next worker", lambda: cluster.post(PATH, asked(1)).status_code == 200)
    cluster.wait_until_idle()
