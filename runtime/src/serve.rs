//! Serves HTTP and gRPC on bound listeners until shutdown, with bounds on the resources that peers can hold.
//!
//! Every listener of every process is served here, within the limits of `ConnectionSettings`. These limits bound the
//! number of connections, in total and per peer. They also bound the time in which a peer sends a request's head, has
//! no request, or does not read. A gRPC listener also bounds the messages that are still arriving. Callers without a
//! credential can take only a part of the resources that callers share: see [`Standing`].

mod accept;
mod activity;
mod counted;
mod frames;
mod limits;
mod listener;
mod metrics;
mod open;
mod receive;
mod standing;
mod stream;
mod unread;

use std::sync::Arc;

use hyper_util::{
    rt::{TokioExecutor, TokioTimer},
    server::conn::auto::Builder,
};
use tonic::service::Routes;

use self::{
    accept::Server,
    counted::Bodies,
    receive::{Receiving, Room},
    unread::Drains,
};
pub use self::{
    limits::ConnectionLimits,
    listener::Listener,
    metrics::{ConnectionMetrics, Purpose},
    standing::Standing,
    stream::Peer,
};
use crate::{Error, shutdown::Shutdown, tls::PublicTls, watched_files::ReloadMetrics};

/// Maximum bytes of an HTTP/1 request's head, and of one read of its body.
const HTTP1_BUFFER: usize = 64 << 10;
/// Maximum bytes of an HTTP/2 request's decoded head.
const HTTP2_HEADERS: u32 = 32 << 10;

/// HTTP/2 flow-control windows of one listener, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Window of one stream.
    pub stream: u32,
    /// Window of one connection.
    pub connection: u32,
}

/// Windows large enough for a client to send a long prompt without waiting.
impl Default for Windows {
    fn default() -> Self {
        Self { stream: 1 << 20, connection: 16 << 20 }
    }
}

/// The listeners of HTTP and gRPC, with TLS if there is a certificate. From now on, the certificate's files are read
/// again when they change. Must be called inside a Tokio runtime.
pub fn encrypted(
    http: impl Into<Listener>,
    grpc: impl Into<Listener>,
    tls: Option<PublicTls>,
    reloads: ReloadMetrics,
) -> (Listener, Listener) {
    let (http, grpc) = (http.into(), grpc.into());
    let Some(tls) = tls else { return (http, grpc) };
    let listeners = (http.with_tls(Some(tls.http())), grpc.with_tls(Some(tls.grpc())));
    tokio::spawn(tls.follow(reloads));
    listeners
}

/// Serves HTTP. Once `closing` begins, accepts no more connections and returns after the last response. A busy HTTP/1
/// connection then stays open for a second after its response, because its client may already be sending the next
/// request.
pub async fn http(
    listener: impl Into<Listener>,
    routes: axum::Router,
    connections: impl Into<ConnectionLimits>,
    closing: Shutdown,
) -> Result<(), Error> {
    let connections = connections.into();
    let builder = builder(&connections, Windows::default());
    Server::new(routes, builder, Bodies::Http(Drains::new()), &connections)
        .run(listener.into(), closing)
        .await;
    Ok(())
}

/// Serves gRPC. Once `closing` begins, accepts no more connections and returns after the last response.
pub async fn grpc(
    listener: impl Into<Listener>,
    routes: Routes,
    windows: Windows,
    connections: impl Into<ConnectionLimits>,
    closing: Shutdown,
) -> Result<(), Error> {
    let connections = connections.into();
    let builder = builder(&connections, windows).http2_only();
    let settings = connections.live().get();
    let room = Room::new(settings.receive_room_bytes, connections.are_callers_trusted());
    let receiving = Arc::new(Receiving::new(room, settings.receive_timeout()));
    let routes = routes.prepare().into_axum_router();
    Server::new(routes, builder, Bodies::Grpc(receiving), &connections).run(listener.into(), closing).await;
    Ok(())
}

fn builder(connections: &ConnectionLimits, windows: Windows) -> Builder<TokioExecutor> {
    let keep_alive = connections.live().get().keep_alive();
    let mut builder = Builder::new(TokioExecutor::new());
    // hyper's own head timeout would also close idle connections, so [`Activity`] times the heads.
    builder.http1().timer(TokioTimer::new()).header_read_timeout(None).max_buf_size(HTTP1_BUFFER);
    builder
        .http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(windows.stream)
        .initial_connection_window_size(windows.connection)
        .max_concurrent_streams(connections.max_streams())
        .max_header_list_size(HTTP2_HEADERS)
        .keep_alive_interval(keep_alive)
        .keep_alive_timeout(keep_alive);
    builder
}
