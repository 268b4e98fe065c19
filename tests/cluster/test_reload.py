"""Settings that change without a restart: at SIGHUP, and when the file of --config changes."""

import json
import os
import signal
import socket
import threading
import time

import httpx
import pytest
from harness import wait_for
from launcher import launcher
from simulated import sampled
from streams import Streams

PATH = "/v1/completions"
SIM = ("--workers", 1, "--device", "sim")
# Steps take 5 ms, and only one request runs at a time: a stream holds the only slot, and others wait for their first
# token.
SLOW = ("--max-running-requests", 1)
ENV = {"TUTTI_SIM__FIXED_US": "5000"}
LONG = dict(prompt=[1, 2, 3], ignore_eos=True, max_tokens=4000)
REREAD, REFUSED = "read the settings again", "the settings stay as they were"


def toml(settings):
    """Returns settings as TOML. A dict becomes a table."""
    top = [f"{key} = {json.dumps(value)}" for key, value in settings.items() if not isinstance(value, dict)]
    tables = [f"[{key}]\n" + toml(value) for key, value in settings.items() if isinstance(value, dict)]
    return "\n".join([*top, *tables, ""])


class Reloaded:
    """A server, and the file with its settings."""

    def __init__(self, server, file):
        self.server, self.file, self.text = server, file, file.read_text()

    def write(self, text):
        """Replaces the file. Returns a function that returns the log from now on."""
        new = self.file.with_suffix(".new")
        new.write_text(text)
        begin = len(self.server.log())
        os.replace(new, self.file)
        return lambda: self.server.log()[begin:]

    def change(self, said, **settings):
        """Changes these settings, and resets all other settings to their values at the start. Returns a function that
        returns the log from now on."""
        log = self.write(self.text + toml(settings))
        self.server.signal(signal.SIGHUP)
        wait_for(f"{said} in the log", lambda: said in log())
        return log

    def connect(self, sent=b""):
        connection = socket.create_connection(("127.0.0.1", self.server.http_port))
        connection.settimeout(30)
        connection.sendall(sent)
        return connection

    def closed(self, reason):
        label = f'tutti_connections_closed_total{{listener="http",reason="{reason}"}} '
        (line,) = (line for line in self.server.client.get("/metrics").text.splitlines() if line.startswith(label))
        return int(line.removeprefix(label))

    def config_hash(self):
        return [line for line in self.server.client.get("/metrics").text.splitlines() if line.startswith("tutti_config_info")]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """A conductor with an embedded router, and a router in front of another conductor."""
    directory = tmp_path_factory.mktemp("reload")
    start, finish = launcher(directory)
    files = {name: directory / f"{name}.toml" for name in ("conductor", "router")}
    for file in files.values():
        file.write_text('log_format = "text"\n')
    config = lambda name: ("--config", files[name])
    behind = start(*SIM, *SLOW, "--no-router", env=ENV, ready=False)
    conductor = start(*SIM, *SLOW, *config("conductor"), env=ENV, ready=False)
    router = start("--conductor", f"http://{behind.cluster}", *config("router"), name="router")
    conductor.wait_until_ready()
    yield {name: Reloaded(server, files[name]) for name, server in (("conductor", conductor), ("router", router))}
    finish()


@pytest.fixture(params=["conductor", "router"])
def reloaded(request, servers):
    return servers[request.param]


def refused(server, body):
    response = server.post(PATH, body)
    return response.status_code, response.text


def test_the_log_filter_and_an_unsignalled_change_of_the_file(reloaded):
    before = reloaded.config_hash()
    log = reloaded.write(reloaded.text + 'log = "debug"\n')
    wait_for("the new filter", lambda: "log info -> debug" in log())
    wait_for("a line of the new filter", lambda: " DEBUG " in log())
    assert reloaded.config_hash() != before and len(before) == 1
    assert time.time() - reloaded.server.metrics()["tutti_config_loaded_seconds"] < 30
    log = reloaded.change("log debug -> info")
    said = log().split("log debug -> info")[0].count("\n")
    assert reloaded.server.complete(prompt=[1], max_tokens=2)["choices"]
    assert " DEBUG " not in "\n".join(log().splitlines()[said:])
    assert reloaded.config_hash() == before


def test_the_queue_while_a_stream_runs(reloaded):
    """SIGHUP to the whole process group, workers included, must lose no token of a stream."""
    server = reloaded.server
    running = Streams(server, PATH, [dict(prompt=[1, 2, 3], seed=7, temperature=1, max_tokens=800, ignore_eos=True, return_token_ids=True)])
    running.wait_for_tokens(1)
    with httpx.Client(base_url=server.url, timeout=120) as client:
        # This request waits for the end of the stream and gets no token before.
        waiting = threading.Thread(target=lambda: client.post(PATH, json=dict(model=server.model, prompt=[1], max_tokens=1)))
        waiting.start()
        wait_for("a choice in the queue", lambda: server.metrics()["tutti_router_queued_choices"] == 1)
        reloaded.change("router.max_queued_choices not set -> 1", router={"max_queued_choices": 1})
        status, text = refused(server, dict(prompt=[1], max_tokens=1))
        assert status == 503 and "the limits are 1 and 8388608" in text, text
        reloaded.change("router.max_queued_tokens 8388608 -> 3", router={"max_queued_tokens": 3})
        status, text = refused(server, dict(prompt=[1, 2, 3], max_tokens=1))
        assert status == 503 and "the limits are 1024 and 3" in text, text
        for pid in server.processes():
            os.kill(pid, signal.SIGHUP)
        os.killpg(server.pid, signal.SIGHUP)
        waiting.join()
    (answer,) = running.results()
    assert answer["choices"][0]["token_ids"] == sampled([1, 2, 3], 7, 1, 800)
    assert server.metrics().get("tutti_worker_restarts_total", 0) == 0


def test_limits_of_answers(reloaded):
    server = reloaded.server
    prompt, output = dict(prompt=[1] * 10, max_tokens=1, prompt_logprobs=1), dict(prompt=[1], max_tokens=10, logprobs=1)
    assert [refused(server, body)[0] for body in (prompt, output)] == [200, 200]
    reloaded.change("router.max_prompt_logprobs 1048576 -> 19", router={"max_prompt_logprobs": 19})
    status, text = refused(server, prompt)
    assert status == 400 and "20" in text and "19" in text, text
    assert refused(server, output)[0] == 200
    reloaded.change("router.max_output_logprobs 4194304 -> 19", router={"max_output_logprobs": 19})
    status, text = refused(server, output)
    assert status == 400 and "20" in text and "19" in text, text
    assert refused(server, prompt)[0] == 200


def test_the_pace_of_bodies(reloaded):
    reloaded.change("router.upload_timeout_s 120 -> 1", router={"upload_timeout_s": 1, "upload_bytes_per_second": 77})
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    with reloaded.connect(head) as slow:
        answer = slow.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408"), answer
    assert b"a body needs 77 bytes per second after 10s, and may take 1s" in answer, answer


def test_limits_of_connections(servers):
    """New limits also apply to connections that were open before the change."""
    servers = servers.values()
    idle, head = [one.connect() for one in servers], [one.connect(b"GET /hea") for one in servers]
    seen = [(one.closed("head_timeout"), one.closed("idle_timeout")) for one in servers]
    for one in servers:
        one.change("connections.header_timeout_ms 15000 -> 300", connections={"header_timeout_ms": 300})
    for one, stuck, unused, (heads, _) in zip(servers, head, idle, seen):
        assert stuck.recv(1) == b""
        assert one.closed("head_timeout") == heads + 1
        unused.setblocking(False)
        with pytest.raises(BlockingIOError):
            unused.recv(1)
        unused.settimeout(30)
    for one in servers:
        one.change("connections.idle_timeout_ms 120000 -> 300", connections={"idle_timeout_ms": 300})
    for one, unused, (_, idles) in zip(servers, idle, seen):
        assert unused.recv(1) == b""
        assert one.closed("idle_timeout") > idles
    for one in servers:
        for key, default in (("max_open", 8192), ("max_per_peer", 4096)):
            one.change(f"connections.{key} {default} -> 3", connections={key: 3})
            # The server closes the two oldest connections to make room, even though others are open.
            held = [one.connect() for _ in range(5)]
            assert [connection.recv(1) for connection in held[:2]] == [b"", b""]
            for connection in held:
                connection.close()
            one.change(f"connections.{key} 3 -> {default}")
    for connection in (*idle, *head):
        connection.close()


INVALID = {
    "workers_ = 1": "workers_",
    "lame_duck = 601": "lame_duck: is 601, the limit is 600",
    'log = "tutti=loud"': "log: ",
    "log =": ".toml: TOML parse error",
}


def test_an_invalid_file_changes_nothing(servers):
    begun = {name: (one.config_hash(), one.server.metrics()["tutti_config_reload_failures_total"]) for name, one in servers.items()}
    for text, said in INVALID.items():
        logs = {name: one.write(f"{one.text}drain_timeout = 9\n{text}\n") for name, one in servers.items()}
        # The last file is not followed by a signal. With a signal, a file may be read and refused twice.
        unsignalled = text == list(INVALID)[-1]
        for name, one in servers.items():
            unsignalled or one.server.signal(signal.SIGHUP)
            wait_for("the refusal in the log", lambda: REFUSED in logs[name]())
            lines = [line for line in logs[name]().splitlines() if line]
            assert all("ERROR" in line and REFUSED in line and said in line for line in lines), lines
            assert not unsignalled or len(lines) == 1, lines
    for name, one in servers.items():
        config_hash, failures = begun[name]
        assert one.server.metrics()["tutti_config_reload_failures_total"] >= failures + len(INVALID)
        assert one.config_hash() == config_hash
        assert one.server.complete(prompt=[1], max_tokens=2)["choices"]
        # The next valid file equals the settings in force.
        log = one.change(REREAD)
        assert "none has changed live" in log() and "drain_timeout" not in log()


def test_a_setting_that_needs_a_restart_is_named_and_keeps_its_value(reloaded):
    log = reloaded.change("keep their values", drain_timeout=31, router={"max_body_bytes": 1000}, connections={"max_streams": 7})
    (warning,) = {line.split("WARN")[1] for line in log().splitlines() if "WARN" in line}
    assert "connections.max_streams, router.max_body_bytes" in warning and "drain_timeout" not in warning, warning
    assert "drain_timeout 30 -> 31" in log()
    assert refused(reloaded.server, dict(prompt=[1] * 1000, max_tokens=1))[0] == 200
    reloaded.change("drain_timeout 31 -> 30")


def test_a_hangup_does_not_end_a_process_that_starts(start, tmp_path):
    """The handler must be installed first: before the settings are read, and before ports are bound."""

    def is_caught(pid):
        with open(f"/proc/{pid}/status") as status:
            (mask,) = (line.split()[1] for line in status if line.startswith("SigCgt"))
        return int(mask, 16) & 1 << signal.SIGHUP - 1

    conductor = start(*SIM, ready=False)
    router = start("--conductor", f"http://{conductor.cluster}", name="router", ready=False)
    for server in (conductor, router):
        wait_for("a handler of SIGHUP", lambda: is_caught(server.pid), every=0)
        for _ in range(20):
            server.signal(signal.SIGHUP)
    for server in (conductor, router):
        server.wait_until_ready()
        wait_for("an answer to SIGHUP", lambda: server.signal(signal.SIGHUP) or REREAD in server.log())
    assert all(is_caught(pid) for pid in conductor.processes())


def test_the_time_to_drain(servers):
    """Both servers start without a lame-duck time and with a drain timeout of 30 seconds. This test comes last, because
    it ends the servers."""
    streams = {}
    for name, reloaded in servers.items():
        reloaded.change("lame_duck not set -> 1", lame_duck=1, drain_timeout=1)
        stream = reloaded.server.stream(PATH, **LONG)
        next(stream)
        streams[name] = stream
    began = time.monotonic()
    for reloaded in servers.values():
        reloaded.server.signal(signal.SIGTERM)
    for reloaded in servers.values():
        server = reloaded.server
        wait_for("/ready says no", lambda: server.client.get("/ready").status_code == 503)
        assert server.post("/tokenize", {"prompt": "a"}).status_code == 200
    for name, reloaded in servers.items():
        reloaded.server.wait()
        assert 2 <= time.monotonic() - began < 15
        said = "ending requests that have not finished" if name == "conductor" else "ending with requests unfinished"
        (line,) = (line for line in reloaded.server.log().splitlines() if said in line)
        assert "after_s=1" in line, line
        streams[name].close()
