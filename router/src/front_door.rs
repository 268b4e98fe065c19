//! One front door: everything that its HTTP and gRPC surfaces share, and the task that follows the conductors.

use std::sync::Arc;

use tonic::{
    body::Body,
    codegen::http::{Request, Response},
    transport::Endpoint,
};
use tower::Service;
use tutti_runtime::{Error, health::Health, metrics::Metrics};
use tutti_settings::{FleetSettings, RouterSettings};

use crate::{
    fleet::{Conductors, Fleet},
    generation::Generator,
    grpc, http,
    metrics::RouterMetrics,
    served::CheckedText,
    way,
};

/// Flow control towards the conductor: what one slow client leaves unread stays within its own stream's window, and
/// the connection's window holds a thousand such streams, so that nobody else stalls.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 64 << 20;

/// Settings that every connection to a conductor should have.
pub fn tune(endpoint: Endpoint) -> Endpoint {
    endpoint.initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW)
}

/// The front door of one conductor or several; clones share it.
#[derive(Clone)]
pub struct FrontDoor {
    generator: Arc<Generator>,
    max_body_bytes: usize,
}

impl FrontDoor {
    /// A front door to the one conductor that it is part of, by its gRPC service or a channel (see [`tune`]): what that
    /// conductor says is final. Answers 503 until [`FrontDoor::follow`] has the model's description, and has fetched its
    /// text files unless what they give is known: `text`.
    pub fn new<S>(
        conductor: S,
        text: Option<CheckedText>,
        config: &RouterSettings,
        metrics: &Metrics,
    ) -> Result<Self, Error>
    where
        S: Service<Request<Body>, Response = Response<Body>, Future: Send> + Clone + Send + Sync + 'static,
        S::Error: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
    {
        let conductors =
            Conductors { fixed: vec![("embedded".into(), way::through(conductor))], discover: None };
        Self::to(conductors, FleetSettings::embedded(), text, config, metrics)
    }

    /// A front door to several conductors, any of which may die or come at any time.
    pub fn before(
        conductors: Conductors,
        settings: FleetSettings,
        config: &RouterSettings,
        metrics: &Metrics,
    ) -> Result<Self, Error> {
        Self::to(conductors, settings, None, config, metrics)
    }

    fn to(
        conductors: Conductors,
        settings: FleetSettings,
        text: Option<CheckedText>,
        config: &RouterSettings,
        metrics: &Metrics,
    ) -> Result<Self, Error> {
        config.validate()?;
        settings.validate()?;
        let fleet = Fleet::new(conductors, settings, config.skip_tokenizer_init, text, metrics);
        let metrics = RouterMetrics::register(metrics);
        let max_body_bytes = config.max_body_bytes;
        Ok(Self { generator: Arc::new(Generator::new(fleet, config, metrics)), max_body_bytes })
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

    /// Follows the conductors for as long as it is polled: fetches what is served once one of them is there, again when
    /// it changes, and writes into `health` whether a request sent now would be served. It is the readiness's only
    /// writer where a router runs.
    pub async fn follow(self, health: Health) {
        self.generator.fleet().clone().follow(health).await;
    }

    /// Asks the conductors how they are at once, where one may have become ready: [`FrontDoor::follow`] alone would ask
    /// at its next turn.
    pub fn ask_again(&self) {
        self.generator.fleet().ask_again();
    }

    /// Completes once no generation is under way. While this is polled, no new one is admitted: it is for the end.
    pub async fn idle(&self) {
        self.generator.idle().await;
    }
}
