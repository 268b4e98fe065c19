//! Binding of addresses, with errors that name the setting at fault.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::net::TcpListener;

use crate::Error;

/// Binds a TCP address. `field` is the setting with the address, which an error names. A port in use is an error of
/// usage, not an internal one.
pub async fn tcp(field: &str, address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address)
        .await
        .map_err(|e| Error::invalid(field, format!("cannot listen on {address}: {e}")))
}

/// The address at which this machine reaches a listener. A listener on all interfaces is reached at the loopback.
pub fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}
