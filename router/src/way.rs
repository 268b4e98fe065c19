//! The way to a conductor: gRPC over a connection or, where the conductor is part of this process, straight into its
//! service. There a token passes no HTTP/2 frames, and no task but the one that writes it to the client; what is read late
//! waits in the conductor's mailbox, as it does behind a full connection.

use std::error::Error;

use tonic::{
    Status,
    body::Body,
    codegen::http::{Request, Response},
};
use tower::{Service, ServiceExt, util::BoxCloneSyncService};

/// Takes requests for one conductor. Clones share the way.
pub type Way = BoxCloneSyncService<Request<Body>, Response<Body>, Status>;

/// The way through a channel, or into a service.
pub fn through<S>(service: S) -> Way
where
    S: Service<Request<Body>, Response = Response<Body>, Future: Send> + Clone + Send + Sync + 'static,
    S::Error: Into<Box<dyn Error + Send + Sync>> + 'static,
{
    // As the client would read the error itself: a status that stands anywhere behind it is kept.
    BoxCloneSyncService::new(service.map_err(|error| Status::from_error(error.into())))
}
