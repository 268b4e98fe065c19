"""A router before a conductor whose workers outlive it, for chaos: the conductor is killed and started again."""

import signal

import httpx
from harness import Server, free_port, processes_marked, wait_for

# Faults are so frequent that a stream may be lost several times.
PATIENT = {"TUTTI_FLEET__MAX_REPLAYS": "50", "TUTTI_FLEET__MAX_RETRIES": "50", "TUTTI_FLEET__RECOVERY_MS": "90000", "TUTTI_FLEET__POLL_MS": "100"}


class OutlivingCluster:
    """The methods of `Server` that chaos uses, and `replace_conductor`."""

    kinds = {"kill conductor": 3}
    keys = None

    def __init__(self, args, directory):
        cluster = ["--cluster-grpc", f"127.0.0.1:{free_port()}", "--cluster-token-file", directory / "cluster-token"]
        self.flags, self.directory = ["--no-router", "--state-directory", directory / "state", *cluster, *args], directory
        self.conductors = [Server("conductor", self.flags, directory)]
        self.router = Server("router", ["--conductor", f"http://{self.conductor.cluster}"], directory, PATIENT)
        self.host, self.http_port = self.router.host, self.router.http_port

    @property
    def conductor(self):
        return self.conductors[-1]

    @property
    def pid(self):
        return self.conductor.pid

    @property
    def model(self):
        return self.router.model

    def replace_conductor(self):
        """Kills the conductor, and starts another one at once, as systemd does."""
        former = self.conductor
        former.signal(signal.SIGKILL)
        former.wait()
        self.conductors.append(Server("conductor", self.flags, self.directory))

    def metrics(self):
        def read():
            try:
                return self.conductor.metrics()
            except httpx.TransportError:
                return None  # it starts

        return wait_for("the conductor's metrics", read, seconds=90)

    def workers_by_rank(self):
        ranks = {}
        for conductor in self.conductors:
            ranks |= conductor.workers_by_rank()
        return ranks

    def processes(self):
        found = {}
        for conductor in self.conductors:
            found |= processes_marked(conductor.mark)
        return found

    def wait_until_ready(self):
        self.router.wait_until_ready()
        self.conductor.wait_until_ready()
        return self

    def wait_until_idle(self):
        self.conductor.wait_until_idle()

    def stop(self):
        self.router.stop()
        self.conductor.stop()
        wait_for("no worker is left", lambda: not self.processes())

    def destroy(self):
        for one in (self.router, *reversed(self.conductors)):
            one.destroy()
