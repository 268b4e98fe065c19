use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::Frame;
use tokio::{net::TcpListener, sync::mpsc};
use tonic::{Code, body::Body, service::Routes, transport::Endpoint};
use tower::{Service, ServiceExt};
use tutti_runtime::{serve, shutdown::Shutdown};
use tutti_settings::ConnectionSettings;

use crate::support::{RawClient, patient, soon};

/// A body of the pieces that are sent to it.
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

struct Server(std::net::SocketAddr);

impl Server {
    /// Serves `grpc.health.v1`, whose `Check` takes one message.
    async fn start(connections: ConnectionSettings) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (reporter, health) = tonic_health::server::health_reporter();
        reporter.set_service_status("", tonic_health::ServingStatus::Serving).await;
        let routes = Routes::new(health);
        let windows = serve::Windows::default();
        tokio::spawn(serve::grpc(listener, routes, windows, connections, Shutdown::default()));
        Self(address)
    }

    /// Begins a call of `Check` whose message is sent in pieces, and awaits the status.
    async fn check(&self, pieces: mpsc::Receiver<Bytes>) -> Code {
        let mut channel =
            Endpoint::from_shared(format!("http://{}", self.0)).unwrap().connect().await.unwrap();
        let request = http::Request::post(format!("http://{}/grpc.health.v1.Health/Check", self.0))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(Body::new(Pieces(pieces)))
            .unwrap();
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

/// The first bytes of a message of `length` bytes.
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
    // A call without a message ends as well.
    let (_send, pieces) = mpsc::channel(4);
    assert_eq!(soon("the end of the call", server.check(pieces)).await, Code::DeadlineExceeded);
    let (send, pieces) = mpsc::channel(4);
    send.send(beginning(0, 0)).await.unwrap();
    drop(send);
    assert_eq!(soon("an answer", server.check(pieces)).await, Code::Ok);
}

#[tokio::test]
async fn all_messages_that_arrive_share_one_room() {
    let server = Server::start(ConnectionSettings { receive_room_bytes: 4000, ..patient() }).await;
    // An unknown field of 2500 bytes: the message is valid once it is whole.
    let message: Vec<u8> = [&beginning(2503, 0)[..], &[0x7a, 0xc4, 0x13], &[7; 2500]].concat();
    let (begin, end) = message.split_at(2400);
    let ((first, first_pieces), (second, second_pieces)) = (mpsc::channel(4), mpsc::channel(4));
    for send in [&first, &second] {
        send.send(Bytes::copy_from_slice(begin)).await.unwrap();
    }
    let (mut first_call, mut second_call) =
        (Box::pin(server.check(first_pieces)), Box::pin(server.check(second_pieces)));
    // The second one to arrive finds no room.
    let (code, accepted, rest) = tokio::select! {
        code = soon("a refusal", &mut first_call) => (code, second, second_call),
        code = &mut second_call => (code, first, first_call),
    };
    assert_eq!(code, Code::ResourceExhausted);
    accepted.send(Bytes::copy_from_slice(end)).await.unwrap();
    drop(accepted);
    assert_eq!(soon("an answer", rest).await, Code::Ok);
    // Its room is free again.
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
