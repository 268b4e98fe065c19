//! The front door: the state shared by the HTTP and gRPC surfaces, and the task that follows the conductors.

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
    conductor_channel,
    fleet::{Conductors, Fleet},
    generation::Generator,
    grpc, http,
    metrics::RouterMetrics,
    served::CheckedText,
    uploads::{Pace, Uploads},
};

/// HTTP/2 window of one stream from the conductor, in bytes. The window bounds the data that a slow client leaves
/// unread.
const STREAM_WINDOW: u32 = 64 << 10;
/// HTTP/2 window of one connection, in bytes. The full windows of a thousand streams fit into it, so that slow clients
/// do not stall other clients' streams.
const CONNECTION_WINDOW: u32 = 64 << 20;

/// Sets the flow-control windows that every connection to a conductor needs.
pub fn tune(endpoint: Endpoint) -> Endpoint {
    endpoint.initial_stream_window_size(STREAM_WINDOW).initial_connection_window_size(CONNECTION_WINDOW)
}

/// A front door to one or more conductors. Clones share the state.
#[derive(Clone)]
pub struct FrontDoor {
    generator: Arc<Generator>,
    uploads: Uploads,
}

impl FrontDoor {
    /// Creates the front door that is embedded in a conductor. `conductor` is the conductor's gRPC service, or a
    /// channel to that service (see [`tune`]).
    ///
    /// The conductor's refusals are final: no refused request is sent to another conductor. Requests get 503 until
    /// [`FrontDoor::follow`] has fetched the model's description and text. The text files are fetched from the
    /// conductor unless `text` is given.
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
        let conductors = Conductors {
            fixed: vec![("embedded".into(), conductor_channel::over(conductor))],
            discover: None,
            token: None,
        };
        Self::to(conductors, FleetSettings::embedded(), text, config, metrics)
    }

    /// Creates a stand-alone front door to several conductors. Conductors may join and leave at any time.
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
        let pace = Pace::new(config.upload_timeout(), config.upload_bytes_per_second);
        let uploads = Uploads::new(config.max_body_bytes, pace);
        Ok(Self { generator: Arc::new(Generator::new(fleet, config, metrics)?), uploads })
    }

    /// The OpenAI routes. Unknown routes get an error in OpenAI's shape as well. The caller merges them with
    /// [`tutti_runtime::operations::routes`].
    pub fn http_routes(&self) -> axum::Router {
        http::routes(self.generator.clone(), self.uploads.clone())
    }

    /// The gRPC services: `tutti.v1.Inference`, reflection, and `grpc.health.v1`, which reports the readiness in
    /// `health`. Must be called inside a Tokio runtime. The caller may add services.
    pub fn grpc_routes(&self, health: &Health) -> Result<tonic::service::Routes, Error> {
        grpc::routes(self.generator.clone(), self.uploads.clone(), health)
    }

    /// Follows the conductors for as long as the future is polled.
    ///
    /// Fetches the model's description and text when a conductor becomes ready, and again when the description or the
    /// text changes. Nothing else may write the readiness in `health` meanwhile. "Ready" means that a request sent now
    /// would be served.
    pub async fn follow(self, health: Health) {
        self.generator.fleet().clone().follow(health).await;
    }

    /// Makes [`FrontDoor::follow`] poll every conductor now, without waiting for the end of its poll interval. Called
    /// when a conductor may have become ready.
    pub fn ask_again(&self) {
        self.generator.fleet().ask_again();
    }

    /// Completes when no generation is running. Called only at shutdown, because no generation is admitted while the
    /// future is polled.
    pub async fn idle(&self) {
        self.generator.idle().await;
    }
}
