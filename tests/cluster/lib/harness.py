"""Real clusters for tests. Starts the built executables on free ports, communicates with them, and checks that no
process is left."""

import fcntl
import itertools
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import time
import uuid

import httpx

REPO = pathlib.Path(__file__).resolve().parents[3]
BINARIES = pathlib.Path(os.environ.get("TUTTI_TEST_BINARIES", REPO / "target/debug"))
GOLDENS = REPO / "target/goldens"
MARK = "CLUSTER_TEST"  # an environment variable that every process of a cluster inherits

CLUSTER_TOKEN = "the routers' own secret"

# Deadlines in seconds, chosen for machines under load. A wait normally takes a tenth of its deadline or less.
START_S = 90
STOP_S = 30
ANSWER_S = 120


def wait_for(what, probe, seconds=STOP_S, every=0.02):
    """Polls until `probe` returns a true value, and returns it. Fails with the name `what` after the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(every)


# Ports below the range that the system gives to outgoing connections. A connection of a test that runs beside could
# take a port of that range between its choice and the server's start, or while a server ends and starts again.
PORTS = 10000


def free_port():
    """A free TCP port that the system gives to no outgoing connection and no other test is given soon.

    The tests of this machine take ports in turn: a file counts them, so that two of them that start at once never share
    one."""
    first, _ = map(int, pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    with open(os.path.join(tempfile.gettempdir(), "tutti-test-ports"), "a+") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        given = int(counter.read() or 0)
        for given in range(given + 1, given + PORTS):
            with socket.socket() as s:
                try:
                    s.bind(("127.0.0.1", first - PORTS + given % PORTS))
                except OSError:
                    continue
                counter.truncate(0)
                counter.write(str(given))
                return s.getsockname()[1]
    raise AssertionError(f"no port from {first - PORTS} to {first} is free")


def processes_marked(mark):
    """Returns {pid: name} of the live processes that inherited this mark, whatever their current parent is."""
    wanted, found = f"{MARK}={mark}".encode(), {}
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                argv = (entry / "cmdline").read_bytes().split(b"\0")
                # A process without a command line has exited and waits to be reaped.
                if argv[0]:
                    found[int(entry.name)] = os.path.basename(argv[0].decode())
        except OSError:
            continue  # it ended while we looked
    return found


# The CPU flags that each instruction path needs in addition to the path before it, as spelt in /proc/cpuinfo.
CPU_PATHS = {
    "portable": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512-vnni": {"avx512_vnni"},
    "avx512-bf16": {"avx512_bf16"},
}


def cpu_paths():
    """The instruction paths that this machine supports, the simplest first."""
    flags = re.search(r"^flags\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(flags[1].split()) if flags else set()
    return list(itertools.takewhile(lambda path: CPU_PATHS[path] <= flags, CPU_PATHS))


def machine():
    """Returns a description of this machine, for the JSON of figures."""
    found = re.search(r"^model name\s*:\s*(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {"cpu": found[1].strip() if found else "unknown", "cores": os.cpu_count()}


class Process:
    """One of our executables, its log, and the processes that it spawns."""

    def __init__(self, name, args, log_dir, env=None, under=(), log_reader=None):
        """`under` is a command that runs the executable, such as in a network namespace. `log_reader` reads the log
        from a pipe, and copies it to the file."""
        self.name, self.args, self.mark = name, [str(a) for a in args], uuid.uuid4().hex
        self.log_path = pathlib.Path(log_dir) / f"{name}-{self.mark[:8]}.log"
        # The developer's own settings must not reach the process.
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("TUTTI_", "HF_", "OTEL_"))}
        self.log_file, self.log_reader = self.log_path.open("wb"), log_reader
        output = log_reader.pipe_into(self.log_file) if log_reader else self.log_file
        self.child = subprocess.Popen(
            [*under, str(BINARIES / name), *self.args],
            env=clean | {MARK: self.mark} | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        if log_reader:
            log_reader.handed_over()
        self.pid = self.child.pid

    def log(self):
        return self.log_path.read_text(errors="replace")

    def says(self, text, times=1):
        """Waits until the log has a text. A thread of its own writes the log, so a line may come after its cause."""
        return wait_for(f"{text!r} in the log", lambda: self.log().count(text) >= times)

    def explain(self, problem):
        tail = "\n".join(self.log().splitlines()[-40:])
        return f"{self.name} {' '.join(self.args)}: {problem}\n--- its log ends:\n{tail}"

    def processes(self):
        """Returns {pid: name} of this process and of all processes that it spawned."""
        return processes_marked(self.mark)

    def workers(self):
        return sorted(pid for pid, name in self.processes().items() if name == "worker")

    def workers_by_rank(self):
        """Returns {rank: pid} of the workers, according to their command lines."""
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
        """Returns the exit code of the process. Fails if the process still runs after the deadline."""
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
        """Sends Ctrl-C. The process must exit with 0 and leave no process. Processes that are left are killed in any
        case. """
        try:
            if self.child.poll() is None:
                self.signal(signal.SIGINT)
            code = self.wait()
            assert code == 0, self.explain(f"exit code {code}, expected 0")
            self.wait_until_all_gone()
        finally:
            self.destroy()

    def destroy(self):
        """Kills all processes, for teardown after a failure."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.child.wait()
        if self.log_reader:
            self.log_reader.finish()
        self.log_file.close()


class Server(Process):
    """A conductor or a router with its own HTTP and gRPC address."""

    def __init__(self, name, args, log_dir, env=None, under=(), host="127.0.0.1", log_reader=None):
        """`under` is a command that runs the executable, on the host whose address is `host`."""
        ports = set()
        while len(ports) < 3:
            ports.add(free_port())
        self.http_port, self.grpc_port, cluster_port = ports
        addresses = ["--http", f"{host}:{self.http_port}", "--grpc", f"{host}:{self.grpc_port}"]
        # The address for routers and operators, and the secret that they must send.
        args, self.cluster, token = list(args), f"127.0.0.1:{cluster_port}", pathlib.Path(log_dir) / "cluster-token"
        if "--cluster-grpc" in args:
            self.cluster = str(args[args.index("--cluster-grpc") + 1])
        # Servers of one directory share the file, and one may be reading it.
        if not token.exists():
            token.write_text(CLUSTER_TOKEN)
        self.cluster_flags = ["--cluster-grpc", self.cluster, "--cluster-token-file", token]
        if name == "conductor":
            addresses += self.cluster_flags if "--cluster-grpc" not in args else []
        elif "--cluster-token-file" not in args:
            addresses += ["--cluster-token-file", token]
        super().__init__(name, [*args, *addresses], log_dir, env, under, log_reader)
        self.host, self.url = host, f"http://{host}:{self.http_port}"
        self.grpc = f"{host}:{self.grpc_port}"
        # TLS verification is off, because reading the system's certificates would take longer than the start of a
        # cluster.
        self.client = httpx.Client(base_url=self.url, timeout=ANSWER_S, verify=False)
        self._model = None

    @property
    def scraped_at(self):
        """Returns host and port at which operators read all metrics, including those whose labels name callers."""
        if "--operations" in self.args:
            return str(self.args[self.args.index("--operations") + 1])
        return self.url.removeprefix("http://")

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
        """The name of the served model, from /v1/models."""
        if self._model is None:
            self._model = self.client.get("/v1/models").json()["data"][0]["id"]
        return self._model

    def post(self, path, body):
        """Posts a JSON body, and returns the response, whatever its status."""
        return self.client.post(path, json={"model": self.model} | body)

    def complete(self, **body):
        """Returns the answer of /v1/completions. Fails on any status except 200."""
        return self._answer("/v1/completions", body)

    def chat(self, **body):
        """Returns the answer of /v1/chat/completions. Fails on any status except 200."""
        return self._answer("/v1/chat/completions", body)

    def _answer(self, path, body):
        response = self.post(path, body)
        assert response.status_code == 200, self.explain(f"{path} answered {response.status_code}: {response.text}")
        return response.json()

    def stream(self, path, **body):
        """Yields the JSON events of a streamed answer. The stream must end with [DONE]."""
        body = {"model": self.model, "stream": True} | body
        with self.client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise AssertionError(self.explain(f"{path} answered {response.status_code}: {response.read()}"))
            yield from events(whole_lines(response))

    def metrics(self):
        """Returns {name: sum over all label sets} of all metrics."""
        totals = {}
        for line in self.client.get("/metrics").text.splitlines():
            if match := re.fullmatch(r"(\w+)(?:\{.*\})? (\S+)(?: \S+)?", line):
                totals[match[1]] = totals.get(match[1], 0.0) + float(match[2])
        return totals

    def wait_until_idle(self):
        """Waits until no KV page is in use and no request is running. Fails with the metrics that are not 0."""
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


def whole_lines(response):
    """Yields the lines of a streamed answer. httpx's `iter_lines` also divides at characters that stand unescaped in
    JSON, such as U+0085, which a byte-level model writes."""
    rest = ""
    for piece in response.iter_text():
        *whole, rest = (rest + piece).split("\n")
        yield from whole


def events(lines):
    """Yields server-sent events as JSON. They must end with [DONE], which is not yielded."""
    for line in lines:
        if line.startswith("data: "):
            if line == "data: [DONE]":
                return
            yield json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream ended without [DONE]")


def run_to_exit(name, args, log_dir, env=None, seconds=START_S):
    """Runs an executable that is expected to exit by itself. Returns (exit code, log)."""
    process = Process(name, args, log_dir, env)
    try:
        code = process.wait(seconds)
        process.wait_until_all_gone()
        return code, process.log()
    finally:
        process.destroy()
