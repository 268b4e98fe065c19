//! Listeners for other workers, bound where these dial and nowhere else.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener},
};

/// Binds a free port at `host`: the address at which the conductor sees this process, which it tells the other workers.
/// If this machine has no such address, because a translator of addresses is in between, binds all addresses.
pub fn bind(host: IpAddr) -> io::Result<TcpListener> {
    match TcpListener::bind((host, 0)) {
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
            tracing::warn!(%host, "not an address of this machine: listening on all of its addresses");
            let all: IpAddr = match host {
                IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
            };
            TcpListener::bind((all, 0))
        }
        bound => bound,
    }
}

#[cfg(test)]
mod tests;
