"""Encryption of the ports for clients, and of every connection inside a cluster."""

import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import time

import grpc
import httpx
import pytest
from certificates import ROLES, Authority, replace
from harness import ANSWER_S, GOLDENS, free_port, run_to_exit, wait_for
from hosts import ELSEWHERE
from simulated import sampled
from topologies import DISAGGREGATED

SIM = ("--device", "sim", "--heartbeat-timeout", 2)
QWEN3 = ("--model", GOLDENS / "seed0/qwen3", "--skip-tokenizer-init", "--threads", 1)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def https(server, authority):
    """Returns a client that trusts only this authority."""
    return httpx.Client(base_url=f"https://127.0.0.1:{server.http_port}", verify=ssl.create_default_context(cafile=authority.ca), timeout=ANSWER_S)


def encrypted(server, authority):
    """Waits until a server with TLS is ready, and returns a client for it."""
    client = https(server, authority)

    def ready():
        assert server.child.poll() is None, server.explain("exited before it was ready")
        try:
            return client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    wait_for("ready over HTTPS", ready, seconds=90)
    return client


def serial(server):
    """Returns the certificate that the HTTP port presents now."""
    pem = ssl.get_server_certificate(("127.0.0.1", server.http_port))
    return ssl.PEM_cert_to_DER_cert(pem)


def healthy(server, authority):
    """Returns the answer of grpc.health.v1 over TLS."""
    credentials = grpc.ssl_channel_credentials(root_certificates=authority.ca.read_bytes())
    with grpc.secure_channel(server.grpc, credentials) as channel:
        return channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=ANSWER_S)


@pytest.mark.parametrize("name", ("conductor", "router"))
def test_clients_speak_https_and_grpc_over_tls_and_nothing_else(start, authority, name):
    public = authority.public()
    if name == "conductor":
        server = start("--workers", 1, *SIM, *public, ready=False)
    else:
        conductor = start("--workers", 1, "--no-router", *SIM, ready=False)
        server = start("--conductor", f"http://{conductor.cluster}", *public, name="router", ready=False)
    client = encrypted(server, authority)
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = dict(model=model, prompt=[1, 2, 3], seed=7, temperature=1, max_tokens=5, ignore_eos=True, return_token_ids=True)
    assert client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"] == sampled([1, 2, 3], 7, 1, 5)
    assert healthy(server, authority) == b"\x08\x01"
    assert server.says(f"https://127.0.0.1:{server.http_port}")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{server.http_port}/ready", timeout=ANSWER_S)
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
    # A client that trusts another authority does not connect to this server.
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://127.0.0.1:{server.http_port}/ready")
    client.close()


@pytest.mark.parametrize("name", ("conductor", "router"))
def test_probes_have_an_address_of_their_own_that_is_never_encrypted(start, authority, name):
    """The address for operations has no routes for clients, even with an embedded router, and serves until the drain is
    over."""
    probes = f"127.0.0.1:{free_port()}"
    flags = ("--operations", probes, *authority.public())
    if name == "conductor":
        server = start("--workers", 1, *SIM, *flags, ready=False)
    else:
        conductor = start("--workers", 1, "--no-router", *SIM, ready=False)
        server = start("--conductor", f"http://{conductor.cluster}", *flags, "--lame-duck", 600, name="router", ready=False)
    encrypted(server, authority).close()
    with httpx.Client(base_url=f"http://{probes}", timeout=ANSWER_S) as client:
        assert [client.get(path).status_code for path in ("/health", "/ready", "/v1/models", "/")] == [200, 200, 404, 404]
        assert 'tutti_connections_open{listener="operations"} 1' in client.get("/metrics").text
        if name == "router":
            server.signal(signal.SIGTERM)
            wait_for("/ready says no", lambda: client.get("/ready").status_code == 503)
            assert client.get("/health").status_code == 200
            server.signal(signal.SIGTERM)
            server.wait()


def test_a_certificate_is_renewed_during_a_stream(start, authority, tmp_path):
    server = start("--workers", 1, *SIM, *authority.public(), ready=False)
    client = encrypted(server, authority)
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = dict(model=model, prompt=[1], seed=7, temperature=1, max_tokens=2000, ignore_eos=True, stream=True)
    old = serial(server)
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        # After a mistake in a certificate's file, the old certificate stays in force, and the log names the file.
        (tmp_path / "public.pem").write_text("no certificate")
        wait_for("the mistake in the log", lambda: "could not read the certificates" in server.log() and "public.pem: has no certificate" in server.log())
        assert serial(server) == old
        authority.public()
        wait_for("the new certificate", lambda: serial(server) != old)
        assert healthy(server, authority) == b"\x08\x01"
        metrics = client.get("/metrics").text
        assert 'tutti_file_reload_failures_total{files="tls"} 1' in metrics
        [expiry] = re.findall(r'^tutti_certificate_expiry_seconds\{files="tls"\} (\d+)$', metrics, re.M)
        assert int(expiry) > time.time()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    client.close()


def test_wrong_files_are_refused_by_name_at_the_start(authority, tmp_path):
    _, cert, _, key = authority.public()
    for flags, said in (
        (("--tls-cert", cert), "tls_key: is required with --tls-cert"),
        (("--tls-cert", tmp_path / "none", "--tls-key", key), "tls_cert: "),
        (("--tls-cert", cert, "--tls-key", authority.key), "authority.key: is not the key of"),
    ):
        for name in ("conductor", "router"):
            more = ("--conductor", "http://127.0.0.1:1") if name == "router" else SIM
            code, log = run_to_exit(name, [*flags, *more, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"], tmp_path)
            assert code == 64 and said in log, log


def test_handshakes_that_stall_delay_nobody(start, authority):
    server = start("--workers", 1, *SIM, *authority.public(), ready=False, env={"TUTTI_CONNECTIONS__HANDSHAKE_TIMEOUT_MS": "2000"})
    client = encrypted(server, authority)
    stalled = [socket.create_connection(("127.0.0.1", server.http_port)) for _ in range(200)]
    for one in stalled:
        one.sendall(b"\x16\x03\x01\x02\x00\x01")
    began = time.monotonic()
    assert https(server, authority).get("/ready").status_code == 200
    assert time.monotonic() - began < 1.5, "a handshake waited for others"
    for one in stalled:
        one.settimeout(30)
        # The connection ends, perhaps after a TLS alert.
        while one.recv(100):
            pass
    client.close()


@pytest.fixture
def other(tmp_path):
    """Another authority, which no process trusts."""
    directory = tmp_path / "other"
    directory.mkdir()
    return Authority(directory, "other")


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("open sesame\n")
    return path


def tokens_of(cluster, seed=7):
    body = dict(prompt=[1, 2, 3], seed=seed, temperature=1, max_tokens=20, ignore_eos=True, return_token_ids=True)
    return cluster.complete(**body)["choices"][0]["token_ids"]


def workers_ready(cluster, count):
    wait_for(f"{count} workers", lambda: cluster.metrics().get("tutti_workers_ready") == count, seconds=60)


def foreign(authority, other, role):
    """Returns the flags of a process with a certificate of another authority. The process trusts this cluster's
    authority. """
    cert, key = other.issue(role, ROLES[role])
    return ("--cluster-tls-cert", cert, "--cluster-tls-key", key, "--cluster-tls-ca", authority.ca)


def expired(authority, role):
    flags = authority.inside(role, name=f"expired-{role}", days=0)
    time.sleep(1.1)  # the certificate's own time, which is whole seconds
    return flags


REFUSED = {
    "another authority": ("of an authority that is not trusted here", "of an authority that is not trusted there"),
    "expired": ("its certificate has expired", "it has expired"),
    "another name": ("not for", "it is for another name"),
    "none": ("it does not speak TLS", "speaks no TLS"),
}


def wrong(kind, role, authority, other):
    """Returns the flags of a process with a wrong certificate."""
    match kind:
        case "another authority":
            return foreign(authority, other, role)
        case "expired":
            return expired(authority, role)
        case "another name":
            return authority.inside("router" if role == "worker" else "worker", name=f"not-a-{role}")
        case "none":
            return ()


@pytest.mark.parametrize("kind", REFUSED)
def test_a_worker_with_a_wrong_certificate_is_refused_and_costs_nothing(start, spawn, authority, other, secret, kind):
    address = f"127.0.0.1:{free_port()}"
    cluster = start("--workers", 1, *SIM, "--worker-listen", address, "--join-token-file", secret, *authority.inside("conductor"))
    join = ("--conductor", f"https://{address}" if kind != "none" else f"http://{address}", "--join-token-file", secret)
    here, there = REFUSED[kind]
    stranger = spawn("worker", *join, "--rank", 1, *wrong(kind, "worker", authority, other))
    wait_for("the refusal in the conductor's log", lambda: "refused a connection" in cluster.log() and here in cluster.log())
    wait_for("the reason in the worker's log", lambda: address in stranger.log() and there in stranger.log() and "cannot join yet" in stranger.log())
    assert cluster.metrics()["tutti_workers_ready"] == 1 and tokens_of(cluster) == sampled([1, 2, 3], 7, 1, 20)
    # The refused worker's rank stays free for a worker with a right certificate.
    spawn("worker", "--conductor", f"https://{address}", "--join-token-file", secret, "--rank", 1, *authority.inside("worker"))
    workers_ready(cluster, 2)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_router_with_a_wrong_certificate_is_refused_and_others_are_served(start, authority, other, kind):
    conductor = start("--workers", 1, "--no-router", *SIM, *authority.inside("conductor"), ready=False)
    here, there = REFUSED[kind]
    stranger = start("--conductor", f"http://{conductor.cluster}", *wrong(kind, "router", authority, other), name="router", ready=False)
    wait_for("the refusal in the conductor's log", lambda: "refused a connection" in conductor.log() and here in conductor.log())
    if kind != "none":
        wait_for("the reason in the router's log", lambda: conductor.cluster in stranger.log() and there in stranger.log())
    assert stranger.client.get("/ready").status_code == 503
    router = start("--conductor", f"https://{conductor.cluster}", *authority.inside("router"), name="router")
    assert tokens_of(router) == sampled([1, 2, 3], 7, 1, 20)


def test_a_conductor_that_poses_is_refused_by_router_and_worker(start, spawn, authority, secret):
    address = f"127.0.0.1:{free_port()}"
    posing = start("--workers", 1, *SIM, "--worker-listen", address, "--join-token-file", secret, *authority.inside("worker", name="poser"), ready=False)
    worker = spawn("worker", "--conductor", f"https://{address}", "--rank", 1, "--join-token-file", secret, *authority.inside("worker"))
    router = start("--conductor", f"https://{posing.cluster}", *authority.inside("router"), name="router", ready=False)
    for process, peer in ((worker, address), (router, posing.cluster)):
        said = 'its certificate is for DnsName("worker.tutti.internal"), not for conductor.tutti.internal'
        wait_for("the reason", lambda: peer in process.log() and said in process.log().replace("\\", ""))
    # The workers that this conductor starts do not trust it either. Its cluster therefore does not become ready.
    assert posing.metrics().get("tutti_workers_ready", 0) == 0


DISAGGREGATED_BY_HAND = DISAGGREGATED.read_text() + "spawn = false\n"


def disaggregated(start, spawn, authority, secret, tmp_path, decoder):
    """Returns a cluster that prefills in a spawned worker and decodes in a worker that has joined with the flags
    `decoder`."""
    topology, address = tmp_path / "topology.toml", f"127.0.0.1:{free_port()}"
    topology.write_text(DISAGGREGATED_BY_HAND)
    far = ("--topology", topology, "--worker-listen", address, "--join-token-file", secret)
    cluster = start(*far, *SIM, *authority.inside("conductor"), ready=False)
    joining = ("--conductor", f"https://{address}", "--rank", 1, "--join-token-file", secret)
    worker = spawn("worker", *joining, *decoder, under=ELSEWHERE)
    cluster.wait_until_ready()
    return cluster, worker


@pytest.mark.skipif(subprocess.run([*ELSEWHERE, "true"], capture_output=True).returncode, reason="no namespaces here")
def test_a_plane_peer_with_a_wrong_certificate_is_refused_by_name(start, spawn, authority, other, secret, tmp_path):
    right = authority.inside("worker", name="decoder")
    cluster, worker = disaggregated(start, spawn, authority, secret, tmp_path, right)
    assert tokens_of(cluster) == sampled([1, 2, 3], 7, 1, 20)
    # The worker has joined. From now on, its listener for planes presents a certificate of another authority.
    cert, key = other.issue("decoder", ROLES["worker"])
    replace(key, right[3]), replace(cert, right[1])
    wait_for("the new certificate", lambda: "read the certificates of the cluster again" in worker.log())
    # The open connection for planes stays in use, so the sender's worker is killed to make a new one.
    os.kill(cluster.workers_by_rank()[0], signal.SIGKILL)
    wait_for("a new sender", lambda: "ready for requests again" in cluster.log())
    body = dict(model=cluster.model, prompt=[1, 2, 3], seed=7, temperature=1, max_tokens=20, ignore_eos=True)
    with contextlib.suppress(httpx.TimeoutException):
        cluster.client.post("/v1/completions", json=body, timeout=10)
    said = "its certificate is of an authority that is not trusted here"
    wait_for("the reason at the sender", lambda: "no encrypted connection" in cluster.log() and said in cluster.log())
    wait_for("the reason at the receiver", lambda: "refused a connection" in worker.log() and "refuses this process's certificate" in worker.log())
    # With a right certificate again, the same worker receives planes.
    authority.inside("worker", name="decoder")
    wait_for("an answer", lambda: cluster.client.post("/v1/completions", json=body).status_code == 200, seconds=90, every=1)


def test_ranks_of_a_group_over_tcp_are_encrypted_and_a_wrong_one_is_refused_by_name(start, spawn, authority, other, secret):
    address = f"127.0.0.1:{free_port()}"
    cluster = start("--workers", 2, "--tp", 2, "--worker-listen", address, "--join-token-file", secret, *QWEN3, *authority.inside("conductor"))
    ask = dict(prompt=list(range(1, 200)), max_tokens=16, temperature=0, logprobs=3, return_token_ids=True)
    in_memory = cluster.complete(**ask)["choices"]

    def rank(number):
        flags = authority.inside("worker", name=f"rank-{number}")
        return flags, spawn("worker", "--conductor", f"https://{address}", "--rank", number, "--join-token-file", secret, "--log", "info,tutti_worker=debug", *flags)

    # Rank 3 joins with a right certificate. A wrong one replaces it before the group forms.
    flags, third = rank(3)
    wait_for("rank 3 has joined", lambda: " joined " in third.log())
    cert, key = other.issue("rank-3", ROLES["worker"])
    replace(key, flags[3]), replace(cert, flags[1])
    wait_for("the new certificate", lambda: "read the certificates of the cluster again" in third.log())
    _, second = rank(2)
    leader, said = second, "of an authority that is not trusted here"
    wait_for("the reason at the leader", lambda: "no encrypted connection in a group" in leader.log() and said in leader.log(), seconds=60)
    wait_for("the reason at the rank", lambda: "refuses this process's certificate" in third.log(), seconds=60)
    assert cluster.complete(**ask)["choices"] == in_memory, "the other group goes on"
    for process in (second, third):
        process.destroy()
    wait_for("one group", lambda: cluster.metrics().get("tutti_workers_ready") == 2, seconds=60)
    ranks = [rank(number)[1] for number in (3, 2)]
    workers_ready(cluster, 4)
    assert all(one.says('transport="tcp"') for one in ranks)
    assert [cluster.complete(**ask)["choices"] for _ in range(4)] == [in_memory] * 4


def test_plaintext_between_hosts_is_refused_by_the_flag_and_the_address(tmp_path, secret, authority):
    ports = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")
    join = ("--rank", 1, "--join-token-file", secret)
    for name, flags, setting, address in (
        ("conductor", (*SIM, *ports, "--worker-listen", "0.0.0.0:7000"), "worker_listen", "0.0.0.0:7000"),
        ("conductor", (*SIM, *ports, "--cluster-grpc", "[::]:7000", "--cluster-token-file", secret), "cluster_grpc", "[::]:7000"),
        ("worker", ("--conductor", "http://10.213.0.1:7000", *join), "conductor", "10.213.0.1:7000"),
        ("worker", ("--conductor", "https://127.0.0.1:7000", *join), "conductor", "127.0.0.1:7000"),
        ("router", ("--conductor", "http://10.213.0.1:7000", *ports), "conductor", "10.213.0.1:7000"),
        ("router", ("--discover", "conductors.example:7000", *ports), "discover", "conductors.example:7000"),
    ):
        code, log = run_to_exit(name, flags, tmp_path)
        assert code == 64 and setting in log and address in log and "--cluster-tls-cert" in log, log
        assert "--insecure-plaintext" in log or "https" in address or "https://127" in log, log
    code, log = run_to_exit("conductor", [*SIM, *ports, *authority.inside("conductor"), "--insecure-plaintext"], tmp_path)
    assert code == 64 and "insecure_plaintext: contradicts --cluster-tls-cert" in log, log
