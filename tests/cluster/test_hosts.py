"""Workers on another host, which is a network namespace. They join over a link that is cut and restored while they
work. """

import os
import random
import subprocess

import pytest
from harness import free_port, wait_for
from hosts import ELSEWHERE
from simulated import VOCAB, sampled
from streams import Streams
from topologies import DISAGGREGATED

SIM = ("--device", "sim", "--heartbeat-timeout", 2)
# These connections are not encrypted. tests/cluster/test_tls.py tests encryption.
PLAIN = ("--insecure-plaintext",)
TOKENS = 250


def ip(*args):
    subprocess.run(["ip", *map(str, args)], check=True, capture_output=True)


def no_namespaces():
    """True if this machine does not allow network namespaces."""
    return subprocess.run(["unshare", "--net", *ELSEWHERE, "true"], capture_output=True).returncode != 0


pytestmark = pytest.mark.skipif(no_namespaces(), reason="network namespaces need root's rights")


class Host:
    """A network namespace with separate processes and one link to the test's namespace."""

    def __init__(self):
        number = os.getpid() % 250
        self.name, self.link = f"tutti-{os.getpid()}", f"tutti{os.getpid()}"
        self.here, there = f"10.213.{number}.1", f"10.213.{number}.2"
        ip("netns", "add", self.name)
        try:
            ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
            ip("addr", "add", f"{self.here}/24", "dev", self.link)
            ip("-n", self.name, "addr", "add", f"{there}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", self.name, "link", "set", device, "up")
            self.mend()
        except subprocess.CalledProcessError:
            self.destroy()
            raise
        self.under = ("ip", "netns", "exec", self.name, *ELSEWHERE)

    def cut(self):
        ip("link", "set", self.link, "down")

    def mend(self):
        ip("link", "set", self.link, "up")

    def destroy(self):
        # The link is removed with the namespace.
        ip("netns", "del", self.name)


@pytest.fixture
def host():
    host = Host()
    yield host
    host.destroy()


@pytest.fixture
def joined(host, start, spawn, tmp_path):
    """Returns a function that starts a conductor with these flags, and on the other host a worker of this rank that
    joins it."""

    def joined(rank, *flags):
        address, secret = f"{host.here}:{free_port()}", tmp_path / "secret"
        secret.write_text("open sesame\n")
        cluster = start(*flags, *SIM, "--worker-listen", address, "--join-token-file", secret, *PLAIN, ready=False)
        spawn("worker", "--conductor", f"http://{address}", "--rank", rank, "--join-token-file", secret, *PLAIN, under=host.under)
        cluster.wait_until_ready()
        all_ready(cluster, rank + 1)
        return cluster

    return joined


def all_ready(cluster, workers):
    wait_for(f"{workers} workers", lambda: cluster.metrics().get("tutti_workers_ready") == workers, seconds=60)


def requests(count):
    """Returns [(body, expected answer)]."""
    rng = random.Random(8)
    for seed in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 16, 700)))]
        body = dict(prompt=prompt, seed=seed, temperature=1, max_tokens=TOKENS, ignore_eos=True, return_token_ids=True)
        yield body, sampled(prompt, seed, 1, TOKENS)


def outlive_a_cut(cluster, host):
    bodies, expected = zip(*requests(16))
    streams = Streams(cluster, "/v1/completions", bodies)
    streams.wait_for_tokens(20)
    host.cut()
    answers = streams.results()
    assert [answer["choices"][0]["token_ids"] for answer in answers] == list(expected)
    assert all(answer["choices"][0]["ends"] == [("length", None)] for answer in answers)
    seen = cluster.metrics()
    assert seen["tutti_workers_fenced_total"] == 1 and seen["tutti_request_replays_total"] >= 1


def test_a_cut_link_costs_a_pause_and_a_mended_one_brings_the_worker_back(joined, host):
    cluster = joined(1, "--workers", 1)
    outlive_a_cut(cluster, host)
    host.mend()
    all_ready(cluster, 2)
    body, tokens = next(requests(1))
    choices = cluster.complete(**body, n=1)["choices"]
    assert choices[0]["token_ids"] == tokens
    cluster.wait_until_idle()


def test_a_cut_link_to_a_worker_that_decodes_for_another(joined, host, tmp_path):
    topology = tmp_path / "topology.toml"
    topology.write_text(DISAGGREGATED.read_text() + "\n[[group]]\nname = 'far'\nwalks = ['thinker_decode']\nspawn = false\n")
    cluster = joined(2, "--topology", topology)
    outlive_a_cut(cluster, host)
    went = cluster.client.get("/metrics").text
    assert 'transport="tcp"} 0' not in went and 'transport="tcp"}' in went, "no plane was sent to the other host"
    host.mend()
    all_ready(cluster, 3)
    cluster.wait_until_idle()
