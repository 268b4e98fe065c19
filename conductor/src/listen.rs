//! Where workers dial in: bound before anything is spawned, so that a spawned worker finds it.

use std::{
    io,
    net::SocketAddr,
    os::unix::net::UnixStream as StdUnixStream,
    path::{Path, PathBuf},
};

use tokio::net::{TcpListener, UnixListener};
use tutti_runtime::{Error, listen};

use crate::{config::WorkerAddress, private_directory::PrivateDirectory};

const FIELD: &str = "worker_listen";
/// In a private directory.
const SOCKET: &str = "workers.sock";

/// A bound gate.
#[derive(Debug)]
pub enum WorkerListener {
    /// On this machine only.
    Unix {
        /// Bound.
        listener: UnixListener,
        /// Where.
        path: PathBuf,
        /// The private directory that goes away with the listener, where no path was given.
        directory: Option<PrivateDirectory>,
    },
    /// For workers of other machines too.
    Tcp(TcpListener),
}

impl WorkerListener {
    /// Binds `address`, or a socket in a directory that only this user can enter.
    pub async fn bind(address: Option<&WorkerAddress>) -> Result<Self, Error> {
        match address {
            Some(WorkerAddress::Tcp(address)) => Ok(Self::Tcp(listen::tcp(FIELD, *address).await?)),
            Some(WorkerAddress::Unix(path)) => {
                clear_stale(path)?;
                Ok(Self::Unix { listener: bind_unix(path)?, path: path.clone(), directory: None })
            }
            None => {
                // Whoever reaches the socket can join as a worker, so only this user can.
                let directory = PrivateDirectory::new_in(&std::env::temp_dir()).map_err(|e| {
                    Error::internal(format!("cannot make a directory for the workers' socket: {e}"))
                })?;
                let path = directory.path().join(SOCKET);
                Ok(Self::Unix { listener: bind_unix(&path)?, path, directory: Some(directory) })
            }
        }
    }

    /// What a worker on this machine gives as `--conductor`.
    pub fn local_url(&self) -> Result<String, Error> {
        match self {
            Self::Unix { path, .. } => Ok(format!("unix:{}", path.display())),
            Self::Tcp(listener) => {
                let address = listener
                    .local_addr()
                    .map_err(|e| Error::internal(format!("the workers' listener has no address: {e}")))?;
                Ok(format!("http://{}", reachable(address)))
            }
        }
    }

    /// Whether strangers cannot reach it.
    pub fn is_private(&self) -> bool {
        matches!(self, Self::Unix { .. })
    }
}

/// An unspecified address listens everywhere; this machine finds it at its loopback.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

fn bind_unix(path: &Path) -> Result<UnixListener, Error> {
    UnixListener::bind(path)
        .map_err(|e| Error::invalid(FIELD, format!("cannot listen on unix:{}: {e}", path.display())))
}

/// Removes the socket that a conductor which was killed has left; a live one's is kept, and binding then fails.
fn clear_stale(path: &Path) -> Result<(), Error> {
    match StdUnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)
            .map_err(|e| Error::invalid(FIELD, format!("cannot replace unix:{}: {e}", path.display()))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dead_conductors_socket_is_replaced_and_a_live_ones_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let address = WorkerAddress::Unix(directory.path().join("socket"));
        let first = WorkerListener::bind(Some(&address)).await.unwrap();
        let error = WorkerListener::bind(Some(&address)).await.unwrap_err();
        assert_eq!(error.field(), Some("worker_listen"));
        drop(first);
        assert!(WorkerListener::bind(Some(&address)).await.is_ok());
    }

    #[tokio::test]
    async fn the_default_socket_goes_away() {
        let listener = WorkerListener::bind(None).await.unwrap();
        let WorkerListener::Unix { path, .. } = &listener else { panic!("not a Unix socket") };
        let path = path.clone();
        assert!(path.exists());
        drop(listener);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_tcp_gate_is_dialled_at_loopback() {
        let any = WorkerAddress::Tcp(SocketAddr::from(([0, 0, 0, 0], 0)));
        let listener = WorkerListener::bind(Some(&any)).await.unwrap();
        assert!(listener.local_url().unwrap().starts_with("http://127.0.0.1:"));
    }
}
