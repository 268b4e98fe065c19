//! Binding addresses, with errors that say which setting is at fault.

use std::net::SocketAddr;

use tokio::net::TcpListener;

use crate::Error;

/// Binds a TCP address; `field` is the setting that named it. A port in use is bad usage, not a fault of ours.
pub async fn tcp(field: &str, address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address)
        .await
        .map_err(|e| Error::invalid(field, format!("cannot listen on {address}: {e}")))
}
