"""Priorities and deadlines, from clients over HTTP and gRPC to the scheduler of a simulated device and back."""

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
# What is admitted one at a time is served in the scheduler's own order.
ONE_AT_A_TIME = ("--workers", 1, "--device", "sim", "--max-running-requests", 1)

# Long enough to reach the conductor on a busy machine.
LATE_MS = 800


def asked(max_tokens, **more):
    return {"prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0} | more


def rpc(cluster, max_tokens, timeout=None, **more):
    """A request over gRPC, read to its end."""
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
    """The one place is taken by a stream that has begun and does not end by itself."""
    body = {"model": cluster.model, "stream": True} | asked(3000)
    with cluster.client.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()  # dropped, it would close the stream
        next(lines)
        yield


def wait_until_waiting(cluster, count):
    wait_for(f"{count} waiting requests", lambda: cluster.metrics()["tutti_requests_waiting"] == count)


def outcomes(cluster):
    """How requests have ended so far, and why some were refused, as the conductor counts them."""
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


def test_a_low_priority_waits_longer_but_not_for_ever(start):
    cluster = start(*ONE_AT_A_TIME)
    enough, served = threading.Event(), []

    def flood():
        """Requests of a higher class, one after the other, so that there is always one that could go first."""
        while not enough.is_set() and len(served) < 400:
            cluster.complete(**asked(8))
            served.append(None)

    with ThreadPoolExecutor() as pool:
        with occupied(cluster):
            floods = [pool.submit(flood) for _ in range(3)]
            wait_until_waiting(cluster, 3)
            low = pool.submit(cluster.complete, **asked(1), priority=1)
            wait_until_waiting(cluster, 4)
        low.result()
        overtaken = len(served)
        enough.set()
        for done in floods:
            done.result()
    # Three were ahead of it anyway. A class is a head start of 256 steps, which are 32 of these requests.
    assert 3 < overtaken < 60


@pytest.fixture(scope="module")
def cluster(shared):
    return shared(*ONE_AT_A_TIME)


class TestDeadlines:
    """Of requests that wait, that decode, and that cannot be in time."""

    def check_http(self, response):
        assert response.status_code == 504, response.text
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "deadline_exceeded")
        return error["message"]

    def test_whoever_waits_is_told_in_time_over_every_surface(self, cluster):
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
            # The stream had begun, so that its status was sent, and the error is its last event.
            assert streamed.result().status_code == 200
            assert '"deadline_exceeded"' in streamed.result().text and "[DONE]" not in streamed.result().text
            for call in (called, timed):
                with pytest.raises(grpc.RpcError) as late:
                    call.result()
                assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            # They are gone from the worker while the one that was ahead of them goes on.
            wait_until_waiting(cluster, 0)
            assert cluster.metrics()["tutti_requests_running"] == 1
        cluster.wait_until_idle()
        # The client's own deadline may be told by the client's going.
        late = outcomes(cluster)["deadline_exceeded"] - before.get("deadline_exceeded", 0)
        assert late in (4, 5)

    def test_whoever_decodes_is_cut_off_and_its_pages_are_free(self, cluster):
        began = time.monotonic()
        body = {"model": cluster.model, "stream": True} | asked(3000, timeout_ms=400)
        with cluster.client.stream("POST", PATH, json=body) as response:
            lines = [line for line in response.iter_lines() if line]
        assert 0.4 <= time.monotonic() - began < STOP_S
        *tokens, last = events([*lines, "data: [DONE]"])
        assert len(tokens) > 10 and last["error"]["code"] == "deadline_exceeded"
        cluster.wait_until_idle()

    def test_no_time_at_all_is_said_so_at_the_door(self, cluster):
        steps = cluster.metrics()["tutti_worker_steps"]
        self.check_http(cluster.post(PATH, asked(4, timeout_ms=0)))
        self.check_http(cluster.post(PATH, asked(4, timeout_ms=0, stream=True)))
        with pytest.raises(grpc.RpcError) as late:
            rpc(cluster, 4, timeout_ms=0)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert cluster.metrics()["tutti_worker_steps"] == steps

    def test_time_that_is_enough_changes_nothing(self, cluster):
        free, timed = cluster.complete(**asked(20)), cluster.complete(**asked(20), timeout_ms=60_000, priority=3)
        assert timed["choices"] == free["choices"]


def test_a_prompt_that_is_too_long_for_its_time_is_not_begun(start):
    # A millisecond a token: 1,000 tokens take a second, whatever else there is to do.
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


def test_refusals_and_late_endings_show_by_reason(start):
    cluster = start(*ONE_AT_A_TIME, "--max-queued-requests", 1)
    with ThreadPoolExecutor() as pool, occupied(cluster):
        waits = pool.submit(cluster.post, PATH, asked(4, timeout_ms=LATE_MS))
        wait_until_waiting(cluster, 1)
        wait_for("an age of the queue", lambda: cluster.metrics()["tutti_queue_age_seconds"] > 0)
        assert cluster.post(PATH, asked(4)).status_code == 429
        assert cluster.post(PATH, asked(4, priority=9)).json()["error"]["param"] == "priority"
        assert waits.result().status_code == 504
    cluster.wait_until_idle()
    # The front door refuses by itself what it can tell to be wrong; the conductor, what there is no room for.
    text = cluster.client.get("/metrics").text
    for line in (
        'tutti_requests_refused_total{reason="overloaded"} 1',
        'tutti_requests_total{outcome="deadline_exceeded"} 1',
        'tutti_router_generations_refused_total{reason="overloaded"} 1',
        'tutti_router_generations_refused_total{reason="invalid"} 1',
        'tutti_router_generations_total{outcome="deadline_exceeded"} 1',
    ):
        assert line in text.splitlines(), line


def test_a_deadline_is_the_way_out_of_a_worker_that_hangs(start):
    faults = {"TUTTI_SIM__HANG_AFTER": "20", "TUTTI_SIM__PROFILE": "instant"}
    cluster = start("--workers", 1, "--device", "sim", env=faults)
    cluster.complete(**asked(10))
    # The worker never answers again, to nobody: it is the conductor that ends these in time.
    began = time.monotonic()
    running = cluster.post(PATH, asked(30, timeout_ms=500))
    queued = cluster.post(PATH, asked(1, timeout_ms=500))
    assert (running.status_code, queued.status_code) == (504, 504), running.text + queued.text
    with pytest.raises(grpc.RpcError) as late:
        rpc(cluster, 1, timeout_ms=500)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert 1.5 <= time.monotonic() - began < STOP_S
    # What it holds counts as in flight until it is gone, since only then is it certain that nothing is held.
    assert cluster.metrics()["tutti_requests_in_flight"] == 3
    for pid in cluster.workers():
        os.kill(pid, signal.SIGKILL)
    wait_for("an answer of the next worker", lambda: cluster.post(PATH, asked(1)).status_code == 200)
    cluster.wait_until_idle()
