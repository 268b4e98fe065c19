"""Hosts made of network namespaces on one bridge, and a cluster on several of these hosts with mutual TLS between them.
"""

import itertools
import os
import shutil
import subprocess
import threading

from certificates import Authority
from harness import Process, Server, free_port, processes_marked, wait_for

# A command that makes a process appear to run on another host: processes outside cannot open its shared-memory
# segments.
ELSEWHERE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
NUMBERS = itertools.count()


def ip(*args):
    subprocess.run(["ip", *map(str, args)], check=True, capture_output=True)


class Network:
    """A bridge in the namespace of the test, and hosts on it."""

    def __init__(self, hosts):
        self.tag, number = f"{os.getpid()}x{next(NUMBERS)}", os.getpid() % 250
        self.bridge, self.here, self.hosts = f"tb{self.tag}"[:15], f"10.214.{number}.1", []
        ip("link", "add", self.bridge, "type", "bridge")
        try:
            ip("addr", "add", f"{self.here}/24", "dev", self.bridge)
            ip("link", "set", self.bridge, "up")
            for index in range(hosts):
                self.hosts.append(Host(self, index, f"10.214.{number}.{index + 2}"))
        except subprocess.CalledProcessError:
            self.destroy()
            raise

    def destroy(self):
        for host in self.hosts:
            ip("netns", "del", host.name)
        ip("link", "del", self.bridge)


class Host:
    """A network namespace with one link to the bridge."""

    def __init__(self, network, index, address):
        self.name, self.link, self.address = f"tutti-{network.tag}-{index}", f"t{network.tag}h{index}"[-15:], address
        ip("netns", "add", self.name)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("-n", self.name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self.name, "link", "set", device, "up")
        ip("link", "set", self.link, "master", network.bridge, "up")
        self.under = ("ip", "netns", "exec", self.name, *ELSEWHERE)

    def cut(self):
        ip("link", "set", self.link, "down")

    def mend(self):
        ip("link", "set", self.link, "up")


def possible():
    """True if this machine allows network namespaces."""
    return os.geteuid() == 0 and bool(shutil.which("ip")) and subprocess.run(["unshare", "--net", *ELSEWHERE, "true"], capture_output=True).returncode == 0


class EncryptedCluster:
    """A conductor with one worker, a router on a separate host, and workers that join by hand from separate hosts.

    All connections between them use mutual TLS. Workers that end are started again, as Kubernetes would do. The class
    has the methods of `Server` that chaos uses.
    """

    # Faults that only this kind of cluster has, and the number of each per round.
    kinds = {"cut link": 2, "renew certificates": 2, "strangers": 1}

    def __init__(self, args, workers, directory):
        self.directory, self.count, self.respawned, self.strangers = directory, workers, 0, 0
        self.authority, self.other = Authority(directory), Authority(directory, "other")
        self.secret = directory / "join-secret"
        self.secret.write_text("open sesame\n")
        self.network = Network(workers)
        self.workers, self.ended, self.watch = {}, threading.Event(), None
        here = self.network.here
        self.joined, cluster = f"{here}:{free_port()}", f"{here}:{free_port()}"
        token = directory / "router-secret"
        token.write_text("the routers' own secret")
        inside = ("--worker-listen", self.joined, "--join-token-file", self.secret, "--cluster-grpc", cluster, "--cluster-token-file", token)
        self.conductor = Server("conductor", [*args, "--no-router", *inside, *self.authority.inside("conductor")], directory)
        # The last host is the router's. The others belong to the ranks from 1 on.
        host = self.network.hosts[-1]
        patient = {"TUTTI_FLEET__KEEP_ALIVE_MS": "20000", "TUTTI_FLEET__ACCEPT_TIMEOUT_MS": "60000", "TUTTI_FLEET__MAX_REPLAYS": "50"}
        reach = ("--conductor", f"https://{cluster}", "--cluster-token-file", token, "--skip-tokenizer-init")
        self.router = Server("router", [*reach, *self.authority.inside("router")], directory, patient, under=host.under[:4], host=host.address)
        for rank in range(1, workers):
            self.start_worker(rank)
        self.watch = threading.Thread(target=self.respawn, daemon=True)
        self.watch.start()

    def start_worker(self, rank):
        join = ("--conductor", f"https://{self.joined}", "--rank", rank, "--join-token-file", self.secret)
        flags = self.authority.inside("worker", name=f"worker-{rank}")
        self.workers[rank] = Process("worker", [*join, *flags], self.directory, under=self.host_of(rank).under)

    def host_of(self, rank):
        """Returns the host of a rank. The conductor's own worker has no link, so its rank gets the host of the next
        rank. """
        return self.network.hosts[max(rank, 1) - 1]

    def respawn(self):
        while not self.ended.wait(0.1):
            for rank, worker in list(self.workers.items()):
                if worker.child.poll() is not None:
                    worker.destroy()
                    self.respawned += 1
                    self.start_worker(rank)

    # The methods of `Server` that chaos uses.

    @property
    def pid(self):
        return self.conductor.pid

    @property
    def http_port(self):
        return self.router.http_port

    @property
    def host(self):
        return self.router.host

    @property
    def model(self):
        return self.router.model

    def metrics(self):
        seen = self.conductor.metrics()
        # A worker that joined by hand returns as a new process, or joins again after it was fenced.
        restarts = seen.get("tutti_worker_restarts_total", 0) + seen.get("tutti_workers_fenced_total", 0)
        seen["tutti_worker_restarts_total"] = restarts + self.respawned
        return seen

    def workers_by_rank(self):
        ranks = self.conductor.workers_by_rank()
        for worker in list(self.workers.values()):
            ranks |= worker.workers_by_rank()
        return ranks

    def processes(self):
        found = self.conductor.processes()
        for worker in list(self.workers.values()):
            found |= {pid: name for pid, name in processes_marked(worker.mark).items() if name == "worker"}
        return found

    def wait_until_ready(self):
        self.router.wait_until_ready()
        wait_for("all workers", lambda: self.conductor.metrics().get("tutti_workers_ready") == self.count, seconds=90)
        return self

    def wait_until_idle(self):
        self.conductor.wait_until_idle()

    def cut(self, rank):
        self.host_of(rank).cut()

    def mend(self, rank):
        self.host_of(rank).mend()

    def renew(self):
        """Gives every process a new certificate while it runs."""
        self.authority.inside("conductor")
        self.authority.inside("router")
        for rank in range(1, self.count):
            self.authority.inside("worker", name=f"worker-{rank}")

    def refuse_strangers(self):
        """Lets a worker and a router with certificates of another authority try to join. The log of each side must name
        the reason for the refusal."""
        self.strangers += 1
        name = f"stranger-{self.strangers}"
        cert, key = self.other.issue(name, "worker.tutti.internal", "router.tutti.internal")
        flags = ("--cluster-tls-cert", cert, "--cluster-tls-key", key, "--cluster-tls-ca", self.authority.ca)
        join = ("--conductor", f"https://{self.joined}", "--rank", 1000, "--join-token-file", self.secret)
        stranger = Process("worker", [*join, *flags], self.directory, under=self.network.hosts[-1].under)
        try:
            wait_for("the refusal in the log of the stranger", lambda: "refuses this process's certificate" in stranger.log(), seconds=60)
            wait_for("the refusal in the log of the conductor", lambda: "of an authority that is not trusted here" in self.conductor.log(), seconds=60)
        finally:
            stranger.destroy()

    def stop(self):
        self.ended.set()
        if self.watch:
            self.watch.join()
        for one in (self.router, self.conductor):
            one.stop()

    def destroy(self):
        self.ended.set()
        if self.watch:
            self.watch.join()
        for one in (self.router, self.conductor, *self.workers.values()):
            one.destroy()
        self.network.destroy()
