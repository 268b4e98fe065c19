//! Binding of addresses, with errors that name the setting at fault.

use std::net::SocketAddr;

use tokio::net::TcpListener;

use crate::Error;

/// Binds a TCP address. `field` is the setting that names it. A port in use is an error of usage, not an internal one.
pub async fn tcp(field: &str, address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address)
        .await
        .map_err(|e| Error::invalid(field, format!("cannot listen on {address}: {e}")))
}
