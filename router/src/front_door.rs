//! One front door: everything that its HTTP and gRPC surfaces share, and the task that follows the conductor.

use std::{sync::Arc, time::Duration};

use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tutti_runtime::{
    Error, ErrorKind,
    health::{Health, State},
    metrics::Metrics,
};

use crate::{
    config::RouterConfig, generation::Generator, grpc, http, metrics::RouterMetrics, served::ServedModel,
};

/// How often the conductor is asked whether it is ready: while that is soon to change, and while it is not.
const POLL_STARTING: Duration = Duration::from_millis(100);
const POLL_SETTLED: Duration = Duration::from_secs(1);

/// A conductor that has not answered within this is taken to be unable to.
const PATIENCE: Duration = Duration::from_secs(5);

/// Flow control towards the conductor: what one slow client leaves unread stays within its own stream's window, and
/// the connection's window holds a thousand such streams, so that nobody else stalls.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 64 << 20;

/// Settings that every connection to a conductor should have, in-process or not.
pub fn tune(endpoint: Endpoint) -> Endpoint {
    endpoint.initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW)
}

/// The front door of one conductor; clones share it.
#[derive(Clone)]
pub struct FrontDoor {
    generator: Arc<Generator>,
    max_body_bytes: usize,
}

impl FrontDoor {
    /// A front door to the conductor behind `channel` (see [`tune`]). Answers 503 until [`FrontDoor::follow`] has
    /// fetched the model's description and text files.
    pub fn new(channel: Channel, config: &RouterConfig, metrics: &Metrics) -> Result<Self, Error> {
        config.validate()?;
        let metrics = RouterMetrics::register(metrics);
        let max_body_bytes = config.max_body_bytes;
        Ok(Self { generator: Arc::new(Generator::new(channel, config, metrics)), max_body_bytes })
    }

    /// The OpenAI routes, with OpenAI's error shape for unknown routes too. To be merged with
    /// [`tutti_runtime::operations::routes`].
    pub fn http_routes(&self) -> axum::Router {
        http::routes(self.generator.clone(), self.max_body_bytes)
    }

    /// `tutti.v1.Inference`, reflection, and `grpc.health.v1` following `health`'s readiness. Must be called inside
    /// a Tokio runtime; a composer may add services of its own.
    pub fn grpc_routes(&self, health: &Health) -> Result<tonic::service::Routes, Error> {
        grpc::routes(self.generator.clone(), self.max_body_bytes, health)
    }

    /// Follows the conductor for as long as it is polled: fetches what is served once it is there, again when it
    /// changes, and writes into `health` whether a request sent now would be served. It is the readiness's only
    /// writer where a router runs.
    pub async fn follow(self, health: Health) {
        loop {
            let (state, pause) = match self.refresh().await {
                Ok(State::Ok) => (State::Ok, POLL_SETTLED),
                Ok(not) => (not, POLL_STARTING),
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    (State::Not(error.to_string()), POLL_STARTING)
                }
                // A file that cannot be read, say: looking again soon would cost much and help little.
                Err(error) => (State::Not(error.to_string()), POLL_SETTLED),
            };
            if health.ready() != state {
                match &state {
                    State::Ok => tracing::info!("the front door is ready"),
                    State::Not(reason) => tracing::info!(%reason, "the front door is not ready"),
                }
            }
            health.set_ready(state);
            tokio::time::sleep(pause).await;
        }
    }

    /// Completes once no generation is under way. While this is polled, no new one is admitted: it is for the end.
    pub async fn idle(&self) {
        self.generator.idle().await;
    }

    /// Asks the conductor what it serves and fetches the text files when that changed; says whether it is ready too.
    async fn refresh(&self) -> Result<State, Error> {
        let silent = |_| Error::unavailable("the conductor does not answer");
        let (description, ready) = timeout(PATIENCE, self.generator.describe()).await.map_err(silent)??;
        let known = self.generator.served();
        if known.is_none_or(|served| served.description != description) {
            let model = ServedModel::fetch(&self.generator, description).await?;
            self.generator.publish(model);
        }
        Ok(ready)
    }
}
