//! The bytes of one accepted connection, with or without TLS. A time limit bounds a peer that does not read.

use std::{
    fmt, io,
    net::{IpAddr, Ipv6Addr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpStream, UnixStream},
    time::{Sleep, sleep},
};
use tokio_rustls::server::TlsStream;

use super::{activity::Activity, frames::FrameBudget};

/// The peer of a connection. Every request carries it as an extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Peer {
    /// A peer over TCP.
    Ip(IpAddr),
    /// A process of this machine, over a Unix socket.
    Local,
}

impl Peer {
    /// The network that counts as one peer: an IPv4 address, or the /64 network of an IPv6 address, because one host
    /// often has a whole /64.
    pub fn network(address: IpAddr) -> IpAddr {
        match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
            address => address,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::Local => f.write_str("a process of this machine"),
        }
    }
}

/// The socket of a connection.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    /// The socket as a reader of either type.
    fn reader(&mut self) -> Pin<&mut (dyn AsyncRead + Unpin)> {
        match self {
            Self::Tcp(stream) => Pin::new(stream),
            Self::Unix(stream) => Pin::new(stream),
        }
    }

    fn writer(&mut self) -> Pin<&mut (dyn AsyncWrite + Unpin)> {
        match self {
            Self::Tcp(stream) => Pin::new(stream),
            Self::Unix(stream) => Pin::new(stream),
        }
    }
}

/// A socket whose writes fail if the peer takes no byte for `patience`.
pub(super) struct TimedSocket {
    socket: Socket,
    patience: Duration,
    /// Ends the wait for the peer; `None` while no output waits.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl TimedSocket {
    pub fn new(socket: Socket, patience: Duration) -> Self {
        Self { socket, patience, stalled: None }
    }

    /// Returns the outcome of a write, and limits the time for which writes are pending.
    fn timed<T>(&mut self, context: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.stalled = None;
            return outcome;
        }
        let patience = self.patience;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(stalled.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer does not read")))
    }
}

impl AsyncRead for TimedSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.socket.reader().poll_read(context, buffer)
    }
}

impl AsyncWrite for TimedSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let outcome = self.socket.writer().poll_write(context, bytes);
        self.timed(context, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = self.socket.writer().poll_write_vectored(context, slices);
        self.timed(context, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    // A socket has no buffer in this process, so neither a flush nor a shutdown waits for the peer.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket.writer().poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.socket.writer().poll_shutdown(context)
    }
}

/// A connection's plain bytes.
pub(super) enum Stream {
    Plain(TimedSocket),
    /// Boxed, so that plain connections stay small.
    Tls(Box<TlsStream<TimedSocket>>),
}

/// A connection that reports its reads to [`Activity`]. It also reports a flood of frames, and then reads no more. The
/// bytes of a TLS handshake do not count as a part of a request's head.
pub(super) struct ActiveStream {
    stream: Stream,
    activity: Arc<Activity>,
    frames: FrameBudget,
    is_flooded: bool,
}

impl ActiveStream {
    pub fn new(stream: Stream, activity: Arc<Activity>) -> Self {
        Self { stream, activity, frames: FrameBudget::new(), is_flooded: false }
    }

    fn writer(&mut self) -> Pin<&mut (dyn AsyncWrite + Unpin)> {
        match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream),
            Stream::Tls(stream) => Pin::new(stream),
        }
    }
}

impl AsyncRead for ActiveStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_flooded {
            // No wake-up is needed, because the connection's task ends the connection.
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        ready!(match &mut self.stream {
            Stream::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Stream::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        })?;
        if buffer.filled().len() > before {
            self.activity.bytes_read();
            if !self.frames.read(&buffer.filled()[before..]) {
                self.is_flooded = true;
                self.activity.flood();
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ActiveStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(self.writer().poll_write(context, bytes))?;
        self.frames.written(written);
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(self.writer().poll_write_vectored(context, slices))?;
        self.frames.written(written);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.writer().poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.writer().poll_shutdown(context)
    }
}
