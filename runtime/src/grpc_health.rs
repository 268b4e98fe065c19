//! The `grpc.health.v1` service, which reports a process's readiness.

use tonic::server::NamedService;
use tonic_health::{
    ServingStatus,
    pb::health_server::{Health as HealthService, HealthServer},
};

use crate::health::{Health, State};

/// Maximum bytes of a message to the health service. A message contains only a service's name.
const MESSAGE_BYTES: usize = 512;

/// The health service, which answers for the whole process (the empty name) and for `S`. Must be called inside a Tokio
/// runtime, since it spawns a task that follows the readiness.
pub fn service<S: NamedService>(health: Health) -> HealthServer<impl HealthService> {
    let (reporter, service) = tonic_health::server::health_reporter();
    tokio::spawn(async move {
        let mut ready = health.watch_ready();
        loop {
            let status = match *ready.borrow_and_update() {
                State::Ok => ServingStatus::Serving,
                State::Not(_) => ServingStatus::NotServing,
            };
            for name in ["", S::NAME] {
                reporter.set_service_status(name, status).await;
            }
            if ready.changed().await.is_err() {
                return;
            }
        }
    });
    service.max_decoding_message_size(MESSAGE_BYTES)
}
