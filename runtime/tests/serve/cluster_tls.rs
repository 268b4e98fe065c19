//! Mutual TLS between processes of a cluster: the error that each side reports for a peer with a wrong certificate.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener as StdListener, TcpStream as StdStream},
    sync::Arc,
    thread,
};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tempfile::TempDir;
use tokio::{
    io::AsyncReadExt,
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsConnector;
use tonic::service::Routes;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tutti_runtime::{
    serve,
    shutdown::Shutdown,
    tls::{BlockingTls, ClusterTransport, roles::Role, with_causes},
};
use tutti_settings::{ClusterTlsSettings, ConnectionSettings};

use crate::support::{patient, soon};

/// An authority that signs certificates.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: rcgen::Certificate,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap();
        Self { issuer: Issuer::new(params, key), certificate }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Valid {
    Now,
    LongAgo,
}

/// A process of the cluster: its certificate is signed by `signer`, and it trusts `trusted`.
struct Process {
    transport: ClusterTransport,
    _directory: TempDir,
}

fn process(role: Role, signer: &Authority, trusted: &Authority, valid: Valid) -> Process {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        Some(path)
    };
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec![role.name().to_owned()]).unwrap();
    if valid == Valid::LongAgo {
        (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
    }
    let certificate = params.signed_by(&key, &signer.issuer).unwrap();
    let settings = ClusterTlsSettings {
        cluster_tls_cert: write("cert.pem", certificate.pem()),
        cluster_tls_key: write("key.pem", key.serialize_pem()),
        cluster_tls_ca: write("ca.pem", trusted.certificate.pem()),
        insecure_plaintext: false,
    };
    Process { transport: ClusterTransport::read(&settings).unwrap(), _directory: directory }
}

/// Serves `grpc.health.v1` to processes that act as `peers`.
async fn served(process: &Process, peers: Role, connections: ConnectionSettings) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("", tonic_health::ServingStatus::Serving).await;
    let listener = serve::Listener::from(listener).with_tls(process.transport.server(peers));
    let windows = serve::Windows::default();
    tokio::spawn(serve::grpc(listener, Routes::new(health), windows, connections, Shutdown::default()));
    address
}

/// Dials a process that should act as `to`, and calls it. Returns the reason if no connection is made.
async fn call(process: &Process, address: SocketAddr, to: Role) -> Result<(), String> {
    let dial = process.transport.dial("conductor", &format!("http://{address}"), to).unwrap();
    let channel = soon("a connection", dial.connect()).await.map_err(|e| with_causes(&e))?;
    let mut client = HealthClient::new(channel);
    let answered = soon("an answer", client.check(HealthCheckRequest { service: String::new() })).await;
    answered.map(drop).map_err(|status| format!("after the handshake: {status}"))
}

#[tokio::test]
async fn each_side_refuses_a_wrong_certificate_and_says_why() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let good = |role| process(role, &ours, &ours, Valid::Now);
    let expired = |role| process(role, &ours, &ours, Valid::LongAgo);
    let foreign = |role| process(role, &theirs, &ours, Valid::Now);
    // Refused connections do not stay open, so two per peer are enough.
    let connections = ConnectionSettings { max_per_peer: 2, ..patient() };
    let worker = good(Role::Worker);
    let address = served(&worker, Role::Worker, connections.clone()).await;
    for (client, why) in [
        (good(Role::Router), "refuses this process's certificate: it is for another name"),
        (expired(Role::Worker), "refuses this process's certificate: it has expired"),
        (
            foreign(Role::Worker),
            "refuses this process's certificate: it is of an authority that is not trusted",
        ),
    ] {
        let error = call(&client, address, Role::Worker).await.unwrap_err();
        assert!(error.contains(why) && error.contains(&address.to_string()), "{error}");
    }
    for role in [Role::Worker, Role::Conductor] {
        call(&good(role), address, Role::Worker).await.unwrap();
    }
    for (server, why) in [
        (good(Role::Router), "its certificate is for DnsName(\"router.tutti.internal\"), not for worker."),
        (expired(Role::Worker), "its certificate has expired"),
        (foreign(Role::Worker), "its certificate is of an authority that is not trusted here"),
    ] {
        let address = served(&server, Role::Worker, connections.clone()).await;
        let error = call(&worker, address, Role::Worker).await.unwrap_err();
        assert!(error.contains(why) && error.contains(&address.to_string()), "{error}");
    }
    // A worker may neither call the services for routers nor act as a conductor.
    let conductor = good(Role::Conductor);
    let address = served(&conductor, Role::Router, connections).await;
    assert!(call(&worker, address, Role::Conductor).await.is_err());
    call(&good(Role::Router), address, Role::Conductor).await.unwrap();
    assert!(call(&worker, address, Role::Conductor).await.is_err());
}

#[tokio::test]
async fn a_peer_without_a_certificate_or_without_tls_is_refused() {
    let ours = Authority::new();
    let worker = process(Role::Worker, &ours, &ours, Valid::Now);
    let address = served(&worker, Role::Worker, patient()).await;
    let mut roots = RootCertStore::empty();
    roots.add(ours.certificate.der().clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let anonymous = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from(Role::Worker.name()).unwrap();
    let socket = TcpStream::connect(address).await.unwrap();
    let mut stream = TlsConnector::from(Arc::new(anonymous)).connect(name, socket).await.unwrap();
    let error = soon("a refusal", stream.read_u8()).await.unwrap_err();
    assert!(error.to_string().contains("CertificateRequired"), "{error}");
    let plain = Process { transport: ClusterTransport::default(), _directory: tempfile::tempdir().unwrap() };
    assert!(call(&plain, address, Role::Worker).await.is_err());
    // A client with a certificate reports that a plaintext server does not speak TLS.
    let address = served(&plain, Role::Worker, patient()).await;
    let error = call(&worker, address, Role::Worker).await.unwrap_err();
    assert!(error.contains("no encrypted connection to"), "{error}");
    call(&plain, address, Role::Worker).await.unwrap();
}

#[tokio::test]
async fn a_server_that_stalls_in_its_handshake_fails_the_call() {
    let ours = Authority::new();
    let worker = process(Role::Worker, &ours, &ours, Valid::Now);
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    let error = call(&worker, address, Role::Worker).await.unwrap_err();
    assert!(error.contains("handshake did not end within"), "{error}");
}

/// Connects two ranks, and sends a message each way. Returns the results of the leader and of the other rank.
fn ranks(leader: &Process, other: &Process) -> (Result<(), String>, Result<(), String>) {
    let listener = StdListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let talk = |mut stream: BlockingTls| {
        let mut received = [0; 4];
        stream.write_all(b"ping").and_then(|()| stream.flush())?;
        stream.read_exact(&mut received)?;
        assert_eq!(&received, b"ping");
        Ok::<_, std::io::Error>(())
    };
    thread::scope(|scope| {
        let leading = scope.spawn(|| {
            let (socket, _) = listener.accept().unwrap();
            talk(leader.transport.accepted_rank(&socket).unwrap().unwrap()).map_err(|e| e.to_string())
        });
        let socket = StdStream::connect(address).unwrap();
        let said = talk(other.transport.dialed_leader(&socket).unwrap().unwrap());
        drop(socket);
        (leading.join().unwrap(), said.map_err(|e| e.to_string()))
    })
}

#[test]
fn ranks_talk_encrypted_and_refuse_a_wrong_certificate_by_name() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let good = process(Role::Worker, &ours, &ours, Valid::Now);
    let conductors = process(Role::Conductor, &ours, &ours, Valid::Now);
    assert_eq!(ranks(&good, &conductors), (Ok(()), Ok(())));
    for (wrong, leader_says, rank_is_told) in [
        (process(Role::Router, &ours, &ours, Valid::Now), "router.tutti.internal", "for another name"),
        (process(Role::Worker, &ours, &ours, Valid::LongAgo), "has expired", "has expired"),
        (
            process(Role::Worker, &theirs, &ours, Valid::Now),
            "an authority that is not trusted here",
            "an authority",
        ),
    ] {
        let (leader, rank) = ranks(&good, &wrong);
        let (leader, rank) = (leader.unwrap_err(), rank.unwrap_err());
        assert!(leader.contains("127.0.0.1:") && leader.contains(leader_says), "{leader}");
        assert!(rank.contains("refuses this process's certificate") && rank.contains(rank_is_told), "{rank}");
        let (leader, rank) = ranks(&wrong, &good);
        assert!(
            rank.unwrap_err().contains("its certificate"),
            "the rank does not say why it refuses its leader"
        );
        assert!(leader.unwrap_err().contains("refuses this process's certificate"));
    }
}
