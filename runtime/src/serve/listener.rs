//! A bound TCP or Unix socket, and its tuning of accepted connections.

use std::{io, time::Duration};

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream, UnixListener};

use super::stream::{Peer, Stream};

/// Time without traffic after which the kernel probes a TCP peer.
const PROBE_AFTER: Duration = Duration::from_secs(60);

/// A bound listener.
#[derive(Debug)]
pub enum Listener {
    /// A TCP socket.
    Tcp(TcpListener),
    /// A Unix socket.
    Unix(UnixListener),
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self::Tcp(listener)
    }
}

impl From<UnixListener> for Listener {
    fn from(listener: UnixListener) -> Self {
        Self::Unix(listener)
    }
}

impl Listener {
    /// Accepts one connection. `write_timeout` also bounds the time for which the kernel sends data again that a TCP
    /// peer does not acknowledge.
    pub(super) async fn accept(&self, write_timeout: Duration) -> io::Result<(Stream, Peer)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                if let Err(error) = tune(&stream, write_timeout) {
                    tracing::debug!(%error, "a connection keeps the system's settings");
                }
                Ok((Stream::Tcp(stream), Peer::Ip(address.ip())))
            }
            Self::Unix(listener) => Ok((Stream::Unix(listener.accept().await?.0), Peer::Local)),
        }
    }
}

fn tune(stream: &TcpStream, write_timeout: Duration) -> io::Result<()> {
    // Token messages are small and must not wait for a packet to fill up, so Nagle's algorithm is turned off.
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_AFTER)?;
    sockopt::set_tcp_user_timeout(stream, write_timeout.as_millis().try_into().unwrap_or(u32::MAX))?;
    Ok(())
}
