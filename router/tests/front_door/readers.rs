//! Clients that send slowly or do not read, over real sockets.

use std::{net::SocketAddr, time::Duration};

use axum::http::StatusCode;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    time::timeout,
};
use tutti_proto::{
    cluster::v1::RequestEvent,
    v1::{GenerateRequest, Output, generate_request::Prompt, inference_client::InferenceClient},
};
use tutti_router::RouterSettings;
use tutti_runtime::{serve, shutdown::Shutdown};
use tutti_settings::ConnectionSettings;

use crate::support::{self, Setup, Step, connect, logprob, ready_with, token};

/// Timeout of a wait, longer than any of these tests takes.
const PATIENCE: Duration = Duration::from_secs(120);
/// Number of output tokens that fill the buffers of a connection. Each token has the alternatives from [`endless`].
const TOKENS: usize = 20_000;

/// Serves the front door on a port.
async fn serve(setup: &Setup) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let routes = setup.front_door.http_routes();
    tokio::spawn(serve::http(listener, routes, ConnectionSettings::default(), Shutdown::default()));
    address
}

/// A script without an end, with more output than the buffers of a connection hold.
fn endless() -> Vec<Step> {
    let top: Vec<(u32, f32)> = (0..20).map(|id| (id, -1.0)).collect();
    let event = |index| {
        let mut sampled = token(index, 97);
        sampled.logprob = Some(logprob(-0.5, 1, &top));
        Step::Event(RequestEvent { tokens: vec![sampled], ..Default::default() })
    };
    (0..TOKENS).map(event).chain([Step::Hang]).collect()
}

fn impatient() -> RouterSettings {
    RouterSettings { reader_timeout_ms: 300, reader_bytes_per_second: 1 << 30, ..Default::default() }
}

#[tokio::test]
async fn a_stream_whose_reader_does_not_read_frees_its_place() {
    let mut setup = ready_with(RouterSettings { max_concurrent_choices: 1, ..impatient() }, true).await;
    setup.conductor.play(|_| endless());
    let address = serve(&setup).await;
    let mut silent = TcpStream::connect(address).await.unwrap();
    let body = json!({ "prompt": "a", "stream": true, "logprobs": 20 }).to_string();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    silent.write_all((head + &body).as_bytes()).await.unwrap();
    silent.readable().await.unwrap();
    // The client has got the head of the answer, and reads nothing.
    timeout(PATIENCE, setup.cancelled.recv()).await.unwrap().unwrap();
    setup.conductor.play(|_| support::says("ok"));
    let next = setup.post("/v1/completions", &json!({ "prompt": "a" })).await;
    assert_eq!(next.status, StatusCode::OK);
    let lost = "tutti_router_readers_lost_total 1";
    assert!(setup.metrics.encode().lines().any(|line| line == lost), "{}", setup.metrics.encode());
    // The stream of a lost reader ends without `[DONE]`, so that a client can tell that it is incomplete.
    let mut rest = Vec::new();
    let _ = timeout(PATIENCE, silent.read_to_end(&mut rest)).await.unwrap();
    assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
}

#[tokio::test]
async fn a_grpc_stream_whose_reader_does_not_read_frees_its_place() {
    let mut setup = ready_with(RouterSettings { max_concurrent_choices: 1, ..impatient() }, true).await;
    setup.conductor.play(|_| endless());
    let mut client = InferenceClient::new(connect(setup.front_door.grpc_routes(&setup.health).unwrap()));
    let request = GenerateRequest {
        prompt: Some(Prompt::Text("a".into())),
        output: Some(Output { logprobs: Some(20), ..Default::default() }),
        ..Default::default()
    };
    let unread = client.generate(request).await.unwrap();
    timeout(PATIENCE, setup.cancelled.recv()).await.unwrap().unwrap();
    setup.conductor.play(|_| support::says("ok"));
    assert_eq!(setup.post("/v1/completions", &json!({ "prompt": "a" })).await.status, StatusCode::OK);
    drop(unread);
}

#[tokio::test]
async fn slow_uploads_leave_room_for_others() {
    let setup = ready_with(RouterSettings { max_body_bytes: 1 << 20, ..Default::default() }, true).await;
    let address = serve(&setup).await;
    let mut slow = Vec::new();
    for encoding in ["content-length: 1048576", "transfer-encoding: chunked"].into_iter().cycle().take(64) {
        let mut client = TcpStream::connect(address).await.unwrap();
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\n{encoding}\r\n\r\n1\r\n{{\r\n");
        client.write_all(head.as_bytes()).await.unwrap();
        slow.push(client);
    }
    let body = json!({ "prompt": "hello" }).to_string();
    let mut good = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    good.write_all((head + &body).as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(PATIENCE, good.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    drop(slow);
}
