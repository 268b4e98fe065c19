//! The gRPC surface: `tutti.v1.Inference`, reflection, and `grpc.health.v1`.

mod generate;
mod request;
mod service;

use std::sync::Arc;

use tonic::service::Routes;
use tonic_health::{ServingStatus, server::HealthReporter};
use tutti_proto::v1::{FILE_DESCRIPTOR_SET, inference_server::InferenceServer};
use tutti_runtime::{
    Error,
    health::{Health, State},
};

use crate::generation::Generator;

/// The whole surface, its health following the process's readiness. A message over `max_request_bytes` is refused before
/// it is read.
pub fn routes(generator: Arc<Generator>, max_request_bytes: usize, health: &Health) -> Result<Routes, Error> {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let broken = |e| Error::internal(format!("the descriptors do not hold together: {e}"));
    let inference = InferenceServer::new(service::InferenceService::new(generator))
        .max_decoding_message_size(max_request_bytes);
    let (reporter, health_service) = tonic_health::server::health_reporter();
    tokio::spawn(report(reporter, health.clone()));
    Ok(Routes::new(inference)
        .add_service(reflection().build_v1().map_err(broken)?)
        // What grpcio's own reflection client and older tools speak.
        .add_service(reflection().build_v1alpha().map_err(broken)?)
        .add_service(health_service))
}

/// Tells gRPC's health service what readiness is, for as long as the process has one.
async fn report(reporter: HealthReporter, health: Health) {
    let mut ready = health.watch_ready();
    loop {
        let status = match *ready.borrow_and_update() {
            State::Ok => ServingStatus::Serving,
            State::Not(_) => ServingStatus::NotServing,
        };
        for service in ["", "tutti.v1.Inference"] {
            reporter.set_service_status(service, status).await;
        }
        if ready.changed().await.is_err() {
            return;
        }
    }
}
