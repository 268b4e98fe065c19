//! The listener that workers dial. It is bound before any worker is spawned.

use std::{
    io,
    os::unix::net::UnixStream as StdUnixStream,
    path::{Path, PathBuf},
};

use tokio::net::{TcpListener, UnixListener};
use tutti_runtime::{Error, listen, serve};
use tutti_settings::WorkerAddress;

use crate::private_directory::PrivateDirectory;

const FIELD: &str = "worker_listen";
/// File name of the socket in a private directory.
const SOCKET: &str = "workers.sock";

/// A bound listener for workers.
#[derive(Debug)]
pub enum WorkerListener {
    /// A Unix socket, for workers of this machine.
    Unix {
        /// The bound socket.
        listener: UnixListener,
        /// The socket's path.
        path: PathBuf,
        /// The private directory of the socket; `None` if a path was given. The directory is removed when the listener
        /// is dropped.
        directory: Option<PrivateDirectory>,
    },
    /// A TCP socket, for workers of any machine.
    Tcp(TcpListener),
}

impl WorkerListener {
    /// Binds `address`, or by default a socket in a directory that only this user can enter.
    pub async fn bind(address: Option<&WorkerAddress>) -> Result<Self, Error> {
        match address {
            Some(WorkerAddress::Tcp(address)) => Ok(Self::Tcp(listen::tcp(FIELD, *address).await?)),
            Some(WorkerAddress::Unix(path)) => {
                clear_stale(path)?;
                Ok(Self::Unix { listener: bind_unix(path)?, path: path.clone(), directory: None })
            }
            None => {
                // A process that reaches the socket can join as a worker, so only this user may reach it.
                let directory = PrivateDirectory::new_in(&std::env::temp_dir()).map_err(|e| {
                    Error::internal(format!("cannot make a directory for the workers' socket: {e}"))
                })?;
                let path = directory.path().join(SOCKET);
                Ok(Self::Unix { listener: bind_unix(&path)?, path, directory: Some(directory) })
            }
        }
    }

    /// The URL that a worker on this machine gets as `--conductor`.
    pub fn local_url(&self) -> Result<String, Error> {
        match self {
            Self::Unix { path, .. } => Ok(format!("unix:{}", path.display())),
            Self::Tcp(listener) => {
                let address = listener
                    .local_addr()
                    .map_err(|e| Error::internal(format!("the workers' listener has no address: {e}")))?;
                Ok(format!("http://{}", listen::reachable(address)))
            }
        }
    }

    /// The socket, and the directory that must outlive it.
    pub fn into_parts(self) -> (serve::Listener, Option<PrivateDirectory>) {
        match self {
            Self::Unix { listener, directory, .. } => (listener.into(), directory),
            Self::Tcp(listener) => (listener.into(), None),
        }
    }

    /// True if only permitted users of this machine can reach the listener.
    pub fn is_private(&self) -> bool {
        matches!(self, Self::Unix { .. })
    }
}

fn bind_unix(path: &Path) -> Result<UnixListener, Error> {
    UnixListener::bind(path)
        .map_err(|e| Error::invalid(FIELD, format!("cannot listen on unix:{}: {e}", path.display())))
}

/// Removes a socket that a killed conductor has left at `path`. A live conductor's socket is kept, so that binding then
/// fails.
fn clear_stale(path: &Path) -> Result<(), Error> {
    match StdUnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)
            .map_err(|e| Error::invalid(FIELD, format!("cannot replace unix:{}: {e}", path.display()))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
