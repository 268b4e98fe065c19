//! TLS over a blocking socket of `std`. The ranks of a group use it, because their threads block on each other's
//! messages and run no async tasks.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    sync::Arc,
};

use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

use super::{reasons, roles::Role};
use crate::Error;

/// An encrypted connection. The handshake takes place in the first reads and writes. The socket may be non-blocking, or
/// have time limits: an error of kind `WouldBlock` or `TimedOut` leaves the connection intact, and the call may be
/// repeated.
pub struct BlockingTls {
    tls: Connection,
    socket: TcpStream,
    /// The peer's address, for the log.
    peer: String,
    /// True once a byte of the peer has been decrypted. The peer has then accepted this process's certificate.
    is_established: bool,
}

impl BlockingTls {
    pub(super) fn accepted(socket: &TcpStream, config: Arc<ServerConfig>) -> Result<Self, Error> {
        let tls = ServerConnection::new(config).map_err(|e| unusable(&e))?;
        Self::over(socket, tls.into())
    }

    pub(super) fn dialed(socket: &TcpStream, config: Arc<ClientConfig>) -> Result<Self, Error> {
        let name = Role::Worker.server_name().map_err(|e| unusable(&e))?;
        let tls = ClientConnection::new(config, name).map_err(|e| unusable(&e))?;
        Self::over(socket, tls.into())
    }

    fn over(socket: &TcpStream, tls: Connection) -> Result<Self, Error> {
        let socket = socket.try_clone().map_err(|e| unusable(&e))?;
        let peer = socket.peer_addr().map_or_else(|_| "a peer that left".into(), |peer| peer.to_string());
        Ok(Self { tls, socket, peer, is_established: false })
    }

    /// The socket, for its time limits.
    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// Logs and returns the reason if the handshake has failed. Returns waits and later errors unchanged.
    fn explain(&self, error: io::Error) -> io::Error {
        use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
        if self.is_established || matches!(error.kind(), Interrupted | TimedOut | WouldBlock) {
            return error;
        }
        let reason = reasons::of(&error);
        tracing::warn!(peer = self.peer, reason, "no encrypted connection in a group");
        io::Error::new(error.kind(), format!("no encrypted connection to {}: {reason}", self.peer))
    }

    /// Completes the handshake, and sends all data that is already encrypted.
    fn settle(&mut self) -> io::Result<()> {
        while self.tls.is_handshaking() {
            if self.tls.complete_io(&mut self.socket)? == (0, 0) {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        while self.tls.wants_write() {
            if self.tls.write_tls(&mut self.socket)? == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
        }
        Ok(())
    }

    fn decrypt(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.settle()?;
        loop {
            match self.tls.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.tls.complete_io(&mut self.socket)?;
                }
                read => return read,
            }
        }
    }
}

fn unusable(error: &dyn std::fmt::Display) -> Error {
    Error::internal(format!("cannot encrypt a connection of a group: {error}"))
}

impl Read for BlockingTls {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.decrypt(buffer) {
            Ok(read) => {
                self.is_established |= read > 0;
                Ok(read)
            }
            // A killed process closes its connection without a TLS close. The length of each message is known, so a
            // truncated message is still noticed.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && self.is_established => Ok(0),
            Err(error) => Err(self.explain(error)),
        }
    }
}

impl Write for BlockingTls {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        // Data is encrypted only after earlier data has been sent, so at most one buffer waits.
        self.settle().map_err(|error| self.explain(error))?;
        self.tls.writer().write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.settle().map_err(|error| self.explain(error))
    }
}
