//! The listeners inside a cluster: one for workers, and one for routers and operators.
//!
//! By default each listener is a Unix socket in a directory that only this user can enter. If the operator chooses
//! another address (TCP or a path), other users may reach the listener, so callers must show a token.

use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, UnixListener};
use tutti_runtime::{
    Error, listen, serve,
    tls::{ClusterTransport, ServerTls, roles::Role},
};
use tutti_settings::ClusterAddress;

use crate::{private_directory::PrivateDirectory, state_directory::StateDirectory};

/// The callers of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Callers {
    /// Workers, which join the cluster.
    Workers,
    /// Routers and operators, which call `tutti.cluster.v1.Conductor`.
    Routers,
}

impl Callers {
    /// Name of the setting that holds the listener's address.
    pub fn field(self) -> &'static str {
        match self {
            Self::Workers => "worker_listen",
            Self::Routers => "cluster_grpc",
        }
    }

    /// The role that a caller's certificate must name.
    fn role(self) -> Role {
        match self {
            Self::Workers => Role::Worker,
            Self::Routers => Role::Router,
        }
    }

    /// File name of the socket in a private directory.
    fn socket(self) -> &'static str {
        match self {
            Self::Workers => "workers.sock",
            Self::Routers => "cluster.sock",
        }
    }
}

/// The place of a Unix socket.
#[derive(Debug)]
pub enum SocketHome {
    /// A path that the operator has given. Other users may reach it.
    Given,
    /// A private directory, which is removed when the value is dropped.
    Private(PrivateDirectory),
    /// The state directory, which other users cannot enter either, and which stays.
    State,
}

/// A bound listener.
#[derive(Debug)]
pub enum ClusterListener {
    /// A Unix socket, for processes of this user on this machine.
    Unix {
        /// The bound socket.
        listener: UnixListener,
        /// The socket's path.
        path: PathBuf,
        /// The place of the socket.
        home: SocketHome,
    },
    /// A TCP socket, for processes of any machine.
    Tcp {
        /// The bound socket.
        listener: TcpListener,
        /// TLS of the listener's connections; `None` for plaintext.
        tls: Option<ServerTls>,
    },
}

impl ClusterListener {
    /// Binds `address`, or by default a socket in the state directory or in one that only this user can enter. An
    /// address that other machines reach needs encryption, unless `transport` allows plaintext.
    pub async fn bind(
        callers: Callers,
        address: Option<&ClusterAddress>,
        state: Option<&StateDirectory>,
        transport: &ClusterTransport,
    ) -> Result<Self, Error> {
        let field = callers.field();
        if let (None, Some(state)) = (address, state) {
            let path = state.path().join(callers.socket());
            clear_stale(field, &path)?;
            return Ok(Self::Unix { listener: bind_unix(field, &path)?, path, home: SocketHome::State });
        }
        match address {
            Some(ClusterAddress::Tcp(address)) => {
                transport.check_listen(field, *address)?;
                let listener = listen::tcp(field, *address)?;
                Ok(Self::Tcp { listener, tls: transport.server(callers.role()) })
            }
            Some(ClusterAddress::Unix(path)) => {
                clear_stale(field, path)?;
                let home = SocketHome::Given;
                Ok(Self::Unix { listener: bind_unix(field, path)?, path: path.clone(), home })
            }
            None => {
                let directory = PrivateDirectory::new_in(&std::env::temp_dir()).map_err(|e| {
                    Error::internal(format!("cannot make a directory for the socket of {field}: {e}"))
                })?;
                let path = directory.path().join(callers.socket());
                let listener = bind_unix(field, &path)?;
                Ok(Self::Unix { listener, path, home: SocketHome::Private(directory) })
            }
        }
    }

    /// The URL at which a process of this machine dials the listener.
    pub fn local_url(&self) -> Result<String, Error> {
        match self {
            Self::Unix { path, .. } => Ok(format!("unix:{}", path.display())),
            Self::Tcp { listener, tls } => {
                let scheme = if tls.is_some() { "https" } else { "http" };
                let address = listener
                    .local_addr()
                    .map_err(|e| Error::internal(format!("the listener has no address: {e}")))?;
                Ok(format!("{scheme}://{}", listen::reachable(address)))
            }
        }
    }

    /// Splits the listener into its socket and the directory that must outlive the socket.
    pub fn into_parts(self) -> (serve::Listener, Option<PrivateDirectory>) {
        match self {
            Self::Unix { listener, home: SocketHome::Private(directory), .. } => {
                (listener.into(), Some(directory))
            }
            Self::Unix { listener, .. } => (listener.into(), None),
            Self::Tcp { listener, tls } => (serve::Listener::from(listener).with_tls(tls), None),
        }
    }

    /// True if the listener is in a directory that only this user can enter.
    pub fn is_private(&self) -> bool {
        matches!(self, Self::Unix { home: SocketHome::Private(_) | SocketHome::State, .. })
    }
}

/// Binds a socket that only this user can connect to.
fn bind_unix(field: &str, path: &Path) -> Result<UnixListener, Error> {
    listen::unix(path)
        .map_err(|e| Error::invalid(field, format!("cannot listen on unix:{}: {e}", path.display())))
}

/// Removes the socket of a killed conductor.
fn clear_stale(field: &str, path: &Path) -> Result<(), Error> {
    listen::clear_stale(path)
        .map_err(|e| Error::invalid(field, format!("cannot replace unix:{}: {e}", path.display())))
}

#[cfg(test)]
mod tests;
