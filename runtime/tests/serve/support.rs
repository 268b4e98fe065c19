//! A served listener, and clients that write bytes by hand.

use std::{net::SocketAddr, time::Duration};

use axum::Router;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
    time::timeout,
};
use tutti_runtime::{
    Error,
    metrics::Metrics,
    serve::{self, ConnectionLimits, ConnectionMetrics, Listener, Purpose},
    shutdown::Shutdown,
};
use tutti_settings::ConnectionSettings;

/// Awaits a future that should complete at once. The test fails with `what` if it does not.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future).await.unwrap_or_else(|_| panic!("{what} does not happen"))
}

/// Settings without a limit that a test can reach by accident.
pub fn patient() -> ConnectionSettings {
    const NEVER: u32 = 3_600_000;
    ConnectionSettings {
        header_timeout_ms: NEVER,
        handshake_timeout_ms: NEVER,
        idle_timeout_ms: NEVER,
        write_timeout_ms: NEVER,
        receive_timeout_ms: NEVER,
        ..ConnectionSettings::default()
    }
}

pub struct Served {
    pub address: SocketAddr,
    pub closing: Shutdown,
    pub task: JoinHandle<Result<(), Error>>,
    metrics: Metrics,
}

impl Served {
    /// Number of connections that the server has closed for `reason`.
    pub fn closed_for(&self, reason: &str) -> usize {
        let name = format!(r#"tutti_connections_closed_total{{listener="http",reason="{reason}"}} "#);
        let text = self.metrics.encode();
        text.lines().find_map(|line| line.strip_prefix(&name)).map_or(0, |count| count.parse().unwrap())
    }
}

pub async fn http(routes: Router, connections: ConnectionSettings) -> Served {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (closing, metrics) = (Shutdown::default(), Metrics::default());
    let listener =
        Listener::from(listener).counted(&metrics.register(ConnectionMetrics::register), Purpose::Http);
    let connections = ConnectionLimits::from(connections).aging();
    let task = tokio::spawn(serve::http(listener, routes, connections, closing.clone()));
    Served { address, closing, task, metrics }
}

/// A connection whose bytes the test writes and reads.
pub struct RawClient(pub TcpStream);

impl RawClient {
    pub async fn connect(address: SocketAddr) -> Self {
        Self(TcpStream::connect(address).await.unwrap())
    }

    pub async fn send(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    /// Sends a request without a body, and returns the answer's status line. The connection stays open.
    pub async fn get(&mut self, path: &str) -> String {
        self.send(&format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await;
        soon("an answer", self.status_line()).await
    }

    /// Reads an answer without a body, and returns its status line.
    pub async fn status_line(&mut self) -> String {
        self.head().await.lines().next().unwrap().to_owned()
    }

    /// Reads the head of an answer.
    pub async fn head(&mut self) -> String {
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            let byte = self.0.read_u8().await.expect("the connection was closed");
            answer.push(byte);
        }
        String::from_utf8(answer).unwrap()
    }

    /// Completes once the server has closed the connection. Panics if it answers.
    pub async fn closed(&mut self) {
        match soon("the end of the connection", self.0.read_u8()).await {
            Err(_) => {}
            Ok(byte) => panic!("the server answered, beginning with {byte}"),
        }
    }

    /// Completes once the server has closed the connection, even if it has sent bytes before.
    pub async fn closed_whatever_it_says(&mut self) {
        self.bytes().await;
    }

    /// Reads all that the server sends until it closes the connection.
    pub async fn rest(&mut self) -> String {
        String::from_utf8(self.bytes().await).unwrap()
    }

    /// Reads all that the server sends until it closes the connection: text, or frames of HTTP/2.
    async fn bytes(&mut self) -> Vec<u8> {
        let mut said = Vec::new();
        let _ = self.0.read_to_end(&mut said).await;
        said
    }
}
