//! A worker's network: the address at which other workers dial it, and the encryption and the limits of connections
//! between workers.

mod links;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
};

use tutti_runtime::{
    Error, serve,
    tls::{ClusterTransport, Dial, roles::Role},
};
use tutti_settings::ConnectionSettings;

/// Name of the setting in errors about a worker's address. The worker's address is the one from which it dials the
/// conductor.
const FIELD: &str = "conductor";

/// The network, as one worker sees it.
#[derive(Clone, Debug)]
pub struct Network {
    /// Address at which other workers dial this worker.
    pub host: IpAddr,
    /// The rules for the encryption of connections between workers.
    pub transport: ClusterTransport,
    /// Limits on connections from other workers.
    pub connections: ConnectionSettings,
}

impl Network {
    /// Binds a free port at `host`. If other machines can reach the port, encryption is required, unless plaintext is
    /// allowed.
    pub fn bind(&self) -> io::Result<TcpListener> {
        let allowed = self.transport.check_listen(FIELD, SocketAddr::new(self.host, 0));
        allowed.map_err(|error| io::Error::other(error.to_string()))?;
        bind(self.host)
    }

    /// Adds the encryption of connections between workers to a listener.
    pub fn secured(&self, listener: tokio::net::TcpListener) -> serve::Listener {
        serve::Listener::from(listener).with_tls(self.transport.server(Role::Worker))
    }

    /// Returns a dialler of the worker at `HOST:PORT`.
    pub fn dial(&self, address: &str) -> Result<Dial, Error> {
        self.transport.dial(FIELD, &format!("http://{address}"), Role::Worker)
    }
}

/// The network of a worker whose peers are on this machine: no encryption, and the default limits.
impl From<IpAddr> for Network {
    fn from(host: IpAddr) -> Self {
        Self { host, transport: ClusterTransport::default(), connections: ConnectionSettings::default() }
    }
}

/// Binds a free port at `host`. The conductor sees this process at the address `host`, and passes this address to the
/// other workers. If this machine does not have the address, as behind address translation (NAT), binds all addresses.
fn bind(host: IpAddr) -> io::Result<TcpListener> {
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
