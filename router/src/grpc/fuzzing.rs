//! Converts messages of `tutti.v1.Inference`, for fuzzers.

use tonic::metadata::{MetadataMap, MetadataValue};
use tutti_proto::v1 as pb;
use tutti_runtime::Error;

use super::request;
pub use super::request::{PromptKind, respell};
use crate::generation::GenerationRequest;

/// Converts a message that arrives with this `grpc-timeout` header.
pub fn read(message: pb::GenerateRequest, timeout: &[u8]) -> Result<(GenerationRequest, PromptKind), Error> {
    let mut metadata = MetadataMap::new();
    if let Ok(value) = std::str::from_utf8(timeout).unwrap_or_default().parse::<MetadataValue<_>>() {
        metadata.insert("grpc-timeout", value);
    }
    request::read(message, &metadata)
}
