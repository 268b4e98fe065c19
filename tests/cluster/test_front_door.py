"""Checks of running processes on arrival: API keys, web pages of other origins, and the warning about an address that
is open to the network."""

import os
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from api_keys import line
from harness import Process, free_port, wait_for

PATH = "/v1/completions"
SIM = ("--workers", 1, "--device", "sim")


def asked(key=None, **headers):
    body = {"prompt": [1, 2, 3], "max_tokens": 4}
    return dict(json=body, headers=headers | ({"authorization": f"Bearer {key}"} if key else {}))


def test_keys_are_needed_limited_and_read_again(start, tmp_path):
    file = tmp_path / "keys"
    file.write_text(line("alice", "one") + line("bob", "two", "requests-per-minute=1"))
    operations = f"127.0.0.1:{free_port()}"
    cluster = start(*SIM, "--api-key-file", file, "--operations", operations)
    post = lambda *args, **more: cluster.client.post(PATH, **asked(*args, **more))
    assert [post(key).status_code for key in (None, "three", "one", "two", "two")] == [401, 401, 200, 200, 429]
    # A web page with a key may send requests. Probes need no key.
    assert post("one", origin="https://chat.example").status_code == 200
    assert cluster.client.get("/health").status_code == cluster.client.get("/metrics").status_code == 200

    from tutti.v1 import inference_pb2 as messages
    from tutti.v1 import inference_pb2_grpc

    ask = messages.GenerateRequest(token_ids=messages.TokenIds(ids=[1, 2, 3]))
    with grpc.insecure_channel(cluster.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(ask))
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert list(stub.Generate(ask, metadata=[("authorization", "Bearer one")]))[-1].HasField("usage")

    replacement = tmp_path / "new"
    replacement.write_text(line("carol", "three"))
    os.replace(replacement, file)
    wait_for("the new key", lambda: post("three").status_code == 200)
    assert post("one").status_code == 401
    requests_that_are_refused_before_their_body_is_read_do_not_break_a_pool(cluster)
    # Names of keys are for operators alone.
    text = httpx.get(f"http://{operations}/metrics").text
    assert 'tutti_router_key_requests_total{key="alice"} 3' in text, text
    public = cluster.client.get("/metrics").text
    assert "alice" not in public and "tutti_router_key_" not in public and "tutti_router_api_keys 1" in public


def requests_that_are_refused_before_their_body_is_read_do_not_break_a_pool(cluster):
    # A pool sends a request over a connection that its last answer left open. If the server has closed it, the request
    # fails with "server disconnected".
    with httpx.Client(base_url=cluster.url, timeout=60) as pool, ThreadPoolExecutor(4) as threads:
        def refused(index):
            body = b" " * (10, 10_000, 100_000, 1_000_000)[index % 4]
            key = {"authorization": "Bearer wrong"} if index % 8 < 4 else {}
            return pool.post(PATH, content=body, headers=key | {"content-type": "application/json"}).status_code

        assert set(threads.map(refused, range(200))) <= {401, 429}


def test_a_revoked_key_is_refused_whatever_becomes_of_the_file(start, tmp_path):
    file = tmp_path / "keys"
    file.write_text(line("alice", "one") + line("bob", "two") + line("carol", "three"))
    cluster = start(*SIM, "--api-key-file", file, env={"TUTTI_ROUTER__REVOKED_REQUESTS": "end", "TUTTI_SIM__FIXED_US": "20000"})
    status = lambda key: cluster.client.post(PATH, **asked(key)).status_code
    failures = lambda: cluster.metrics()["tutti_file_reload_failures_total"]
    assert [status(key) for key in ("one", "two", "three")] == [200] * 3
    # A stream of a key that is about to be revoked, and one of a key that stays.
    body = {"prompt": [1, 2, 3], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    begin = lambda key: cluster.client.stream("POST", PATH, json=body, headers={"authorization": f"Bearer {key}"})
    with begin("one") as revoked, begin("two") as kept:
        (first, others) = revoked.iter_lines(), kept.iter_lines()
        next(first), next(others)
        # In the new file, the line of `carol` is invalid and is ignored, and `alice` has no line.
        file.write_text("carol is no key\n" + line("bob", "two"))
        wait_for("the revocation", lambda: status("one") == 401)
        assert [status(key) for key in ("two", "three")] == [200, 401]
        last = [text for text in first if text.startswith("data: ")][-1]
        assert "no longer accepted" in last, last
        next(others)
    assert failures() == 1 and cluster.says("line 1") and cluster.says("left out")
    file.write_text("")
    wait_for("no keys", lambda: status("two") == 401)
    file.write_text(line("bob", "two"))
    wait_for("the key", lambda: status("two") == 200)
    file.unlink()
    wait_for("a refusal without a file", lambda: status("two") == 401)
    assert failures() == 2


def test_a_page_of_another_origin_is_refused(start):
    cluster = start(*SIM)
    post = lambda **headers: cluster.client.post(PATH, **asked(**headers)).status_code
    assert (post(), post(origin=cluster.url)) == (200, 200)
    assert (post(origin="https://evil.example"), post(origin="null")) == (403, 403)
    rebound = {"origin": "http://evil.example", "host": "evil.example"}
    assert post(**rebound) == 403
    with httpx.Client(base_url=cluster.url) as page:
        text = {"content-type": "text/plain", "origin": cluster.url}
        assert page.post(PATH, content=b'{"prompt": [1], "max_tokens": 1}', headers=text).status_code == 403


def test_an_open_address_without_keys_is_warned_of(tmp_path):
    (tmp_path / "keys").write_text(line("alice", "one"))
    addresses = lambda ip: ("--http", f"{ip}:{free_port()}", "--grpc", f"{ip}:{free_port()}")
    warned = {}
    for name, args in {
        "open": addresses("0.0.0.0"),
        "keys": (*addresses("0.0.0.0"), "--api-key-file", tmp_path / "keys"),
        "loopback": addresses("127.0.0.1"),
    }.items():
        process = Process("conductor", [*SIM, *args], tmp_path)
        try:
            wait_for("the start", lambda: " listening" in process.log(), seconds=60)
            wait_for("workers", lambda: process.workers(), seconds=60)
            warned[name] = "anyone there may send requests" in process.log()
        finally:
            process.destroy()
    assert warned == {"open": True, "keys": False, "loopback": False}
