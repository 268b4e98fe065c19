//! Serving of HTTP and gRPC on bound listeners, until shutdown.

use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tonic::{
    service::Routes,
    transport::{Server, server::TcpIncoming},
};

use crate::{Error, shutdown::Shutdown};

/// HTTP/2 flow-control windows in bytes, large enough for a client to send a long prompt without waiting.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// Serves HTTP. Once `closing` begins, accepts no more connections and returns after the last response.
pub async fn http(listener: TcpListener, routes: axum::Router, closing: Shutdown) -> Result<(), Error> {
    // Token messages are small and must not wait for a packet to fill up, so Nagle's algorithm is turned off.
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            tracing::debug!(%error, "a connection keeps Nagle's algorithm");
        }
    });
    axum::serve(listener, routes)
        .with_graceful_shutdown(async move { closing.begun().await })
        .await
        .map_err(|e| Error::internal(format!("the HTTP server broke: {e}")))
}

/// Serves gRPC. Once `closing` begins, accepts no more connections and returns after the last response.
pub async fn grpc(listener: TcpListener, routes: Routes, closing: Shutdown) -> Result<(), Error> {
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .add_routes(routes)
        .serve_with_incoming_shutdown(incoming, async move { closing.begun().await })
        .await
        .map_err(|e| Error::internal(format!("the gRPC server broke: {e}")))
}
