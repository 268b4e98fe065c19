//! The gRPC surface: `tutti.v1.Inference`, reflection, and `grpc.health.v1`.

#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod generate;
mod guard;
mod request;
mod service;

use std::sync::Arc;

use tonic::service::Routes;
use tutti_proto::v1::{FILE_DESCRIPTOR_SET, inference_server::InferenceServer};
use tutti_runtime::{Error, grpc_health, health::Health};

use self::{guard::Guarded, service::InferenceService};
use crate::{access::AccessLog, generation::Generator, keys::ApiKeys};

/// Maximum size in bytes of a message to the reflection services. Such a message has only the name of a symbol or file.
const REFLECTION_BYTES: usize = 4096;

/// The gRPC services. The health service reports the process's readiness. A message over `max_request_bytes` is refused
/// before it is read. The message of a call to `Inference` without a required API key is refused as well.
pub fn routes(
    generator: Arc<Generator>,
    keys: Arc<ApiKeys>,
    access: AccessLog,
    max_request_bytes: usize,
    health: &Health,
) -> Result<Routes, Error> {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let broken = |e| Error::internal(format!("invalid protobuf descriptors: {e}"));
    let metrics = generator.metrics().clone();
    let inference =
        InferenceServer::new(InferenceService::new(generator)).max_decoding_message_size(max_request_bytes);
    let health = grpc_health::service::<InferenceServer<InferenceService>>(health.clone());
    Ok(Routes::new(Guarded::new(inference, keys, metrics, access))
        .add_service(reflection().build_v1().map_err(broken)?.max_decoding_message_size(REFLECTION_BYTES))
        // v1alpha is the version that grpcio's reflection client and older tools use.
        .add_service(
            reflection().build_v1alpha().map_err(broken)?.max_decoding_message_size(REFLECTION_BYTES),
        )
        .add_service(health))
}
