//! A worker's network: the address at which other workers dial it, and the encryption and the limits of connections
//! between workers.

mod links;

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
};

use tokio::net::UnixListener;
use tutti_runtime::{
    Error, listen, serve,
    tls::{ClusterTransport, Dial, roles::Role},
    token,
};
use tutti_settings::ConnectionSettings;

/// Name of the setting in errors about a worker's address. The worker's address is the one from which it dials the
/// conductor.
const FIELD: &str = "conductor";

/// Start of the name of a worker's socket.
const SOCKET: &str = "planes-";

/// The network, as one worker sees it.
#[derive(Clone, Debug)]
pub struct Network {
    /// Address at which other workers dial this worker.
    pub host: IpAddr,
    /// Directory of the workers' Unix sockets if all workers are on this machine. No other user reaches the sockets.
    /// With `None`, other workers dial a port at `host`.
    pub sockets: Option<PathBuf>,
    /// The rules for the encryption of connections between workers.
    pub transport: ClusterTransport,
    /// Limits on connections from other workers.
    pub connections: ConnectionSettings,
}

/// The address of a worker's services on its machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceAddress {
    /// A TCP port.
    Port(u16),
    /// The path of a Unix socket.
    Socket(String),
}

impl ServiceAddress {
    /// The fields `port` and `socket` of a message.
    pub fn into_fields(self) -> (u32, String) {
        match self {
            Self::Port(port) => (port.into(), String::new()),
            Self::Socket(path) => (0, path),
        }
    }

    /// The address to dial for these fields of a message from a worker at `host`.
    pub fn dialled(host: IpAddr, port: u32, socket: &str) -> String {
        match socket {
            "" => SocketAddr::new(host, u16::try_from(port).unwrap_or_default()).to_string(),
            path => format!("unix:{path}"),
        }
    }
}

impl Network {
    /// The directory of the workers' sockets if a worker dials its conductor at `unix:PATH`: all workers are then on
    /// the conductor's machine. `None` for any other URL.
    pub fn sockets_beside(conductor: &str) -> Option<PathBuf> {
        let socket = std::path::absolute(conductor.strip_prefix("unix:")?).ok()?;
        socket.parent().map(Path::to_path_buf)
    }

    /// Opens the listener for the services of this worker: a Unix socket where all workers are on this machine, and a
    /// port elsewhere. Must be called inside a Tokio runtime.
    pub fn listen(&self) -> io::Result<(serve::Listener, ServiceAddress)> {
        if let Some(directory) = &self.sockets {
            let (listener, path) = new_socket(directory)?;
            let path = path.to_str().ok_or(io::ErrorKind::InvalidFilename)?.to_owned();
            return Ok((listener.into(), ServiceAddress::Socket(path)));
        }
        let listener = self.bind()?;
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let address = ServiceAddress::Port(listener.local_addr()?.port());
        Ok((serve::Listener::from(listener).with_tls(self.transport.server(Role::Worker)), address))
    }

    /// Binds a free port at `host`. If other machines can reach the port, encryption is required, unless plaintext is
    /// allowed.
    pub fn bind(&self) -> io::Result<TcpListener> {
        let allowed = self.transport.check_listen(FIELD, SocketAddr::new(self.host, 0));
        allowed.map_err(|error| io::Error::other(error.to_string()))?;
        bind(self.host)
    }

    /// Returns a dialler of the worker at `HOST:PORT` or `unix:PATH`.
    pub fn dial(&self, address: &str) -> Result<Dial, Error> {
        match address.starts_with("unix:") {
            true => self.transport.dial(FIELD, address, Role::Worker),
            false => self.transport.dial(FIELD, &format!("http://{address}"), Role::Worker),
        }
    }
}

/// The network of a worker whose peers are on this machine: no encryption, and the default limits.
impl From<IpAddr> for Network {
    fn from(host: IpAddr) -> Self {
        let (transport, connections) = (ClusterTransport::default(), ConnectionSettings::default());
        Self { host, sockets: None, transport, connections }
    }
}

/// A new socket and its path. Removes the sockets that killed workers have left in the directory.
fn new_socket(directory: &Path) -> io::Result<(UnixListener, PathBuf)> {
    for entry in directory.read_dir()?.flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(SOCKET)) {
            // Ignored: another worker may have removed the file first, and a file that stays is in nobody's way.
            let _ = listen::clear_stale(&entry.path());
        }
    }
    // The name is random, because workers in several containers may have the same process id.
    let random = token::random_bytes().map_err(|error| io::Error::other(error.to_string()))?;
    let name: String = random[..4].iter().map(|byte| format!("{byte:02x}")).collect();
    // A socket refuses connections until it listens, and another worker would take it for one of a killed worker. So
    // the socket gets its final name only when it listens.
    let (unnamed, path) = (directory.join(format!("new-{name}")), directory.join(format!("{SOCKET}{name}")));
    // The final name is the longer one.
    listen::check_socket_path(&path)?;
    let listener = listen::unix(&unnamed)?;
    fs::rename(unnamed, &path)?;
    Ok((listener, path))
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
