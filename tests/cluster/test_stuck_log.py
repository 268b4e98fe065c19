"""Tests that a log collector that stops reading costs only log lines."""

import os
import signal
import subprocess

import httpx
from harness import BINARIES, MARK, free_port, processes_marked, wait_for

WORKER_LOST = 'tutti_worker_log_lines_lost{worker="0"}'
# The most detailed log, so that the pipe is soon full.
LOUD = ("--log", "trace", "--log-format", "json")


def test_a_reader_of_stderr_that_stops_holds_up_no_request_and_no_signal(tmp_path):
    http, grpc = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [BINARIES / "conductor", "--device", "sim", "--workers", "1", "--http", http, "--grpc", grpc, *LOUD]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TUTTI_", "HF_", "OTEL_"))}
    mark = os.urandom(8).hex()
    # Nobody reads this pipe, so it is full after 64 KiB.
    conductor = subprocess.Popen(command, env=clean | {MARK: mark}, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://{http}", timeout=30) as client:

            def ready():
                try:
                    return client.get("/ready").status_code == 200
                except httpx.TransportError:
                    return False

            wait_for("ready", ready, 90)
            model = client.get("/v1/models").json()["data"][0]["id"]

            def lost():
                body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True}
                assert client.post("/v1/completions", json=body).status_code == 200
                assert client.get("/health").status_code == 200
                text = client.get("/metrics").text
                # The spawned worker writes to the same pipe through its own queue, and counts its own lost lines.
                return all(f"{name} 0" not in text for name in ("tutti_log_lines_lost_total", WORKER_LOST))

            wait_for("lost lines", lost, 90)
        conductor.send_signal(signal.SIGTERM)
        assert conductor.wait(30) == 0
        wait_for("every process gone", lambda: not processes_marked(mark))
    finally:
        for pid in processes_marked(mark):
            os.kill(pid, signal.SIGKILL)
        conductor.kill()
        conductor.wait()
        conductor.stderr.close()
