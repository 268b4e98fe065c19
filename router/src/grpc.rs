//! The gRPC surface: `tutti.v1.Inference`, reflection, and `grpc.health.v1`.

mod generate;
mod guard;
mod request;
mod service;

use std::sync::Arc;

use tonic::service::Routes;
use tutti_proto::v1::{FILE_DESCRIPTOR_SET, inference_server::InferenceServer};
use tutti_runtime::{Error, grpc_health, health::Health};

use self::{guard::Guarded, service::InferenceService};
use crate::{generation::Generator, uploads::Uploads};

/// The gRPC services. The health service reports the process's readiness. A message over the limit of `uploads` is
/// refused before it is read.
pub fn routes(generator: Arc<Generator>, uploads: Uploads, health: &Health) -> Result<Routes, Error> {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let broken = |e| Error::internal(format!("invalid protobuf descriptors: {e}"));
    let inference =
        InferenceServer::new(InferenceService::new(generator)).max_decoding_message_size(uploads.limit());
    let health = grpc_health::service::<InferenceServer<InferenceService>>(health.clone());
    Ok(Routes::new(Guarded::new(inference, uploads.clone()))
        .add_service(Guarded::new(reflection().build_v1().map_err(broken)?, uploads.clone()))
        // v1alpha is the version that grpcio's reflection client and older tools use.
        .add_service(Guarded::new(reflection().build_v1alpha().map_err(broken)?, uploads))
        .add_service(health))
}
