//! Answers to requests whose bodies nobody read to their end.

use axum::{Router, http::StatusCode, routing::post};
use tokio::sync::mpsc;

use crate::support::{RawClient, Served, http, patient, soon};

/// Refuses every request with this status, without a look at its body. The receiver gets an item for each.
async fn refusing(status: StatusCode) -> (Served, mpsc::Receiver<()>) {
    let (refused, refusals) = mpsc::channel(1);
    let refuse = move || async move {
        refused.send(()).await.unwrap();
        status
    };
    (http(Router::new().route("/", post(refuse)), patient()).await, refusals)
}

fn head(length: usize, more: &str) -> String {
    format!("POST / HTTP/1.1\r\nhost: x\r\n{more}content-length: {length}\r\n\r\n")
}

/// True if the head of an answer says that no further request is answered on its connection.
fn is_last(answer: &str) -> bool {
    answer.lines().any(|line| line.eq_ignore_ascii_case("connection: close"))
}

#[tokio::test]
async fn a_refused_request_with_a_small_body_keeps_its_connection() {
    let (served, mut refusals) = refusing(StatusCode::UNAUTHORIZED).await;
    let mut tries = 0;
    loop {
        let mut client = RawClient::connect(served.address).await;
        client.send(&head(5, "")).await;
        // The request is refused before its body is sent.
        soon("the refusal", refusals.recv()).await.unwrap();
        client.send("12345").await;
        let answer = soon("the answer", client.head()).await;
        assert!(answer.starts_with("HTTP/1.1 401"), "{answer}");
        if !is_last(&answer) {
            client.send(&head(0, "")).await;
            soon("the next refusal", refusals.recv()).await.unwrap();
            assert!(soon("the next answer", client.head()).await.starts_with("HTTP/1.1 401"));
            return;
        }
        // A body that takes long to come, as on a busy machine, ends the connection; the answer has said so.
        client.closed().await;
        tries += 1;
        assert!(tries < 20, "no connection was kept");
    }
}

#[tokio::test]
async fn a_refused_request_with_a_large_body_is_the_last_one_and_is_told_so() {
    let (served, mut refusals) = refusing(StatusCode::UNSUPPORTED_MEDIA_TYPE).await;
    let mut client = RawClient::connect(served.address).await;
    let body = "x".repeat(500_000);
    client.send(&head(body.len(), "")).await;
    let answer = soon("the answer", client.head()).await;
    assert!(answer.starts_with("HTTP/1.1 415") && is_last(&answer), "{answer}");
    soon("the refusal", refusals.recv()).await.unwrap();
    // A client that sends its whole body before it reads is not reset.
    client.send(&body).await;
    assert_eq!(soon("the end", client.rest()).await, "");
}

#[tokio::test]
async fn a_client_that_waits_to_be_asked_for_its_body_is_told_at_once() {
    let (served, _refusals) = refusing(StatusCode::PAYLOAD_TOO_LARGE).await;
    let mut client = RawClient::connect(served.address).await;
    client.send(&head(5, "expect: 100-continue\r\n")).await;
    let answer = soon("the answer", client.head()).await;
    assert!(answer.starts_with("HTTP/1.1 413") && is_last(&answer), "{answer}");
    client.closed().await;
}

#[tokio::test]
async fn a_client_that_was_too_slow_loses_its_connection() {
    let (served, _refusals) = refusing(StatusCode::REQUEST_TIMEOUT).await;
    let mut client = RawClient::connect(served.address).await;
    client.send(&head(5, "")).await;
    let answer = soon("the answer", client.head()).await;
    assert!(answer.starts_with("HTTP/1.1 408") && is_last(&answer), "{answer}");
    client.closed().await;
}
