"""Vercel's AI SDK, on Node."""

import json
import os
import shutil
import subprocess

import pytest
from agent_scripts import ADA, LOOP, MODEL, PERSON, TEXT
from harness import ANSWER_S, REPO

MODULES = REPO / "target/agents/node"
CALLS = [["get_weather", {"city": "Paris"}], ["get_weather", {"city": "Oslo"}]]


@pytest.mark.skipif(not shutil.which("node"), reason="node is missing")
def test_loops_of_tools_and_objects(url):
    # Node finds packages from the folder that a program from standard input runs in.
    program = (REPO / "tests/frameworks/ai_sdk.mjs").read_text()
    env = os.environ | {"BASE_URL": url, "MODEL": MODEL, "LOOP": LOOP, "PERSON": PERSON}
    ran = subprocess.run(
        ["node", "--input-type=module"],
        input=program,
        env=env,
        cwd=MODULES,
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
    )
    assert ran.returncode == 0, ran.stderr
    got = json.loads(ran.stdout)
    assert got["whole"] == {"text": TEXT, "calls": CALLS, "steps": 3, "finish": "stop"}
    assert got["streamed"]["calls"] == CALLS and got["streamed"]["text"].endswith(TEXT)
    assert got["streamed"]["finish"] == "stop" and got["streamed"]["parts"] > 1
    assert got["object"] == ADA
