use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::StreamExt;
use http_body::Frame;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::mpsc,
};
use tonic::{
    Code,
    body::Body,
    service::{Routes, interceptor::InterceptedService},
    transport::Endpoint,
};
use tower::{Service, ServiceExt};
use tutti_runtime::{
    metrics::Metrics,
    serve::{self, ConnectionLimits, ConnectionMetrics, Listener, Purpose},
    shutdown::Shutdown,
};
use tutti_settings::ConnectionSettings;

use crate::support::{RawClient, patient, soon};

/// A request body made of the pieces that a channel delivers.
struct Pieces(mpsc::Receiver<Bytes>);

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}

struct Server(std::net::SocketAddr, Metrics);

impl Server {
    /// Serves `grpc.health.v1`, whose `Check` takes one message. A caller that shows `authorization` is known.
    async fn start(connections: ConnectionSettings) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (reporter, health) = tonic_health::server::health_reporter();
        reporter.set_service_status("", tonic_health::ServingStatus::Serving).await;
        let routes = Routes::new(InterceptedService::new(health, |request: tonic::Request<()>| {
            if request.metadata().contains_key("authorization") {
                serve::Standing::vouch(request.extensions());
            }
            Ok(request)
        }));
        let windows = serve::Windows::default();
        let metrics = Metrics::default();
        let counts = metrics.register(ConnectionMetrics::register);
        let listener = Listener::from(listener).counted(&counts, Purpose::Grpc);
        let connections = ConnectionLimits::from(connections).aging();
        tokio::spawn(serve::grpc(listener, routes, windows, connections, Shutdown::default()));
        Self(address, metrics)
    }

    /// Number of open connections.
    fn connections(&self) -> usize {
        let name = r#"tutti_connections_open{listener="grpc"} "#;
        let text = self.1.encode();
        text.lines().find_map(|line| line.strip_prefix(name)).map_or(0, |count| count.parse().unwrap())
    }

    /// Calls `Check` as a known caller, with a message that is sent in pieces. Returns the status code.
    async fn check(&self, pieces: mpsc::Receiver<Bytes>) -> Code {
        self.check_as(Some("known"), pieces).await
    }

    async fn check_as(&self, credential: Option<&str>, pieces: mpsc::Receiver<Bytes>) -> Code {
        let mut channel =
            Endpoint::from_shared(format!("http://{}", self.0)).unwrap().connect().await.unwrap();
        let mut request = http::Request::post(format!("http://{}/grpc.health.v1.Health/Check", self.0))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        if let Some(credential) = credential {
            request = request.header("authorization", credential);
        }
        let request = request.body(Body::new(Pieces(pieces))).unwrap();
        let answer = channel.ready().await.unwrap().call(request).await.unwrap();
        let (parts, mut body) = answer.into_parts();
        let mut trailers = parts.headers;
        while let Some(frame) =
            std::future::poll_fn(|context| http_body::Body::poll_frame(Pin::new(&mut body), context)).await
        {
            if let Ok(more) = frame.unwrap().into_trailers() {
                trailers.extend(more);
            }
        }
        Code::from_bytes(trailers["grpc-status"].as_bytes())
    }
}

/// The prefix of a message of `length` bytes, and the message's first `bytes` bytes.
fn beginning(length: u32, bytes: usize) -> Bytes {
    let mut message = vec![0];
    message.extend(length.to_be_bytes());
    message.resize(5 + bytes, 0);
    message.into()
}

#[tokio::test]
async fn a_message_that_does_not_arrive_ends_its_call() {
    let server = Server::start(ConnectionSettings { receive_timeout_ms: 200, ..patient() }).await;
    let (send, pieces) = mpsc::channel(4);
    send.send(beginning(100, 10)).await.unwrap();
    assert_eq!(soon("the end of the call", server.check(pieces)).await, Code::DeadlineExceeded);
    // A call that sends no message times out, too.
    let (_send, pieces) = mpsc::channel(4);
    assert_eq!(soon("the end of the call", server.check(pieces)).await, Code::DeadlineExceeded);
    let (send, pieces) = mpsc::channel(4);
    send.send(beginning(0, 0)).await.unwrap();
    drop(send);
    assert_eq!(soon("an answer", server.check(pieces)).await, Code::Ok);
}

#[tokio::test]
async fn all_messages_that_arrive_share_one_room() {
    let server = Server::start(ConnectionSettings { receive_room_bytes: 8000, ..patient() }).await;
    // The messages of one address may take half of the room. This message is one unknown field of 2500 bytes, so it is
    // valid once it is complete.
    let message: Vec<u8> = [&beginning(2503, 0)[..], &[0x7a, 0xc4, 0x13], &[7; 2500]].concat();
    let (begin, end) = message.split_at(2400);
    let ((first, first_pieces), (second, second_pieces)) = (mpsc::channel(4), mpsc::channel(4));
    for send in [&first, &second] {
        send.send(Bytes::copy_from_slice(begin)).await.unwrap();
    }
    let (mut first_call, mut second_call) =
        (Box::pin(server.check(first_pieces)), Box::pin(server.check(second_pieces)));
    // The call whose bytes arrive second finds no room.
    let (code, accepted, rest) = tokio::select! {
        code = soon("a refusal", &mut first_call) => (code, second, second_call),
        code = &mut second_call => (code, first, first_call),
    };
    assert_eq!(code, Code::ResourceExhausted);
    accepted.send(Bytes::copy_from_slice(end)).await.unwrap();
    drop(accepted);
    assert_eq!(soon("an answer", rest).await, Code::Ok);
    // All room is free again, so the same message is accepted.
    let (send, pieces) = mpsc::channel(4);
    send.send(message.into()).await.unwrap();
    drop(send);
    assert_eq!(soon("an answer", server.check(pieces)).await, Code::Ok);
}

#[tokio::test]
async fn strangers_who_send_parts_of_messages_hold_up_nobody_with_a_credential() {
    let server = Server::start(ConnectionSettings { receive_room_bytes: 64_000, ..patient() }).await;
    let server = &server;
    // Each stranger sends 3000 bytes of a message and never sends the rest. Only one message finds room.
    let mut strangers = Vec::new();
    let mut calls: futures_util::stream::FuturesUnordered<_> = (0..40)
        .map(|_| {
            let (send, pieces) = mpsc::channel(4);
            send.try_send(beginning(60_000, 3000)).unwrap();
            strangers.push(send);
            server.check_as(None, pieces)
        })
        .collect();
    let refused = async {
        for _ in 0..39 {
            assert_eq!(calls.next().await, Some(Code::ResourceExhausted));
        }
    };
    soon("the refusal of all strangers but one", refused).await;
    // The last stranger holds as much as one address of strangers may. A known caller's message still finds most of the
    // room.
    let message: Vec<u8> = [&beginning(25_004, 0)[..], &[0x7a, 0xa8, 0xc3, 0x01], &[7; 25_000]].concat();
    let (send, pieces) = mpsc::channel(4);
    send.send(message.into()).await.unwrap();
    drop(send);
    assert_eq!(soon("an answer", server.check(pieces)).await, Code::Ok);
}

#[tokio::test]
async fn a_connection_that_never_speaks_http2_is_closed() {
    let server =
        Server::start(ConnectionSettings { header_timeout_ms: 200, idle_timeout_ms: 200, ..patient() }).await;
    let mut silent = RawClient::connect(server.0).await;
    let mut partial = RawClient::connect(server.0).await;
    partial.send("PRI * HTTP/2").await;
    soon("the end of the silent connection", silent.closed_whatever_it_says()).await;
    soon("the end of the partial connection", partial.closed_whatever_it_says()).await;
}

#[tokio::test]
async fn an_old_connection_ends_with_its_last_call_and_the_next_one_opens_another() {
    let server = Server::start(ConnectionSettings { max_age_s: 1, ..patient() }).await;
    let channel = Endpoint::from_shared(format!("http://{}", server.0)).unwrap().connect_lazy();
    let mut client = tonic_health::pb::health_client::HealthClient::new(channel);
    let request = || tonic_health::pb::HealthCheckRequest { service: String::new() };
    // A call in progress continues when its connection reaches the maximum age.
    let mut watch = client.watch(request()).await.unwrap().into_inner();
    watch.message().await.unwrap().unwrap();
    let first = server.connections();
    let another = async {
        loop {
            if let Err(status) = client.check(request()).await {
                // When a connection ends, this client cancels a call that it has not sent yet.
                assert_eq!(status.code(), Code::Cancelled, "{status}");
            }
            if server.connections() > first {
                return;
            }
        }
    };
    soon("another connection", another).await;
    let still = tokio::time::timeout(std::time::Duration::from_millis(10), watch.message()).await;
    assert!(still.is_err(), "the call over the old connection ended: {still:?}");
}

#[tokio::test]
async fn a_flood_of_frames_that_are_no_requests_ends_its_connection() {
    let server = Server::start(patient()).await;
    // Frames of the types PRIORITY and WINDOW_UPDATE, and of a type that HTTP/2 does not define.
    for (kind, payload) in [(2_u8, &[0, 0, 0, 0, 7][..]), (8, &[0, 0, 0, 1]), (0xbe, &[])] {
        let mut attacker = RawClient::connect(server.0).await;
        attacker.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
        let stream = if kind == 8 { 0 } else { 1 };
        let frame = [&[0, 0, payload.len() as u8, kind, 0, 0, 0, 0, stream][..], payload].concat();
        let flood = frame.repeat(1000);
        let (mut reader, mut writer) = attacker.0.into_split();
        writer.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await.unwrap();
        let send = async move { while writer.write_all(&flood).await.is_ok() {} };
        let end = async move {
            let mut said = Vec::new();
            let _ = reader.read_to_end(&mut said).await;
        };
        soon("the end of the flood", async { tokio::join!(send, end) }).await;
    }
    let (send, pieces) = mpsc::channel(4);
    send.send(beginning(0, 0)).await.unwrap();
    drop(send);
    assert_eq!(soon("an answer", server.check(pieces)).await, Code::Ok);
}
