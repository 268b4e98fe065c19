use std::{convert::Infallible, pin::Pin, sync::Arc, task::Poll, time::Duration};

use axum::{Extension, Router, body::Body, routing::get};
use bytes::Bytes;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpStream, UnixListener},
    sync::{Notify, Semaphore, mpsc},
    time::sleep,
};
use tutti_runtime::{
    health::Health,
    operations,
    serve::{self, Peer},
    shutdown::Shutdown,
};
use tutti_settings::ConnectionSettings;

use crate::support::{RawClient, http, patient, soon};

/// `/` answers at once. `/busy` adds a permit to `arrived`, and answers once it gets a permit of `answer`.
fn routes(arrived: Arc<Semaphore>, answer: Arc<Semaphore>) -> Router {
    let busy = || async move {
        arrived.add_permits(1);
        answer.acquire().await.unwrap().forget();
    };
    Router::new().route("/", get(|| async {})).route("/busy", get(busy))
}

fn simple_routes() -> Router {
    routes(semaphore(), semaphore())
}

fn semaphore() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(0))
}

#[tokio::test]
async fn a_head_that_drips_ends_its_connection_and_a_whole_one_is_answered() {
    let limits = ConnectionSettings { header_timeout_ms: 200, ..patient() };
    let served = http(simple_routes(), limits).await;
    let mut good = RawClient::connect(served.address).await;
    assert_eq!(good.get("/").await, "HTTP/1.1 200 OK");
    let mut slow = RawClient::connect(served.address).await;
    slow.send("GET / HTTP/1.1\r\n").await;
    let (mut reader, mut writer) = slow.0.into_split();
    let drip = async move {
        // A timeout that restarts with every read would never end this connection.
        while writer.write_all(b"x").await.is_ok() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    let closed = async move {
        let mut byte = [0];
        tokio::io::AsyncReadExt::read(&mut reader, &mut byte).await
    };
    let (answer, ()) = soon("the end of the slow connection", async { tokio::join!(closed, drip) }).await;
    assert!(matches!(answer, Ok(0) | Err(_)), "the slow head was answered");
    // The header timeout does not limit the idle time of a kept-alive connection.
    assert_eq!(good.get("/").await, "HTTP/1.1 200 OK");
    // The header timeout also applies to the second head of a connection.
    good.send("GET / HT").await;
    good.closed().await;
    assert_eq!(served.closed_for("head_timeout"), 2);
}

#[tokio::test]
async fn an_idle_connection_is_closed_and_one_with_a_long_request_is_not() {
    let (arrived, answer) = (semaphore(), semaphore());
    let limits = ConnectionSettings { idle_timeout_ms: 200, ..patient() };
    let served = http(routes(arrived.clone(), answer.clone()), limits).await;
    let mut busy = RawClient::connect(served.address).await;
    busy.send("GET /busy HTTP/1.1\r\nhost: x\r\n\r\n").await;
    soon("the long request", arrived.acquire()).await.unwrap().forget();
    let mut silent = RawClient::connect(served.address).await;
    let mut kept_alive = RawClient::connect(served.address).await;
    assert_eq!(kept_alive.get("/").await, "HTTP/1.1 200 OK");
    silent.closed().await;
    kept_alive.closed().await;
    assert_eq!(served.closed_for("idle_timeout"), 2);
    answer.add_permits(1);
    assert_eq!(soon("the answer", busy.status_line()).await, "HTTP/1.1 200 OK");
}

/// An endless body that reports when it is dropped.
struct Endless(mpsc::Sender<()>);

impl Drop for Endless {
    fn drop(&mut self) {
        let _ = self.0.try_send(());
    }
}

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        Poll::Ready(Some(Ok(http_body::Frame::data(Bytes::from_static(&[7; 4096])))))
    }
}

#[tokio::test]
async fn a_reader_that_does_not_read_loses_its_connection() {
    let (dropped, mut drops) = mpsc::channel(1);
    let endless = move || async move { Body::new(Endless(dropped.clone())) };
    let limits = ConnectionSettings { write_timeout_ms: 300, ..patient() };
    let served = http(Router::new().route("/", get(endless)), limits).await;
    let mut client = RawClient::connect(served.address).await;
    client.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    soon("the end of the unread response", drops.recv()).await.unwrap();
}

#[tokio::test]
async fn idle_connections_do_not_keep_others_out_and_busy_ones_are_bounded() {
    let (arrived, answer) = (semaphore(), semaphore());
    let limits = ConnectionSettings { max_open: 4, ..patient() };
    let served = http(routes(arrived.clone(), answer.clone()), limits).await;
    let mut flood = Vec::new();
    for _ in 0..40 {
        flood.push(RawClient::connect(served.address).await);
    }
    let mut good = RawClient::connect(served.address).await;
    assert_eq!(good.get("/").await, "HTTP/1.1 200 OK");
    let mut busy = Vec::new();
    for _ in 0..4 {
        let mut client = RawClient::connect(served.address).await;
        client.send("GET /busy HTTP/1.1\r\nhost: x\r\n\r\n").await;
        busy.push(client);
    }
    soon("four requests", arrived.acquire_many(4)).await.unwrap().forget();
    let mut fifth = RawClient::connect(served.address).await;
    fifth.closed().await;
    assert_eq!((served.closed_for("limit"), served.closed_for("evicted")), (1, 41));
    answer.add_permits(4);
    for client in &mut busy {
        assert_eq!(soon("the answer", client.status_line()).await, "HTTP/1.1 200 OK");
    }
    assert_eq!(RawClient::connect(served.address).await.get("/").await, "HTTP/1.1 200 OK");
}

#[tokio::test]
async fn one_peer_cannot_hold_all_connections() {
    let (arrived, answer) = (semaphore(), semaphore());
    let limits = ConnectionSettings { max_open: 100, max_per_peer: 2, ..patient() };
    let served = http(routes(arrived.clone(), answer.clone()), limits).await;
    let mut greedy = Vec::new();
    for _ in 0..2 {
        let mut client = RawClient::connect(served.address).await;
        client.send("GET /busy HTTP/1.1\r\nhost: x\r\n\r\n").await;
        greedy.push(client);
    }
    soon("two requests", arrived.acquire_many(2)).await.unwrap().forget();
    RawClient::connect(served.address).await.closed().await;
    let other = tokio::net::TcpSocket::new_v4().unwrap();
    other.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut other = RawClient(other.connect(served.address).await.unwrap());
    assert_eq!(other.get("/").await, "HTTP/1.1 200 OK");
}

#[tokio::test]
async fn closing_ends_the_listener_and_idle_connections_and_waits_for_answers() {
    let (arrived, answer) = (semaphore(), semaphore());
    let served = http(routes(arrived.clone(), answer.clone()), patient()).await;
    let mut idle = RawClient::connect(served.address).await;
    assert_eq!(idle.get("/").await, "HTTP/1.1 200 OK");
    let mut busy = RawClient::connect(served.address).await;
    busy.send("GET /busy HTTP/1.1\r\nhost: x\r\n\r\n").await;
    soon("the request", arrived.acquire()).await.unwrap().forget();
    served.closing.begin();
    idle.closed().await;
    assert!(tokio::net::TcpStream::connect(served.address).await.is_err());
    assert!(!served.task.is_finished());
    answer.add_permits(1);
    assert_eq!(soon("the answer", busy.status_line()).await, "HTTP/1.1 200 OK");
    soon("the end of the server", served.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn handlers_learn_the_peer() {
    async fn peer(Extension(peer): Extension<Peer>) -> axum::http::StatusCode {
        match peer {
            Peer::Ip(address) if address.is_loopback() => axum::http::StatusCode::ACCEPTED,
            Peer::Ip(_) => axum::http::StatusCode::FORBIDDEN,
            Peer::Local => axum::http::StatusCode::CREATED,
        }
    }
    let routes = Router::new().route("/", get(peer));
    let served = http(routes.clone(), patient()).await;
    assert_eq!(RawClient::connect(served.address).await.get("/").await, "HTTP/1.1 202 Accepted");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(serve::http(listener, routes, patient(), Shutdown::default()));
    let mut client = tokio::net::UnixStream::connect(&path).await.unwrap();
    client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    soon("an answer", tokio::io::AsyncReadExt::read_to_string(&mut client, &mut answer)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
}

#[tokio::test]
async fn a_flood_of_headers_is_refused() {
    let served = http(simple_routes(), patient()).await;
    let mut client = RawClient::connect(served.address).await;
    client.send("GET / HTTP/1.1\r\n").await;
    let (mut reader, mut writer) = client.0.into_split();
    let refused = Notify::new();
    let flood = async {
        let line = format!("x: {}\r\n", "y".repeat(1000));
        let mut sent = 0;
        loop {
            tokio::select! {
                () = refused.notified() => return sent,
                written = writer.write_all(line.as_bytes()) => match written {
                    Ok(()) => sent += line.len(),
                    Err(_) => return sent,
                },
            }
        }
    };
    let answer = async {
        let mut answer = Vec::new();
        let _ = tokio::io::AsyncReadExt::read_to_end(&mut reader, &mut answer).await;
        refused.notify_one();
        answer
    };
    let (answer, sent) = soon("the refusal", async { tokio::join!(answer, flood) }).await;
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    // The bound includes bytes in the sockets' buffers that the server has not read.
    assert!(sent < 16 << 20, "the server took {sent} bytes of headers");
}

#[tokio::test]
async fn a_draining_process_answers_a_connection_once_more_and_ends_it() {
    let health = Health::default();
    let served = http(operations::moving_clients(simple_routes(), health.clone()), patient()).await;
    let mut client = RawClient::connect(served.address).await;
    assert_eq!(client.get("/").await, "HTTP/1.1 200 OK");
    assert_eq!(client.get("/").await, "HTTP/1.1 200 OK");
    health.drain();
    // An idle connection stays open, since its client may be sending a request.
    client.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let mut answer = String::new();
    soon("the end of the connection", client.0.read_to_string(&mut answer)).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.to_lowercase().contains("\r\nconnection: close\r\n"), "{answer}");
    // A draining process still serves a new connection until its listener closes.
    let mut late = RawClient::connect(served.address).await;
    assert_eq!(late.get("/").await, "HTTP/1.1 200 OK");
}

#[tokio::test]
async fn a_request_that_follows_the_last_answer_of_a_closing_server_is_answered() {
    let (arrived, answer) = (semaphore(), semaphore());
    let served = http(routes(arrived.clone(), answer.clone()), patient()).await;
    let mut client = RawClient::connect(served.address).await;
    client.send("GET /busy HTTP/1.1\r\nhost: x\r\n\r\n").await;
    soon("the request", arrived.acquire()).await.unwrap().forget();
    served.closing.begin();
    // Another task than the connection's closes the listener, so the test waits for this.
    soon("the end of the listener", async { while TcpStream::connect(served.address).await.is_ok() {} })
        .await;
    answer.add_permits(1);
    assert_eq!(soon("an answer", client.status_line()).await, "HTTP/1.1 200 OK");
    assert_eq!(client.get("/").await, "HTTP/1.1 200 OK");
    // A client that sends no further request does not keep the server running.
    client.closed().await;
    soon("the end of the server", served.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_gentle_end_answers_a_request_over_a_connection_that_was_idle_for_a_moment() {
    let served = http(simple_routes(), patient()).await;
    let mut client = RawClient::connect(served.address).await;
    assert_eq!(client.get("/").await, "HTTP/1.1 200 OK");
    served.closing.begin_gently();
    soon("the end of the listener", async { while TcpStream::connect(served.address).await.is_ok() {} })
        .await;
    assert_eq!(client.get("/").await, "HTTP/1.1 200 OK");
    client.closed().await;
    soon("the end of the server", served.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_old_connection_is_told_that_its_answer_is_the_last() {
    let served = http(simple_routes(), ConnectionSettings { max_age_s: 1, ..patient() }).await;
    let mut client = RawClient::connect(served.address).await;
    let last = async {
        loop {
            client.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
            let mut answer = Vec::new();
            while !answer.ends_with(b"\r\n\r\n") {
                answer.push(
                    client.0.read_u8().await.expect("a request over an old connection was not answered"),
                );
            }
            if String::from_utf8(answer).unwrap().to_lowercase().contains("connection: close") {
                return;
            }
        }
    };
    soon("the last answer", last).await;
    client.closed().await;
    assert_eq!(served.closed_for("max_age"), 1);
}

#[tokio::test]
async fn a_request_of_http_1_1_needs_one_host() {
    let served = http(simple_routes(), patient()).await;
    for (head, expected) in [
        ("GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        ("GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        ("GET / HTTP/1.1\r\nhost: a\r\n\r\n", "HTTP/1.1 200 OK"),
        ("GET / HTTP/1.0\r\n\r\n", "HTTP/1.0 200 OK"),
    ] {
        let mut client = RawClient::connect(served.address).await;
        client.send(head).await;
        assert_eq!(soon("the answer", client.status_line()).await, expected, "{head:?}");
    }
}
