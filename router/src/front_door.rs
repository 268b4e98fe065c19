//! The front door: the state shared by the HTTP and gRPC surfaces, and the task that follows the conductors.

use std::{net::SocketAddr, sync::Arc};

use tonic::{
    body::Body,
    codegen::http::{Request, Response},
    transport::Endpoint,
};
use tower::Service;
use tutti_runtime::{Error, health::Health, live::Live, metrics::Metrics, process::Front};
use tutti_settings::{FleetSettings, RouterSettings};

use crate::{
    access::AccessLog,
    conductor_channel,
    fleet::{Access, Conductors, Fleet},
    generation::{Admission, Generator},
    grpc,
    history::History,
    http,
    keys::ApiKeys,
    metrics::RouterMetrics,
    readers::Readers,
    served::{CheckedText, TextSettings},
    uploads::{Pace, Uploads},
};

/// HTTP/2 window of one stream from the conductor, in bytes. The window bounds the data that a slow client leaves
/// unread.
const STREAM_WINDOW: u32 = 64 << 10;
/// HTTP/2 window of one connection, in bytes. It is as large as the windows of a thousand streams, so that slow clients
/// do not stall the streams of other clients.
const CONNECTION_WINDOW: u32 = 64 << 20;

/// Sets the flow-control windows that every connection to a conductor needs, and removes the limit on errors after a
/// stream reset.
///
/// When a client disconnects, the router resets its stream, though events of that stream may still be in transit.
/// HTTP/2 counts such events as errors, and closes the connection when the count reaches a limit. That would end the
/// streams of all clients. The conductor is trusted, so the count needs no limit.
pub fn tune(endpoint: Endpoint) -> Endpoint {
    endpoint
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_max_local_error_reset_streams(None)
}

/// A front door to one or more conductors. Clones share the state.
#[derive(Clone)]
pub struct FrontDoor {
    generator: Arc<Generator>,
    uploads: Uploads,
    keys: Arc<ApiKeys>,
    /// See [`RouterSettings::allowed_origins`].
    allowed_origins: Arc<[String]>,
    access: AccessLog,
    history: Arc<History>,
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
        config: impl Into<Live<RouterSettings>>,
        metrics: &Metrics,
    ) -> Result<Self, Error>
    where
        S: Service<Request<Body>, Response = Response<Body>, Future: Send> + Clone + Send + Sync + 'static,
        S::Error: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
    {
        let conductors = Conductors {
            fixed: vec![("embedded".into(), conductor_channel::over(conductor))],
            discover: None,
            access: Access::default(),
        };
        Self::to(conductors, FleetSettings::embedded(), text, config.into(), metrics)
    }

    /// Creates a stand-alone front door to several conductors. Conductors may join and leave at any time.
    pub fn before(
        conductors: Conductors,
        settings: FleetSettings,
        config: impl Into<Live<RouterSettings>>,
        metrics: &Metrics,
    ) -> Result<Self, Error> {
        Self::to(conductors, settings, None, config.into(), metrics)
    }

    fn to(
        conductors: Conductors,
        settings: FleetSettings,
        text: Option<CheckedText>,
        live: Live<RouterSettings>,
        metrics: &Metrics,
    ) -> Result<Self, Error> {
        let registry = metrics;
        let config = live.get();
        config.validate()?;
        settings.validate()?;
        let text_settings = TextSettings::of(&config);
        text_settings.check()?;
        let fleet = Fleet::new(conductors, settings, text_settings, text, metrics);
        let readers = Readers::new(&config, registry);
        let metrics = RouterMetrics::register(registry);
        let paced = live.clone();
        let uploads = Uploads::new(config.max_body_bytes, move || Pace::of(&paced.get()));
        let keys = ApiKeys::read(live.clone(), registry)?;
        let (admission, access) = (Admission::new(live.clone(), registry), AccessLog::new(live.clone()));
        let history = Arc::new(History::new(metrics.clone(), fleet.clone()));
        let generator = Arc::new(Generator::new(fleet, live, admission, readers, metrics)?);
        let allowed_origins = config.allowed_origins.clone().into();
        Ok(Self { generator, uploads, keys, allowed_origins, access, history })
    }

    /// The OpenAI routes. Unknown routes get an error in OpenAI's shape as well. The caller merges these routes with
    /// [`tutti_runtime::operations::routes`].
    pub fn http_routes(&self) -> axum::Router {
        let Self { generator, uploads, keys, allowed_origins, access, history } = self.clone();
        http::routes(generator, uploads, keys, allowed_origins, access, history)
    }

    /// The gRPC services: `tutti.v1.Inference`, reflection, and `grpc.health.v1`, which reports the readiness in
    /// `health`. Must be called inside a Tokio runtime. The caller may add services.
    pub fn grpc_routes(&self, health: &Health) -> Result<tonic::service::Routes, Error> {
        let (keys, access) = (self.keys.clone(), self.access.clone());
        grpc::routes(self.generator.clone(), keys, access, self.uploads.limit(), health)
    }

    /// Follows the conductors for as long as the future is polled.
    ///
    /// Fetches the model's description and text when a conductor becomes ready, and again when the description or the
    /// text changes. Nothing else may write the readiness in `health` meanwhile. "Ready" means that a request sent now
    /// would be served.
    pub async fn follow(self, health: Health) {
        let fleet = self.generator.fleet().clone();
        tokio::join!(fleet.follow(health), self.keys.follow(), self.history.follow());
    }

    /// Logs a warning for each address that is not a loopback address, unless API keys are required. Other machines may
    /// reach such an address.
    pub fn warn_if_open(&self, addresses: &[SocketAddr]) {
        for address in open(addresses, self.keys.are_needed()) {
            tracing::warn!(
                %address,
                "other machines may reach this address, and no API keys are needed: anyone there may send requests \
                 (see --api-key-file)"
            );
        }
    }

    /// Makes [`FrontDoor::follow`] poll every conductor now, without waiting for the end of its poll interval. Called
    /// when a conductor may have become ready.
    pub fn ask_again(&self) {
        self.generator.fleet().ask_again();
    }

    /// True if no generation is running.
    pub fn is_idle(&self) -> bool {
        self.generator.is_idle()
    }

    /// The routes and services that a process with this front door offers. `health` must be the one that
    /// [`FrontDoor::follow`] writes. Must be called inside a Tokio runtime.
    pub fn front(&self, health: Health) -> Result<Front, Error> {
        let generator = self.generator.clone();
        Ok(Front {
            routes: self.http_routes(),
            refusals: http::refusals(self.access.clone(), self.allowed_origins.clone()),
            services: self.grpc_routes(&health)?,
            health,
            is_idle: Box::new(move || generator.is_idle()),
        })
    }
}

/// The addresses at which other machines may send requests without an API key.
fn open(addresses: &[SocketAddr], keys_are_needed: bool) -> impl Iterator<Item = &SocketAddr> {
    addresses.iter().filter(move |address| !keys_are_needed && !address.ip().to_canonical().is_loopback())
}

#[cfg(test)]
mod tests;
