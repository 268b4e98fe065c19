//! A bound TCP or Unix socket, with the socket options of accepted connections.

use std::{io, os::fd::AsFd, time::Duration};

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream, UnixListener};

use super::{
    metrics::{ConnectionMetrics, ListenerMetrics, Purpose},
    stream::{Peer, Socket},
};
use crate::tls::ServerTls;

/// Time without traffic after which the kernel probes a TCP peer.
const PROBE_AFTER: Duration = Duration::from_secs(60);

/// A bound TCP or Unix socket, with the TLS and the metrics of its connections.
#[derive(Debug)]
pub struct Listener {
    socket: BoundSocket,
    tls: Option<ServerTls>,
    metrics: ListenerMetrics,
}

#[derive(Debug)]
enum BoundSocket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self { socket: BoundSocket::Tcp(listener), tls: None, metrics: ListenerMetrics::default() }
    }
}

impl From<UnixListener> for Listener {
    fn from(listener: UnixListener) -> Self {
        Self { socket: BoundSocket::Unix(listener), tls: None, metrics: ListenerMetrics::default() }
    }
}

impl Listener {
    /// Returns the listener with this TLS. With `None`, connections are plaintext. A Unix socket always uses plaintext.
    pub fn with_tls(self, tls: Option<ServerTls>) -> Self {
        let tls = tls.filter(|_| matches!(self.socket, BoundSocket::Tcp(_)));
        Self { tls, ..self }
    }

    /// Returns the listener with its connections counted in `metrics`.
    pub fn counted(self, metrics: &ConnectionMetrics, purpose: Purpose) -> Self {
        Self { metrics: metrics.of(purpose), ..self }
    }

    /// Returns another listener of the same socket, with the same TLS and metrics. Either listener may accept a
    /// connection.
    pub fn duplicate(&self) -> io::Result<Self> {
        let socket = match &self.socket {
            BoundSocket::Tcp(listener) => {
                BoundSocket::Tcp(TcpListener::from_std(listener.as_fd().try_clone_to_owned()?.into())?)
            }
            BoundSocket::Unix(listener) => {
                BoundSocket::Unix(UnixListener::from_std(listener.as_fd().try_clone_to_owned()?.into())?)
            }
        };
        Ok(Self { socket, tls: self.tls.clone(), metrics: self.metrics.clone() })
    }

    /// Counts of the accepted connections.
    pub(super) fn metrics(&self) -> &ListenerMetrics {
        &self.metrics
    }

    /// TLS of the accepted connections; `None` if they are plaintext.
    pub(super) fn tls(&self) -> Option<&ServerTls> {
        self.tls.as_ref()
    }

    /// Accepts one connection. `write_timeout` also limits how long the kernel retransmits data that a TCP peer does
    /// not acknowledge.
    pub(super) async fn accept(&self, write_timeout: Duration) -> io::Result<(Socket, Peer)> {
        match &self.socket {
            BoundSocket::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                if let Err(error) = tune(&stream, write_timeout) {
                    tracing::debug!(%error, "a connection keeps the system's settings");
                }
                Ok((Socket::Tcp(stream), Peer::Ip(address.ip())))
            }
            BoundSocket::Unix(listener) => Ok((Socket::Unix(listener.accept().await?.0), Peer::Local)),
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
