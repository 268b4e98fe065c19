//! Binding of addresses, with errors that name the setting at fault.

use std::{
    io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    os::unix::{fs::FileTypeExt, net::UnixStream},
    path::Path,
};

use rustix::{
    fs::{Mode, fchmod},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with},
};
use tokio::net::{TcpListener, TcpSocket, UnixListener};

use crate::Error;

/// Maximum length of a listener's accept queue. If the queue is full, the kernel drops a new connection's first packet,
/// and the client retries only after a second. A burst of connections would thus delay all clients. Linux caps the
/// length at `net.core.somaxconn`, which is 4096 by default.
pub const BACKLOG: u32 = 4096;

/// Binds a TCP address. `field` is the setting that an error names. A port in use is a usage error, not an internal
/// one.
pub fn tcp(field: &str, address: SocketAddr) -> Result<TcpListener, Error> {
    bind(address).map_err(|e| Error::invalid(field, format!("cannot listen on {address}: {e}")))
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A restarted process can take its port again while connections of the previous process linger.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Longest path of a socket that processes can connect to, in bytes: `sun_path` with the byte that ends it (unix(7)).
pub const MAX_SOCKET_PATH: usize = 107;

/// Refuses a path of a socket that no process could connect to.
pub fn check_socket_path(path: &Path) -> io::Result<()> {
    let bytes = path.as_os_str().len();
    if bytes <= MAX_SOCKET_PATH {
        return Ok(());
    }
    let why = format!(
        "its path has {bytes} bytes, the limit is {MAX_SOCKET_PATH}: take a shorter directory, for the default one by \
         TMPDIR"
    );
    Err(io::Error::new(io::ErrorKind::InvalidFilename, why))
}

/// Binds a Unix socket that only this user can connect to.
pub fn unix(path: &Path) -> io::Result<UnixListener> {
    check_socket_path(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The socket file gets its mode from the socket, so the mode is set before the bind. Other users can therefore
    // never connect, whatever the umask is.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG as i32)?;
    UnixListener::from_std(socket.into())
}

/// Removes a socket that a killed process has left at `path`. Keeps the socket of a live process and any file that is
/// not a socket; binding then fails.
pub fn clear_stale(path: &Path) -> io::Result<()> {
    // A symbolic link is not followed, because its target may belong to another program.
    let is_socket = path.symlink_metadata().is_ok_and(|found| found.file_type().is_socket());
    match UnixStream::connect(path) {
        Err(e) if is_socket && e.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        _ => Ok(()),
    }
}

/// The address at which this machine reaches a listener. A listener on all interfaces is reached at the loopback
/// address.
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
mod tests;
