"""Real clusters for tests: start the built executables on free ports, talk to them, and see that nothing of them stays."""

import itertools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import time
import uuid

import httpx

REPO = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("TUTTI_TEST_BINARIES", REPO / "target/debug"))
GOLDENS = REPO / "target/goldens"
MARK = "CLUSTER_TEST"  # an environment variable that every process of a cluster inherits

# Deadlines are for machines under load: what is being waited for normally takes a tenth of them or less.
START_S = 90
STOP_S = 30
ANSWER_S = 120


def wait_for(what, probe, seconds=STOP_S, every=0.02):
    """Polls until `probe` returns something true, and returns that; fails by name when the deadline passes."""
    deadline = time.monotonic() + seconds
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(every)


def free_port():
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def processes_marked(mark):
    """{pid: name} of the live processes that inherited this mark, whoever their parent is now."""
    wanted, found = f"{MARK}={mark}".encode(), {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                argv = (entry / "cmdline").read_bytes().split(b"\0")
                # No command line: it has exited and waits to be reaped.
                if argv[0]:
                    found[int(entry.name)] = os.path.basename(argv[0].decode())
        except OSError:
            continue  # it ended while we looked
    return found


# What each instruction path of the CPU needs beyond the one before it, as /proc/cpuinfo spells it.
CPU_PATHS = {
    "portable": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512-vnni": {"avx512_vnni"},
    "avx512-bf16": {"avx512_bf16"},
}


def cpu_paths():
    """The instruction paths that this machine has, the plainest first."""
    flags = re.search(r"^flags\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(flags[1].split()) if flags else set()
    return list(itertools.takewhile(lambda path: CPU_PATHS[path] <= flags, CPU_PATHS))


class Process:
    """One of our executables, its log, and whatever it spawns."""

    def __init__(self, name, args, log_dir, env=None, under=()):
        """`under` is a command that runs the executable in a place of its own."""
        self.name, self.args, self.mark = name, [str(a) for a in args], uuid.uuid4().hex
        self.log_path = pathlib.Path(log_dir) / f"{name}-{self.mark[:8]}.log"
        # No setting of the developer's own leaks in.
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("TUTTI_", "HF_"))}
        self.log_file = self.log_path.open("wb")
        self.child = subprocess.Popen(
            [*under, str(BINARIES / name), *self.args],
            env=clean | {MARK: self.mark} | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=self.log_file,
            stderr=self.log_file,
            start_new_session=True,
        )
        self.pid = self.child.pid

    def log(self):
        return self.log_path.read_text(errors="replace")

    def explain(self, problem):
        tail = "\n".join(self.log().splitlines()[-40:])
        return f"{self.name} {' '.join(self.args)}: {problem}\n--- its log ends:\n{tail}"

    def processes(self):
        """{pid: name} of this process and all it spawned."""
        return processes_marked(self.mark)

    def workers(self):
        return sorted(pid for pid, name in self.processes().items() if name == "worker")

    def workers_by_rank(self):
        """{rank: pid} of the workers, by their command lines."""
        ranks = {}
        for pid in self.workers():
            try:
                argv = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it ended while we looked
            if b"--rank" in argv:
                ranks[int(argv[argv.index(b"--rank") + 1])] = pid
        return ranks

    def signal(self, number):
        self.child.send_signal(number)

    def wait(self, seconds=STOP_S):
        """Its exit code; fails if it is still there after the deadline."""
        try:
            return self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.explain(f"still running after {seconds} s")) from None

    def wait_until_all_gone(self, seconds=STOP_S):
        try:
            wait_for("every process gone", lambda: not self.processes(), seconds)
        except AssertionError:
            raise AssertionError(self.explain(f"left behind: {self.processes()}")) from None

    def stop(self):
        """Ctrl-C: it must exit with 0 and leave nothing. Whatever happens, nothing is left afterwards."""
        try:
            if self.child.poll() is None:
                self.signal(signal.SIGINT)
            code = self.wait()
            assert code == 0, self.explain(f"exit code {code}, expected 0")
            self.wait_until_all_gone()
        finally:
            self.destroy()

    def destroy(self):
        """For teardown after a failure: kills all of it."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.child.wait()
        self.log_file.close()


class Server(Process):
    """A conductor or a router with an HTTP and a gRPC address of its own."""

    def __init__(self, name, args, log_dir, env=None):
        self.http_port = self.grpc_port = free_port()
        while self.grpc_port == self.http_port:
            self.grpc_port = free_port()
        addresses = ["--http", f"127.0.0.1:{self.http_port}", "--grpc", f"127.0.0.1:{self.grpc_port}"]
        super().__init__(name, [*args, *addresses], log_dir, env)
        self.url = f"http://127.0.0.1:{self.http_port}"
        self.grpc = f"127.0.0.1:{self.grpc_port}"
        self.client = httpx.Client(base_url=self.url, timeout=ANSWER_S)
        self._model = None

    def destroy(self):
        self.client.close()
        super().destroy()

    def wait_until_ready(self):
        def ready():
            if self.child.poll() is not None:
                raise AssertionError(self.explain(f"exited with {self.child.returncode} before it was ready"))
            try:
                return self.client.get("/ready").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_for("ready", ready, START_S)
        except AssertionError as problem:
            raise AssertionError(self.explain(problem)) from None
        return self

    @property
    def model(self):
        """The served model's name, as /v1/models gives it."""
        if self._model is None:
            self._model = self.client.get("/v1/models").json()["data"][0]["id"]
        return self._model

    def post(self, path, body):
        """The response to a JSON body, whatever its status."""
        return self.client.post(path, json={"model": self.model} | body)

    def complete(self, **body):
        """The answer of /v1/completions; any other status than 200 is a failure."""
        return self._answer("/v1/completions", body)

    def chat(self, **body):
        """The answer of /v1/chat/completions."""
        return self._answer("/v1/chat/completions", body)

    def _answer(self, path, body):
        response = self.post(path, body)
        assert response.status_code == 200, self.explain(f"{path} answered {response.status_code}: {response.text}")
        return response.json()

    def stream(self, path, **body):
        """The JSON events of a streamed answer; the stream must end with [DONE]."""
        body = {"model": self.model, "stream": True} | body
        with self.client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise AssertionError(self.explain(f"{path} answered {response.status_code}: {response.read()}"))
            yield from events(response.iter_lines())

    def metrics(self):
        """{name: sum over all label sets} of what /metrics shows."""
        totals = {}
        for line in self.client.get("/metrics").text.splitlines():
            if match := re.fullmatch(r"(\w+)(?:\{.*\})? (\S+)(?: \S+)?", line):
                totals[match[1]] = totals.get(match[1], 0.0) + float(match[2])
        return totals

    def wait_until_idle(self):
        """Until no KV page is in use and no request is known; fails with what is left."""
        left = {}

        def idle():
            nonlocal left
            seen = self.metrics()
            pages = {k: v for k, v in seen.items() if re.search(r"kv_pages_used$", k)}
            requests = {k: v for k, v in seen.items() if re.search(r"requests_(in_flight|running|waiting)$", k)}
            assert pages and requests, f"/metrics lacks KV pages or requests: {sorted(seen)}"
            left = {k: v for k, v in (pages | requests).items() if v}
            return not left

        try:
            wait_for("idle", idle)
        except AssertionError as problem:
            raise AssertionError(self.explain(f"{problem}; in use: {left}")) from None


def events(lines):
    """Server-sent events as JSON, up to and without [DONE], which must come."""
    for line in lines:
        if line.startswith("data: "):
            if line == "data: [DONE]":
                return
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def run_to_exit(name, args, log_dir, env=None, seconds=START_S):
    """Runs an executable that should refuse to start: (exit code, log)."""
    process = Process(name, args, log_dir, env)
    try:
        code = process.wait(seconds)
        process.wait_until_all_gone()
        return code, process.log()
    finally:
        process.destroy()
