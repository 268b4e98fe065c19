//! Fake conductors on real sockets. Each fake has its own runtime, so that it can be killed like a process.

mod fake;

use std::time::Duration;

use axum::{
    body::{Body, Bytes},
    http::{Request, StatusCode, header},
};
use futures_util::{StreamExt, stream::BoxStream};
use serde_json::{Value, json};
use tokio::time::timeout;
use tower::ServiceExt;
use tutti_router::{Access, Conductors, FleetSettings, FrontDoor, RouterSettings};
use tutti_runtime::{
    health::{Health, State},
    metrics::Metrics,
};

pub use fake::{Fake, token_at};

/// Awaits a future. Fails the test with the text `what` if the future takes more than 30 seconds.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(30), future).await.unwrap_or_else(|_| panic!("{what} does not happen"))
}

/// A front door to several conductors.
pub struct Router {
    pub front_door: FrontDoor,
    pub health: Health,
    pub metrics: Metrics,
}

/// Settings with a short poll interval, and with timeouts that suit a machine that is busy with other tests.
pub fn settings() -> FleetSettings {
    FleetSettings {
        poll_ms: 20,
        answer_timeout_ms: 20_000,
        keep_alive_ms: 20_000,
        ..FleetSettings::default()
    }
}

/// Settings with short timeouts, for conductors that fall silent.
pub fn impatient() -> FleetSettings {
    FleetSettings { answer_timeout_ms: 500, keep_alive_ms: 300, ..settings() }
}

impl Router {
    /// Starts a router to these conductors, and waits until all of them get requests.
    pub async fn before(fakes: &[&Fake], settings: FleetSettings) -> Self {
        let urls: Vec<String> = fakes.iter().map(|fake| fake.url.clone()).collect();
        let router = Self::to(&urls, settings).await;
        router.all_in_use().await;
        router
    }

    /// Starts a router to these URLs.
    pub async fn to(urls: &[String], settings: FleetSettings) -> Self {
        let (health, metrics) = (Health::default(), Metrics::default());
        let conductors = Conductors::new(urls, None, Access::default(), &settings).unwrap();
        let front_door =
            FrontDoor::before(conductors, settings, RouterSettings::default(), &metrics).unwrap();
        tokio::spawn(front_door.clone().follow(health.clone()));
        Self { front_door, health, metrics }
    }

    pub async fn all_in_use(&self) {
        self.until("every conductor in use", || {
            self.health.ready() == State::Ok && self.health.remarks().is_empty()
        })
        .await;
    }

    /// Polls a condition until it is true, since changes of metrics and remarks cannot be awaited.
    pub async fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let looking = async {
            while !condition() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(30), looking)
            .await
            .unwrap_or_else(|_| panic!("{what}: {:?} {:?}", self.health.ready(), self.health.remarks()));
    }

    /// The value of a metric; 0 if the metric does not exist. `name` includes the labels.
    pub fn metric(&self, name: &str) -> u64 {
        let text = self.metrics.encode();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0, |value| value.parse().unwrap())
    }

    /// The value of a metric for one conductor.
    pub fn metric_of(&self, name: &str, fake: &Fake) -> u64 {
        self.metric(&format!("{name}{{conductor=\"{}\"}}", fake.url))
    }

    /// Sends a completion request. Returns the status and the body of the answer.
    pub async fn complete(&self, body: &Value) -> (StatusCode, Value) {
        let response = self.front_door.http_routes().oneshot(post(body)).await.unwrap();
        let status = response.status();
        let bytes = soon("an answer", axum::body::to_bytes(response.into_body(), usize::MAX)).await.unwrap();
        (status, serde_json::from_slice(&bytes).unwrap())
    }

    /// Sends a streamed completion request. Returns the stream of its events.
    pub async fn stream(&self, body: &Value) -> Events {
        let mut body = body.clone();
        body["stream"] = json!(true);
        let response = self.front_door.http_routes().oneshot(post(&body)).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        let events = response.into_body().into_data_stream().map(|piece| piece.unwrap());
        Events { events: events.boxed(), left: String::new() }
    }
}

fn post(body: &Value) -> Request<Body> {
    let json = Body::from(body.to_string());
    Request::post("/v1/completions").header(header::CONTENT_TYPE, "application/json").body(json).unwrap()
}

/// A request for this many tokens after a prompt of token ids.
pub fn ask(prompt: &[u32], max_tokens: u32) -> Value {
    json!({ "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": true, "return_token_ids": true })
}

/// The tokens that every fake conductor generates after a prompt.
pub fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
    (0..count).map(|index| token_at(prompt, index)).collect()
}

/// A stream of server-sent events.
pub struct Events {
    events: BoxStream<'static, Bytes>,
    left: String,
}

impl Events {
    /// The next event; `None` after `[DONE]` or the end of the stream.
    pub async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some((event, rest)) = self.left.split_once("\n\n") {
                let data = event.strip_prefix("data: ").unwrap().to_owned();
                self.left = rest.to_owned();
                return (data != "[DONE]").then(|| serde_json::from_str(&data).unwrap());
            }
            let piece = soon("an event", self.events.next()).await?;
            self.left.push_str(std::str::from_utf8(&piece).unwrap());
        }
    }

    /// Reads at least this many tokens of the only choice.
    pub async fn tokens(&mut self, count: usize) -> Vec<u32> {
        let mut tokens = Vec::new();
        while tokens.len() < count {
            tokens.extend(token_ids(&self.next().await.unwrap(), 0));
        }
        tokens
    }

    /// Reads the stream to its end. Returns the tokens of each choice, and the errors.
    pub async fn rest(mut self, choices: usize) -> (Vec<Vec<u32>>, Vec<Value>) {
        let (mut tokens, mut errors) = (vec![Vec::new(); choices], Vec::new());
        while let Some(event) = self.next().await {
            errors.extend(event.get("error").cloned());
            for (choice, tokens) in tokens.iter_mut().enumerate() {
                tokens.extend(token_ids(&event, choice));
            }
        }
        (tokens, errors)
    }
}

/// The token ids of a choice in an answer or event.
pub fn token_ids(event: &Value, choice: usize) -> Vec<u32> {
    let choices = event["choices"].as_array().map_or(&[][..], Vec::as_slice);
    let of_choice = choices.iter().filter(|c| c["index"] == choice);
    let ids = of_choice.flat_map(|c| c["token_ids"].as_array().cloned().unwrap_or_default());
    ids.map(|id| id.as_u64().unwrap() as u32).collect()
}
