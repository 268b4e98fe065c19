//! Encryption of the connections between the ranks of a group over TCP.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
};

use tutti_kernels::collective::{RankLinks, RankStream};
use tutti_runtime::{Error, tls::BlockingTls};

use super::Network;

/// An encrypted connection between two ranks.
struct EncryptedLink(BlockingTls);

impl Read for EncryptedLink {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for EncryptedLink {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.0.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl RankStream for EncryptedLink {
    fn socket(&self) -> &TcpStream {
        self.0.socket()
    }
}

impl RankLinks for Network {
    fn accepted(&self, socket: TcpStream) -> io::Result<Box<dyn RankStream>> {
        let encrypted = self.transport.accepted_rank(&socket);
        link(socket, encrypted)
    }

    fn dialed(&self, socket: TcpStream) -> io::Result<Box<dyn RankStream>> {
        let leader = socket.peer_addr()?.to_string();
        self.transport.check_dial("conductor", &leader).map_err(|e| io::Error::other(e.to_string()))?;
        let encrypted = self.transport.dialed_leader(&socket);
        link(socket, encrypted)
    }
}

fn link(socket: TcpStream, encrypted: Option<Result<BlockingTls, Error>>) -> io::Result<Box<dyn RankStream>> {
    match encrypted {
        None => Ok(Box::new(socket)),
        Some(Ok(tls)) => Ok(Box::new(EncryptedLink(tls))),
        Some(Err(error)) => Err(io::Error::other(error.to_string())),
    }
}
