"""Encryption: of the ports that clients reach, and of every connection inside a cluster."""

import socket
import ssl
import time

import grpc
import httpx
import pytest
from certificates import Authority
from harness import ANSWER_S, run_to_exit, wait_for
from test_sim import sampled

SIM = ("--device", "sim")


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def https(server, authority):
    """A client that trusts this authority alone."""
    return httpx.Client(base_url=f"https://127.0.0.1:{server.http_port}", verify=ssl.create_default_context(cafile=authority.ca), timeout=ANSWER_S)


def encrypted(server, authority):
    """Waits until a server with TLS is ready: its client."""
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
    """The serial number of the certificate that the HTTP port shows now."""
    pem = ssl.get_server_certificate(("127.0.0.1", server.http_port))
    return ssl.PEM_cert_to_DER_cert(pem)


def healthy(server, authority):
    """The answer of grpc.health.v1 over TLS."""
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
    assert f"https://127.0.0.1:{server.http_port}" in server.log()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{server.http_port}/ready", timeout=ANSWER_S)
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
    # A client that trusts another authority does not talk to this server.
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://127.0.0.1:{server.http_port}/ready")
    client.close()


def test_a_certificate_is_renewed_during_a_stream(start, authority, tmp_path):
    server = start("--workers", 1, *SIM, *authority.public(), ready=False)
    client = encrypted(server, authority)
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = dict(model=model, prompt=[1], seed=7, temperature=1, max_tokens=2000, ignore_eos=True, stream=True)
    old = serial(server)
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        # A mistake leaves the old certificate in force, and the log names the file.
        (tmp_path / "public.pem").write_text("no certificate")
        wait_for("the mistake in the log", lambda: "stay as they were" in server.log() and "public.pem: has no certificate" in server.log())
        assert serial(server) == old
        authority.public()
        wait_for("the new certificate", lambda: serial(server) != old)
        assert healthy(server, authority) == b"\x08\x01"
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
        # The end, perhaps after an alert.
        while one.recv(100):
            pass
    client.close()
