//! The drain of a process that serves clients: its order, and its effect on clients.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use axum::{Router, http::StatusCode, routing::get};
use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};
use tonic::service::Routes;
use tutti_runtime::{
    Error,
    health::Health,
    process::{Background, Drain, Front, Ports, Servers, Started},
};
use tutti_settings::{AddressSettings, DrainSettings, RouterProcessSettings, TlsSettings};

use crate::support::{RawClient, patient, soon};

/// A request that runs until the test or [`Noted`] ends it.
#[derive(Clone, Default)]
struct Slow {
    runs: Arc<AtomicBool>,
    began: Arc<Notify>,
    end: Arc<Notify>,
}

impl Slow {
    async fn answer(self) -> &'static str {
        self.runs.store(true, SeqCst);
        self.began.notify_one();
        self.end.notified().await;
        self.runs.store(false, SeqCst);
        "done"
    }
}

/// A background that records its calls, and ends the request that has not finished in time.
struct Noted {
    calls: Arc<Mutex<Vec<&'static str>>>,
    slow: Slow,
}

impl Background for Noted {
    async fn drain(&mut self, drain: Drain) {
        self.calls.lock().push(if drain.deadline > Instant::now() { "drain in time" } else { "drain late" });
        self.slow.end.notify_one();
    }

    async fn stop(self) {
        self.calls.lock().push("stop");
    }
}

struct Process {
    started: Started<RouterProcessSettings>,
    servers: Servers,
    http: SocketAddr,
    slow: Slow,
    calls: Arc<Mutex<Vec<&'static str>>>,
}

/// A process whose running requests have `drain_timeout` seconds to finish.
fn process(drain_timeout: u32) -> Process {
    let local = SocketAddr::from(([127, 0, 0, 1], 0));
    let addresses = AddressSettings { http: local, grpc: local, operations: None };
    let drain = DrainSettings { drain_timeout, lame_duck: None };
    let settings = RouterProcessSettings {
        addresses,
        drain,
        connections: patient(),
        ..RouterProcessSettings::default()
    };
    let started = Started::silent(settings);
    let ports = Ports::bind(&started.settings.addresses, &TlsSettings::default()).unwrap();
    let (http, slow) = (ports.announcement(None).http, Slow::default());
    let (answering, running) = (slow.clone(), slow.runs.clone());
    let front = Front {
        routes: Router::new()
            .route("/slow", get(move || answering.clone().answer()))
            .route("/quick", get(|| async { "quick" })),
        refusals: Router::new().fallback(|| async { (StatusCode::SERVICE_UNAVAILABLE, "not any more") }),
        services: Routes::default(),
        health: Health::default(),
        is_idle: Box::new(move || !running.load(SeqCst)),
    };
    let servers = Servers::start(&started, ports, front).unwrap();
    Process { started, servers, http, slow, calls: Arc::default() }
}

async fn ask(client: &mut RawClient, path: &str) {
    client.send(&format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n")).await;
}

/// The answer to a client that connects now.
async fn answer(http: SocketAddr, path: &str) -> String {
    let mut client = RawClient::connect(http).await;
    client.send(&format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")).await;
    client.rest().await
}

#[tokio::test]
async fn a_drain_answers_the_running_request_and_turns_late_clients_away() {
    let Process { started, servers, http, slow, calls } = process(600);
    let client = async {
        let mut early = RawClient::connect(http).await;
        ask(&mut early, "/slow").await;
        soon("the request", slow.began.notified()).await;
        assert!(answer(http, "/quick").await.ends_with("quick"));
        started.shutdown.begin();
        while !answer(http, "/quick").await.ends_with("not any more") {}
        assert!(answer(http, "/ready").await.contains("draining"));
        assert!(answer(http, "/metrics").await.contains("\ntutti_draining 1\n"));
        assert!(calls.lock().is_empty(), "the request still runs");
        slow.end.notify_one();
        let answer = early.rest().await;
        assert!(answer.ends_with("done") && answer.contains("connection: close"), "{answer}");
    };
    let background = Noted { calls: calls.clone(), slow: slow.clone() };
    let drained = async { tokio::join!(servers.run(&started.shutdown, background), client) };
    soon("the end", drained).await.0.unwrap();
    assert_eq!(*calls.lock(), ["drain in time", "stop"]);
}

#[tokio::test]
async fn clients_are_told_what_becomes_of_a_request_that_does_not_finish_in_time() {
    let Process { started, servers, http, slow, calls } = process(0);
    let client = async {
        let mut early = RawClient::connect(http).await;
        ask(&mut early, "/slow").await;
        soon("the request", slow.began.notified()).await;
        started.shutdown.begin();
        assert!(early.rest().await.ends_with("done"));
    };
    let background = Noted { calls: calls.clone(), slow: slow.clone() };
    let drained = async { tokio::join!(servers.run(&started.shutdown, background), client) };
    soon("the end", drained).await.0.unwrap();
    assert_eq!(*calls.lock(), ["drain late", "stop"]);
}

struct Broken;

impl Background for Broken {
    async fn failed(&mut self) -> Error {
        Error::internal("no worker can run")
    }

    async fn drain(&mut self, _: Drain) {}
}

#[tokio::test]
async fn a_process_ends_with_the_error_of_what_works_behind_it() {
    let Process { started, servers, .. } = process(600);
    let error = soon("the end", servers.run(&started.shutdown, Broken)).await.unwrap_err();
    assert!(error.to_string().contains("no worker can run"), "{error}");
}
