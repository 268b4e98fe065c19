"""Tests eight workers on eight GPUs. Each worker uses its own GPU, runs steps, and gives the shipped model's answers.
Runs under emulated-gpu/run."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import REPO, wait_for

ORACLE = json.loads((REPO / "tests/tutti-tiny/oracle.json").read_text())


@pytest.mark.skipif("EMULATED_GPUS" not in os.environ, reason="asks for eight GPUs")
def test_eight_workers_on_eight_gpus_serve_the_shipped_model(start):
    cluster = start("--workers", 8, "--device", "cuda", env={"EMULATED_GPUS": "8"})
    used = re.findall(r"worker=(\d).* on cuda, GPU (\d)", cluster.log())
    assert sorted(used) == [(str(rank), str(rank)) for rank in range(8)], cluster.explain("not a GPU each")

    def ask(item):
        if "messages" in item:
            choice = cluster.chat(messages=item["messages"], temperature=0, max_completion_tokens=200)["choices"][0]
            assert choice["message"]["content"] == item["answer"]
        else:
            choice = cluster.complete(prompt=item["prompt"], temperature=0, max_tokens=200)["choices"][0]
            assert choice["text"] == item["completion"]

    def steps():
        return re.findall(r'^tutti_worker_steps\{worker="(\d)"\} [1-9]', cluster.client.get("/metrics").text, re.M)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, ORACLE * 2))
    wait_for("steps of all workers", lambda: sorted(steps()) == [str(rank) for rank in range(8)])
    cluster.wait_until_idle()
