"""Runs each client in examples/ against the shipped model."""

import os
import subprocess
import sys

import pytest
from harness import ANSWER_S, BINARIES, REPO

MESSAGE = "What is Tutti?"


def chat_py(cluster):
    return [sys.executable, REPO / "examples/chat.py", "--url", f"{cluster.url}/v1", MESSAGE]


def generate_py(cluster):
    return [sys.executable, REPO / "examples/generate.py", "--address", cluster.grpc, MESSAGE]


def generate_rs(cluster):
    return [BINARIES / "examples/generate", "--address", f"http://{cluster.grpc}", MESSAGE]


@pytest.mark.parametrize("command", [chat_py, generate_py, generate_rs])
def test_an_example_prints_the_answer(tiny, command):
    answer = tiny.chat(messages=[{"role": "user", "content": MESSAGE}], temperature=0, max_completion_tokens=200)
    env = os.environ | {"PYTHONPATH": str(REPO / "target/stubs")}
    done = subprocess.run(command(tiny), env=env, capture_output=True, text=True, timeout=ANSWER_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == answer["choices"][0]["message"]["content"] + "\n"


@pytest.mark.parametrize("command", [chat_py, generate_py, generate_rs])
def test_an_example_explains_its_arguments(tiny, command):
    program = command(tiny)[: 1 if command is generate_rs else 2]
    env = os.environ | {"PYTHONPATH": str(REPO / "target/stubs")}
    done = subprocess.run([*program, "--help"], env=env, capture_output=True, text=True, timeout=ANSWER_S)
    assert done.returncode == 0, done.stderr
    assert ":8000" in done.stdout or ":50051" in done.stdout, "the default address"
