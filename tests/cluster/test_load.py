"""The load generator distinguishes successful from failed requests."""

import http.server
import json
import subprocess
import threading

import pytest
from harness import BINARIES


def load(url, *args):
    """Runs the load generator. Returns (exit code, report, standard error)."""
    command = [BINARIES / "load", "--url", url, "--warmup", "0", *args]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    return done.returncode, json.loads(done.stdout)["report"], done.stderr


def test_a_served_load_is_measured(bare):
    args = ("--rate", 40, "--requests", 40, "--prompt-tokens", "1:60", "--max-tokens", 9, "--seed", 3)
    code, report, log = load(bare.url, *args)
    assert code == 0 and report["invalid"] == [], log
    assert report["served"] == 40 and report["ttft_ms"]["samples"] == 40
    assert 0 < report["ttft_ms"]["p50"] <= report["ttft_ms"]["p99"] <= report["latency_ms"]["max"]
    assert report["output_tokens_per_s"] == pytest.approx(40 * 9 / report["duration_s"])
    bare.wait_until_idle()


class EmptyStreams(http.server.BaseHTTPRequestHandler):
    """A server that answers every request with 200 and no token."""

    def do_GET(self):
        self.answer('{"data": [{"id": "empty"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer('data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')

    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


def test_streams_without_tokens_are_failures():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), EmptyStreams) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code, report, log = load(f"http://127.0.0.1:{server.server_port}", "--rate", "inf", "--requests", 5)
        server.shutdown()
    assert code == 1 and report["served"] == 0
    assert report["failures"] == [["the stream ended without a token", 5]]
    assert "5 of 5 requests failed" in log
