//! Binding of addresses, with errors that name the setting at fault.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
};

use tokio::net::{TcpListener, TcpSocket};

use crate::Error;

/// Connections that may wait for their accept. The kernel drops the first packet of one more, whose client then tries
/// again only after a second, so a burst of some clients' connections would delay all others. Linux bounds this by
/// `net.core.somaxconn`, which is 4096 by default.
pub const BACKLOG: u32 = 4096;

/// Binds a TCP address. `field` is the setting with the address, which an error names. A port in use is an error of
/// usage, not an internal one.
pub fn tcp(field: &str, address: SocketAddr) -> Result<TcpListener, Error> {
    bind(address).map_err(|e| Error::invalid(field, format!("cannot listen on {address}: {e}")))
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A process that starts again takes its port although connections of the last one linger.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
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

#[cfg(test)]
mod tests {
    use std::{
        fs,
        net::{Ipv4Addr, SocketAddr, TcpStream},
        time::Duration,
    };

    use super::{BACKLOG, tcp};

    /// Less than the second after which a client sends its first packet again.
    const AT_ONCE: Duration = Duration::from_millis(900);

    #[tokio::test]
    async fn a_burst_of_connections_waits_for_its_accept_and_delays_nobody() {
        let listener = tcp("http", SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let system: u32 = fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap().trim().parse().unwrap();
        let burst = BACKLOG.min(system).min(400);
        let connected = (0..burst).map(|_| TcpStream::connect_timeout(&address, AT_ONCE));
        let waiting: Vec<_> = connected.collect::<Result<_, _>>().unwrap();
        assert_eq!(waiting.len(), burst as usize);
    }

    #[tokio::test]
    async fn a_port_in_use_is_an_error_of_its_setting() {
        let first = tcp("http", SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let error = tcp("http", first.local_addr().unwrap()).unwrap_err();
        assert!(error.to_string().contains("cannot listen on 127.0.0.1:"), "{error}");
        assert_eq!(error.field(), Some("http"));
    }
}
