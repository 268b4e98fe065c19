//! The services at a conductor's client ports: those of the embedded router, or only health if there is no embedded
//! router.

use std::sync::Arc;

use tonic::service::Routes;
use tutti_conductor::service::{ConductorServer, ConductorService};
use tutti_router::{CheckedText, FrontDoor};
use tutti_runtime::{
    Error,
    checkpoint::Checkpoint,
    grpc_health,
    health::Health,
    process::{Front, Ports, Started},
};
use tutti_settings::ConductorSettings;

/// The services of a conductor without an embedded router.
pub fn bare(health: Health) -> Front {
    Front {
        services: Routes::new(grpc_health::service::<ConductorServer<ConductorService>>(health.clone())),
        routes: axum::Router::new(),
        refusals: axum::Router::new(),
        health,
        is_idle: Box::new(|| true),
    }
}

/// The services of a conductor with an embedded router. The router calls the conductor's gRPC service as a router in
/// another process would. Clients cannot reach that service.
pub fn with_router(
    conductor: ConductorServer<ConductorService>,
    text: CheckedText,
    cluster: Health,
    process: &Started<ConductorSettings>,
    ports: &Ports,
) -> Result<Front, Error> {
    let front_door = FrontDoor::new(conductor, Some(text), process.live.router.clone(), &process.metrics)?;
    front_door.warn_if_open(&ports.of_clients());
    let health = cluster.of_same_process();
    let (follow, hear) = (front_door.clone().follow(health.clone()), hear(cluster, front_door.clone()));
    tokio::spawn(async { tokio::join!(follow, hear) });
    front_door.front(health)
}

/// Makes the router poll the conductor whenever the cluster's readiness changes, so that the router's poll interval may
/// be long.
async fn hear(cluster: Health, front_door: FrontDoor) {
    let mut changes = cluster.watch_ready();
    while changes.changed().await.is_ok() {
        front_door.ask_again();
    }
}

/// Starts to read the checkpoint files that an embedded router needs. The future returns `None` if there is no embedded
/// router.
pub fn read_text(
    settings: &ConductorSettings,
    checkpoint: &Arc<Checkpoint>,
) -> impl Future<Output = Result<Option<CheckedText>, Error>> + use<> {
    let (checkpoint, router) = (checkpoint.clone(), settings.router.clone());
    let reading = (!settings.membership.no_router)
        .then(|| tokio::task::spawn_blocking(move || tutti_router::check_checkpoint(&checkpoint, &router)));
    async {
        let Some(reading) = reading else { return Ok(None) };
        reading.await.map_err(|e| Error::internal(format!("reading the tokenizer failed: {e}")))?.map(Some)
    }
}
