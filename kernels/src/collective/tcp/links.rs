//! The connections between ranks, which may be encrypted.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
};

/// A connection between two ranks. A call that ends with `WouldBlock` or `TimedOut` may be repeated.
pub trait RankStream: Read + Write + Send {
    /// Returns the underlying socket, so that the caller can set its time limits.
    fn socket(&self) -> &TcpStream;
}

impl RankStream for TcpStream {
    fn socket(&self) -> &TcpStream {
        self
    }
}

/// Makes connections between ranks out of sockets. A handshake, if there is one, takes place at the first read or write
/// of the stream.
pub trait RankLinks: Send + Sync {
    /// Wraps a socket that rank 0 has accepted.
    fn accepted(&self, socket: TcpStream) -> io::Result<Box<dyn RankStream>>;
    /// Wraps a socket with which a rank other than 0 has connected to rank 0.
    fn dialed(&self, socket: TcpStream) -> io::Result<Box<dyn RankStream>>;
}

/// Connections without encryption.
#[derive(Clone, Copy, Debug)]
pub struct PlainLinks;

impl RankLinks for PlainLinks {
    fn accepted(&self, socket: TcpStream) -> io::Result<Box<dyn RankStream>> {
        Ok(Box::new(socket))
    }

    fn dialed(&self, socket: TcpStream) -> io::Result<Box<dyn RankStream>> {
        Ok(Box::new(socket))
    }
}
