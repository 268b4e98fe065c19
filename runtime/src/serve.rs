//! Serving HTTP and gRPC on listeners that are bound already, until told to close.

use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tonic::{
    service::Routes,
    transport::{Server, server::TcpIncoming},
};

use crate::{Error, shutdown::Shutdown};

/// What a client may have under way towards us: a long prompt in one go.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;

/// Serves HTTP. Once `closing` begins, takes no more connections and ends with the last response.
pub async fn http(listener: TcpListener, routes: axum::Router, closing: Shutdown) -> Result<(), Error> {
    // Tokens are small and must not wait for more to fill a packet.
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

/// Serves gRPC in the same way.
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
