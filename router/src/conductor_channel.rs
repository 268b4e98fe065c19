//! The channel to a conductor: gRPC over a connection, or direct calls into the service of an embedded conductor.
//!
//! A direct call uses no HTTP/2 frames, and a token passes through a single task: the task that writes the token to the
//! client. With both kinds of channel, unread tokens wait in the conductor's mailbox.

use std::error::Error;

use tonic::{
    Status,
    body::Body,
    codegen::http::{Request, Response},
};
use tower::{Service, ServiceExt, util::BoxCloneSyncService};

/// Sends requests to one conductor. Clones share the channel.
pub type ConductorChannel = BoxCloneSyncService<Request<Body>, Response<Body>, Status>;

/// Wraps a connection, or the conductor's own service, as a channel.
pub fn over<S>(service: S) -> ConductorChannel
where
    S: Service<Request<Body>, Response = Response<Body>, Future: Send> + Clone + Send + Sync + 'static,
    S::Error: Into<Box<dyn Error + Send + Sync>> + 'static,
{
    // If the error's chain of sources has a gRPC status, `from_error` keeps that status.
    BoxCloneSyncService::new(service.map_err(|error| Status::from_error(error.into())))
}
