//! `grpc.health.v1`, following a process's readiness.

use tonic::server::NamedService;
use tonic_health::{
    ServingStatus,
    pb::health_server::{Health as HealthService, HealthServer},
};

use crate::health::{Health, State};

/// The service. It answers for the process as a whole (the empty name) and for `S`, as long as the runtime that this is
/// called in lives.
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
    service
}
