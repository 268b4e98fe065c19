"""tutti-bench against real servers. Tests that its counts equal the server's, and that it reports the delays of a slow
server."""

import http.server
import json
import re
import signal
import ssl
import subprocess
import threading

import httpx
import pytest
from api_keys import line
from certificates import Authority
from harness import BINARIES, wait_for

SIM = ("--workers", 1, "--device", "sim")


def bench(tmp_path, url, *args, name="report"):
    """Runs tutti-bench. Returns (exit code, report, standard output and error)."""
    file = tmp_path / f"{name}.json"
    command = [BINARIES / "tutti-bench", "--url", url, "--json", file, *args]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    text = file.read_text() if file.exists() else ""
    return done.returncode, json.loads(text) if text else None, done.stdout + done.stderr


@pytest.fixture(scope="module")
def sim(shared):
    """A worker whose steps take two milliseconds."""
    return shared(*SIM, env={"TUTTI_SIM__FIXED_US": "2000"})


def counted(server):
    metrics = server.metrics()
    names = ("generations_total", "prompt_tokens_total", "generated_tokens_total")
    return [metrics.get(f"tutti_router_{name}", 0) for name in names]


@pytest.mark.parametrize("api", ["completions", "chat", "grpc"])
@pytest.mark.parametrize("load", [("--concurrency", 5), ("--rate", 150)])
def test_counts_are_those_of_the_server(sim, tmp_path, api, load):
    page = tmp_path / "report.html"
    lengths = ("--input-tokens", "20:40", "--output-tokens", "normal:8:3:16", "--shared-prefix", 10)
    url = f"http://{sim.grpc}" if api == "grpc" else sim.url
    before = counted(sim)
    code, report, log = bench(
        tmp_path, url, "--api", api, *load, *lengths, "--requests", 40, "--warm-up", 0, "--html", page, "--slo-ttft", "1h"
    )
    assert code == 0, log
    requests, prompts, outputs = (after - old for after, old in zip(counted(sim), before))
    assert report["requests"] == {"warm_up": 0, "sent": 40, "served": 40, "failed": 0, "abandoned": 0}
    assert requests == 40
    assert report["tokens"] == {"prompt": prompts, "output": outputs}
    if api == "completions":
        assert 40 * 20 <= prompts <= 40 * 40
    latency = report["latency"]
    assert latency["ttft_ms"]["count"] == latency["e2e_ms"]["count"] == 40
    for figures in latency.values():
        assert sum(count for _, _, count in figures["buckets"]) == figures["count"]
        assert figures["min"] <= figures["p50"] <= figures["p99"] <= figures["max"]
    # A step takes two milliseconds, and each token of a request needs one step.
    assert latency["e2e_ms"]["mean"] * 40 >= outputs * 2 and latency["e2e_ms"]["min"] >= 2
    assert report["goodput"]["requests"] == 40 and report["goodput"]["share"] == 1
    assert sum(interval["served"] for interval in report["timeline"]) == 40
    assert sum(interval["output_tokens"] for interval in report["timeline"]) == outputs
    html = page.read_text()
    assert html.count("<svg") == 8 and not re.search(r"src=|href=|url\(|@import|<script", html)
    sim.wait_until_idle()


def test_latency_counts_from_the_time_at_which_a_request_was_due(start, tmp_path):
    """A request takes at least 50 ms, and one arrives every 25 ms. So each request waits 25 ms longer than the previous
    one."""
    server = start(*SIM, env={"TUTTI_SIM__FIXED_US": "50000"})
    load = ("--rate", 40, "--arrivals", "constant", "--max-in-flight", 1, "--requests", 20)
    code, report, log = bench(tmp_path, server.url, *load, "--input-tokens", 4, "--output-tokens", 1, "--slo-ttft", "300ms")
    assert code == 0, log
    for name in ("ttft_ms", "e2e_ms"):
        figures = report["latency"][name]
        assert figures["min"] >= 50 and figures["p50"] >= 10 * 25 and figures["max"] >= 20 * 25, figures
    assert report["latency"]["send_delay_ms"]["max"] >= 19 * 25
    # The twelfth request ends at least 300 ms after it was due.
    assert report["goodput"]["requests"] <= 11
    assert "--max-in-flight held them back" in log


def test_a_workload_file_is_replayed(sim, tmp_path):
    file = tmp_path / "workload.jsonl"
    requests = [
        {"prompt": "once upon a time", "max_tokens": 5, "arrival_s": 0},
        {"prompt": [1, 2, 3], "max_tokens": 7, "arrival_s": 0.4, "body": {"temperature": 0}},
    ]
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    code, report, log = bench(tmp_path, sim.url, "--workload", file, "--replay", "--warm-up", 0)
    assert code == 0 and report["tokens"]["output"] == 12, log
    assert report["duration_s"] >= 0.4
    file.write_text(json.dumps(requests[0]) + '\n{"prompt": "a", "max_tokens": -1}\n')
    code, report, log = bench(tmp_path, sim.url, "--workload", file, name="refused")
    assert code == 64 and report is None, log
    assert f"{file} line 2: max_tokens: must be an integer from 1 to 4294967295, and is -1" in log


def test_an_interrupted_run_reports_what_was_done(sim, tmp_path):
    file = tmp_path / "report.json"
    args = ("--url", sim.url, "--concurrency", 4, "--duration", "10m", "--warm-up", 0, "--json", file)
    before = counted(sim)[0]
    command = [str(part) for part in (BINARIES / "tutti-bench", *args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        wait_for("ten requests", lambda: counted(sim)[0] >= before + 10)
        child.send_signal(signal.SIGINT)
        text, _ = child.communicate(timeout=30)
    report = json.loads(file.read_text())
    requests = report["requests"]
    assert child.returncode == 130 and report["interrupted"], text
    assert requests["served"] >= 9 and requests["failed"] == 0 and requests["abandoned"] <= 4
    assert requests["sent"] == requests["served"] + requests["abandoned"]
    assert "interrupted with" in text
    sim.wait_until_idle()


def test_keys_and_certificates_of_authorities_are_used(start, tmp_path):
    authority, keys, key = Authority(tmp_path), tmp_path / "keys", tmp_path / "key"
    keys.write_text(line("alice", "one"))
    key.write_text("one\n")
    server = start(*SIM, *authority.public(), "--api-key-file", keys, ready=False)
    url, trusted = f"https://127.0.0.1:{server.http_port}", ssl.create_default_context(cafile=authority.ca)

    def ready():
        try:
            return httpx.get(f"{url}/ready", verify=trusted).status_code == 200
        except httpx.TransportError:
            return False

    wait_for("ready", ready)
    code, _, log = bench(tmp_path, url, "--ca", authority.ca)
    assert code == 70 and "/v1/models: status 401" in log
    code, _, log = bench(tmp_path, url, "--api-key-file", key)
    assert code == 70 and "certificate" in log
    code, report, log = bench(tmp_path, url, "--ca", authority.ca, "--api-key-file", key, "--requests", 9)
    assert code == 0 and report["requests"]["served"] == 9, log
    assert "Bearer" not in json.dumps(report)


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


def test_streams_without_tokens_are_failures(tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), EmptyStreams) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        code, report, log = bench(tmp_path, url, "--rate", "inf", "--requests", 5)
        server.shutdown()
    assert code == 1 and report["requests"]["served"] == 0
    assert report["failures"] == [{"kind": "no token", "count": 5, "example": "the stream ended without a token"}]
    assert "5 of 5 requests failed" in log
    code, _, log = bench(tmp_path, url, "--model", "gone", "--requests", 2, "--warm-up", 0)
    assert code == 1 and "failed: 2 × connect: " in log
