//! The way from the embedded router to its conductor: the same gRPC as between processes, over memory.

use std::{convert::Infallible, io};

use hyper_util::rt::TokioIo;
use tokio::{
    io::{DuplexStream, duplex},
    sync::mpsc,
};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::{
    body::Body,
    codegen::http::{Request, Response, Uri},
    server::NamedService,
    transport::{Channel, Endpoint, Server},
};
use tower::{Service, service_fn};

/// What may be on its way in each direction of one connection.
const BUFFER_BYTES: usize = 256 << 10;
/// Connections that may wait to be accepted. A router opens one.
const BACKLOG: usize = 4;

/// Serves `service` for as long as the channel lives, and gives the channel to it.
pub fn serve<S>(service: S, endpoint: Endpoint) -> Channel
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
        + NamedService
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    let (connect, accept) = mpsc::channel::<DuplexStream>(BACKLOG);
    let incoming = ReceiverStream::new(accept).map(Ok::<_, io::Error>);
    tokio::spawn(async move {
        if let Err(error) = Server::builder().add_service(service).serve_with_incoming(incoming).await {
            tracing::error!(%error, "the way from router to conductor broke");
        }
    });
    let connector = service_fn(move |_: Uri| {
        let connect = connect.clone();
        async move {
            let (ours, theirs) = duplex(BUFFER_BYTES);
            connect.send(theirs).await.map_err(io::Error::other)?;
            Ok::<_, io::Error>(TokioIo::new(ours))
        }
    });
    endpoint.connect_with_connector_lazy(connector)
}
