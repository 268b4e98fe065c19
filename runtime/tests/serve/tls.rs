//! TLS on the ports that clients reach.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{Router, routing::get};
use rcgen::{CertificateParams, KeyPair};
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::yield_now,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tutti_runtime::{
    metrics::Metrics,
    serve::{self, ConnectionMetrics, Purpose},
    shutdown::Shutdown,
    tls::PublicTls,
    watched_files::ReloadMetrics,
};
use tutti_settings::{ConnectionSettings, TlsSettings};

use crate::support::{RawClient, patient, soon};

/// The certificate files of a server, which may be replaced.
struct Files {
    directory: TempDir,
    settings: TlsSettings,
}

impl Files {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| -> Option<PathBuf> { Some(directory.path().join(name)) };
        let settings = TlsSettings { tls_cert: path("cert.pem"), tls_key: path("key.pem") };
        Self { directory, settings }
    }

    /// Writes a new self-signed certificate. Returns a client's settings that trust only this certificate.
    fn renew(&self) -> ClientConfig {
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(vec!["localhost".into()]).unwrap().self_signed(&key).unwrap();
        self.write("key.pem", &key.serialize_pem());
        self.write("cert.pem", &certificate.pem());
        let mut roots = RootCertStore::empty();
        roots.add(certificate.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth()
    }

    /// Replaces a file atomically, as Kubernetes updates a secret.
    fn write(&self, name: &str, text: &str) {
        let new = self.directory.path().join("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.directory.path().join(name)).unwrap();
    }
}

/// Serves `/` over TLS. `/` answers with the version of HTTP.
async fn served(files: &Files, connections: ConnectionSettings) -> SocketAddr {
    counted(files, connections, &Metrics::default()).await
}

/// Like [`served`], with the connections counted in `metrics`.
async fn counted(files: &Files, connections: ConnectionSettings, metrics: &Metrics) -> SocketAddr {
    let tls = PublicTls::read(&files.settings).unwrap();
    let bind = || async { TcpListener::bind("127.0.0.1:0").await.unwrap() };
    let listener = bind().await;
    let address = listener.local_addr().unwrap();
    let (listener, _) = serve::encrypted(listener, bind().await, tls, ReloadMetrics::default());
    let listener = listener.counted(&metrics.register(ConnectionMetrics::register), Purpose::Http);
    let routes =
        Router::new().route("/", get(|version: http::Version| async move { format!("{version:?}") }));
    tokio::spawn(serve::http(listener, routes, connections, Shutdown::default()));
    address
}

async fn connect(address: SocketAddr, config: &ClientConfig) -> std::io::Result<TlsStream<TcpStream>> {
    let socket = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    soon("a handshake", TlsConnector::from(Arc::new(config.clone())).connect(name, socket)).await
}

async fn get_root(stream: &mut TlsStream<TcpStream>) -> String {
    stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    let _ = soon("an answer", stream.read_to_string(&mut answer)).await;
    answer
}

#[tokio::test]
async fn https_serves_and_offers_both_versions_of_http() {
    let files = Files::new();
    let trusting = files.renew();
    let address = served(&files, patient()).await;
    let mut stream = connect(address, &trusting).await.unwrap();
    assert!(get_root(&mut stream).await.starts_with("HTTP/1.1 200 OK"));
    for (offered, chosen) in [(&[&b"h2"[..], b"http/1.1"][..], &b"h2"[..]), (&[b"http/1.1"], b"http/1.1")] {
        let mut config = trusting.clone();
        config.alpn_protocols = offered.iter().map(|name| name.to_vec()).collect();
        let stream = connect(address, &config).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(chosen));
    }
    let mut strange = trusting.clone();
    strange.alpn_protocols = vec![b"smtp".to_vec()];
    assert!(connect(address, &strange).await.is_err());
}

#[tokio::test]
async fn a_new_certificate_is_used_and_a_wrong_one_leaves_the_old_in_force() {
    let files = Files::new();
    let old = files.renew();
    let address = served(&files, patient()).await;
    let mut open = connect(address, &old).await.unwrap();
    files.write("cert.pem", "no certificate");
    let until = Instant::now() + Duration::from_millis(2500);
    while Instant::now() < until {
        connect(address, &old).await.expect("a file with a mistake has replaced the certificate");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let new = files.renew();
    let renewed = async {
        while connect(address, &new).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon("the use of the new certificate", renewed).await;
    assert!(connect(address, &old).await.is_err(), "the old certificate is still in use");
    assert!(get_root(&mut open).await.starts_with("HTTP/1.1 200 OK"), "an open connection was cut");
}

#[tokio::test]
async fn handshakes_that_stall_end_and_hold_up_nobody() {
    let files = Files::new();
    let trusting = files.renew();
    let connections = ConnectionSettings { handshake_timeout_ms: 300, ..patient() };
    let metrics = Metrics::default();
    let address = counted(&files, connections, &metrics).await;
    let mut stalled = Vec::new();
    for _ in 0..32 {
        let mut client = RawClient::connect(address).await;
        // The first bytes of a TLS handshake record of 512 bytes that contains a ClientHello.
        client.0.write_all(&[22, 3, 1, 2, 0, 1]).await.unwrap();
        stalled.push(client);
    }
    let mut stream = connect(address, &trusting).await.unwrap();
    assert!(get_root(&mut stream).await.starts_with("HTTP/1.1 200 OK"));
    for mut client in stalled {
        client.closed().await;
    }
    // The server counts a connection only after it has closed the socket, so the test polls.
    let counted = r#"tutti_connections_closed_total{listener="http",reason="handshake"} 32"#;
    soon("the count", async {
        while !metrics.encode().contains(counted) {
            yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn handshakes_count_against_the_limit_of_connections_and_make_room() {
    let files = Files::new();
    let trusting = files.renew();
    let connections = ConnectionSettings { handshake_timeout_ms: 3_600_000, max_per_peer: 4, ..patient() };
    let address = served(&files, connections).await;
    let mut stalled = Vec::new();
    for _ in 0..4 {
        stalled.push(RawClient::connect(address).await);
    }
    let mut stream = connect(address, &trusting).await.unwrap();
    assert!(get_root(&mut stream).await.starts_with("HTTP/1.1 200 OK"));
    stalled.remove(0).closed().await;
}

#[tokio::test]
async fn plaintext_at_an_encrypted_port_gets_no_answer() {
    let files = Files::new();
    files.renew();
    let address = served(&files, patient()).await;
    let mut client = RawClient::connect(address).await;
    client.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let mut answer = Vec::new();
    let _ = soon("the end", client.0.read_to_end(&mut answer)).await;
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
}

#[test]
fn a_mistake_in_the_files_is_named_with_its_setting_and_its_file() {
    let files = Files::new();
    let refused = || PublicTls::read(&files.settings).unwrap_err();
    let error = refused();
    assert_eq!(error.field(), Some("tls_cert"));
    assert!(error.message().contains("cert.pem") && error.message().contains("No such file"), "{error}");
    files.renew();
    let key = std::fs::read_to_string(files.directory.path().join("key.pem")).unwrap();
    for (name, text, field, word) in [
        ("cert.pem", "", "tls_cert", "no certificate"),
        ("cert.pem", "-----BEGIN CERTIFICATE-----\n", "tls_cert", "not PEM"),
        (
            "cert.pem",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            "tls_cert",
            "cannot be used",
        ),
        ("key.pem", "", "tls_key", "no private key"),
        (
            "key.pem",
            "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
            "tls_key",
            "cannot be used",
        ),
    ] {
        files.renew();
        files.write(name, text);
        let error = refused();
        assert_eq!(error.field(), Some(field), "{error}");
        assert!(error.message().contains(name) && error.message().contains(word), "{error}");
    }
    files.renew();
    files.write("key.pem", &key);
    let error = refused();
    assert_eq!(error.field(), Some("tls_key"));
    assert!(error.message().contains("is not the key of"), "{error}");
}
