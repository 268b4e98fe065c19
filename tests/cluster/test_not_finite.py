"""Rows with numbers that are not finite. Tests that their requests fail, and no others."""

import itertools

from harness import wait_for
from not_finite import ASK, POISON


def test_a_poisonous_request_fails_alone_and_a_broken_device_is_still_noticed(start, poisoned):
    cluster = start("--workers", 1, "--model", poisoned, "--skip-tokenizer-init")
    long = ASK | dict(max_tokens=1500)
    right = cluster.complete(**long)["choices"][0]["token_ids"]
    assert POISON not in right
    (worker,) = cluster.workers()
    streams = [cluster.stream("/v1/completions", **long) for _ in range(3)]
    streams = [itertools.chain([next(stream)], stream) for stream in streams]
    for _ in range(4):
        answer = cluster.post("/v1/completions", ASK | dict(prompt=[5, POISON, 6], max_tokens=4))
        assert answer.status_code == 500, answer.text
    for stream in streams:
        assert [token for event in stream for choice in event["choices"] for token in choice["token_ids"]] == right
    assert cluster.workers() == [worker] and cluster.metrics().get("tutti_request_replays_total", 0) == 0
    # If there are many such failures and no success between them, the device or the weights are broken, so the worker
    # is restarted.
    for _ in range(8):
        assert cluster.post("/v1/completions", ASK | dict(prompt=[POISON], max_tokens=4)).status_code == 500
    wait_for("another worker", lambda: worker not in cluster.workers() and cluster.metrics()["tutti_workers_ready"] == 1)
    assert cluster.complete(**long)["choices"][0]["token_ids"] == right
