//! Servers that only stream, as backends of the baseline's router. One process serves all of them, each on its own
//! port. This process runs the bench's own executable.
//!
//! A backend has the timing of the simulated device: it runs steps of equal length while it has requests. A request
//! that arrives during a step takes part from the next step on. The event of every token is the same.

use std::{
    net::{Ipv4Addr, TcpListener},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tutti_load::client::Target;

use super::cluster::{free_port, wait_until_ready};

/// First argument of the process that serves the backends.
const AS_BACKENDS: &str = "--as-backends";
pub const MODEL: &str = "backend";
/// The event of one token. It is as long as Tutti's event.
const TOKEN: &str = r#"data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1790000000,"model":"backend","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":[517]}],"usage":null}"#;
/// Timeout of requests to a backend.
pub const TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of requests that wait for a backend's next step.
const ARRIVALS: usize = 4096;

/// The process that serves the backends.
pub struct Backends {
    process: Child,
    pub urls: Vec<String>,
    /// Client of one of the backends.
    pub target: Target,
}

impl Backends {
    pub async fn start(number: usize, step: Duration) -> Result<Self, String> {
        let ports = (0..number).map(|_| free_port()).collect::<Result<Vec<_>, _>>()?;
        let program = std::env::current_exe().map_err(|e| format!("this executable: {e}"))?;
        let process = Command::new(program)
            .args([AS_BACKENDS, &step.as_micros().to_string()])
            .args(ports.iter().map(u16::to_string))
            .stdin(Stdio::null())
            .spawn()
            .map_err(|e| format!("the backends do not start: {e}"))?;
        let urls: Vec<String> = ports.iter().map(|port| format!("http://127.0.0.1:{port}")).collect();
        // From here on, an error drops `backends`, which ends the process.
        let mut backends = Self { process, target: Target::named(&urls[0], MODEL, TIMEOUT)?, urls };
        for url in &backends.urls {
            backends.target = wait_until_ready(url, Instant::now()).await?;
        }
        Ok(backends)
    }

    pub fn process(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Backends {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Serves the backends if this process was started to do so. Returns `None` at once otherwise.
pub fn serve_if_asked() -> Option<Result<(), String>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [flag, step_us, ports @ ..] = &arguments[..] else { return None };
    (flag == AS_BACKENDS).then(|| {
        let step = step_us.parse().map_err(|e| format!("step {step_us}: {e}"))?;
        let ports = ports.iter().map(|port| port.parse().map_err(|e| format!("port {port}: {e}")));
        serve(Duration::from_micros(step), ports.collect::<Result<_, _>>()?)
    })
}

fn serve(step: Duration, ports: Vec<u16>) -> Result<(), String> {
    let runtime = tokio::runtime::Runtime::new().map_err(|e| format!("no runtime: {e}"))?;
    runtime.block_on(async {
        let mut servers = tokio::task::JoinSet::new();
        for port in ports {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
                .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
                .and_then(tokio::net::TcpListener::from_std)
                .map_err(|e| format!("port {port}: {e}"))?;
            let (arrivals, device) = mpsc::channel(ARRIVALS);
            thread::spawn(move || run_steps(device, step));
            servers.spawn(axum::serve(tcp_nodelay(listener), routes(arrivals)).into_future());
        }
        let ended = servers.join_next().await;
        Err(format!("a backend ended: {ended:?}"))
    })
}

fn tcp_nodelay(
    listener: tokio::net::TcpListener,
) -> impl axum::serve::Listener<Io = tokio::net::TcpStream, Addr = std::net::SocketAddr> {
    use axum::serve::ListenerExt;
    listener.tap_io(|stream| {
        // The error is ignored: a connection without TCP_NODELAY is served, too.
        let _ = stream.set_nodelay(true);
    })
}

struct Arrival {
    left: u32,
    events: mpsc::Sender<Bytes>,
}

/// Runs the simulated device of one backend.
fn run_steps(mut arrivals: mpsc::Receiver<Arrival>, step: Duration) {
    let mut running: Vec<Arrival> = Vec::new();
    let token = Bytes::from(format!("{TOKEN}\n\n"));
    loop {
        if running.is_empty() {
            let Some(first) = arrivals.blocking_recv() else { return };
            running.push(first);
        }
        while let Ok(next) = arrivals.try_recv() {
            running.push(next);
        }
        thread::sleep(step);
        running.retain_mut(|request| {
            request.left -= 1;
            // The channel has room for all tokens of the request, so sending fails only if the client has disconnected.
            request.events.try_send(token.clone()).is_ok() && request.left > 0
        });
    }
}

fn routes(arrivals: mpsc::Sender<Arrival>) -> Router {
    let model = json!({ "model_path": MODEL, "served_model_name": MODEL, "is_generation": true });
    let models = json!({ "object": "list", "data": [{ "id": MODEL, "object": "model" }] });
    let fixed = |value: serde_json::Value| get(move || async move { Json(value) });
    Router::new()
        .route("/v1/completions", post(complete))
        .route("/v1/models", fixed(models))
        // Routes that SGLang's router queries on its servers.
        .route("/model_info", fixed(model.clone()))
        .route("/get_model_info", fixed(model.clone()))
        .route("/server_info", fixed(model.clone()))
        .route("/get_server_info", fixed(model))
        .route("/health", get(|| async {}))
        .route("/ready", get(|| async {}))
        .layer(DefaultBodyLimit::disable())
        .with_state(arrivals)
}

#[derive(Deserialize)]
struct Asked {
    max_tokens: u32,
}

async fn complete(State(arrivals): State<mpsc::Sender<Arrival>>, body: Bytes) -> Response {
    let asked = match serde_json::from_slice::<Asked>(&body) {
        Ok(asked) if asked.max_tokens > 0 => asked,
        _ => return StatusCode::BAD_REQUEST.into_response(),
    };
    let (events, coming) = mpsc::channel(asked.max_tokens as usize);
    if arrivals.send(Arrival { left: asked.max_tokens, events }).await.is_err() {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    let usage = json!({ "usage": { "prompt_tokens": 1, "completion_tokens": asked.max_tokens } });
    let closing = Bytes::from(format!("data: {usage}\n\ndata: [DONE]\n\n"));
    let events = ReceiverStream::new(coming).chain(tokio_stream::once(closing));
    let events = Body::from_stream(events.map(Ok::<_, std::convert::Infallible>));
    ([(header::CONTENT_TYPE, "text/event-stream")], events).into_response()
}
