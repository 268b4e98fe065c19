//! The server side of TLS on a listener.

use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::RwLock;
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::reasons;

/// The TLS of one listener. Clones share the certificate, which may be replaced at any time.
#[derive(Clone, Debug)]
pub struct ServerTls {
    current: Arc<RwLock<Arc<ServerConfig>>>,
    /// True if peers are processes of the cluster. A refused peer is then logged as a warning.
    is_mutual: bool,
}

impl ServerTls {
    pub(super) fn new(config: ServerConfig, is_mutual: bool) -> Self {
        Self { current: Arc::new(RwLock::new(Arc::new(config))), is_mutual }
    }

    /// Replaces the configuration of new connections.
    pub(super) fn install(&self, config: ServerConfig) {
        *self.current.write() = Arc::new(config);
    }

    pub(super) fn config(&self) -> Arc<ServerConfig> {
        self.current.read().clone()
    }

    /// True if peers show certificates too.
    pub(crate) fn is_mutual(&self) -> bool {
        self.is_mutual
    }

    /// Performs the handshake within `limit`. The error says why the handshake failed.
    pub(crate) async fn accept<S>(&self, stream: S, limit: Duration) -> Result<TlsStream<S>, String>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let accepting = TlsAcceptor::from(self.config()).accept(stream);
        match timeout(limit, accepting).await {
            Ok(accepted) => accepted.map_err(|error: io::Error| reasons::of(&error)),
            Err(_) => Err(format!("its handshake did not end within {limit:?}")),
        }
    }
}

/// Time over which refusals are counted for the limit on log lines.
const WINDOW: Duration = Duration::from_secs(10);
/// Maximum number of log lines per window. A peer that is refused repeatedly must not fill the log.
const LINES: u32 = 8;

/// A limit on the log lines about refused peers.
#[derive(Debug, Default)]
pub(crate) struct RefusalLog {
    began: Option<Instant>,
    lines: u32,
    unlogged: u64,
}

impl RefusalLog {
    /// Counts a refusal. Returns the number of earlier refusals that were not logged, or `None` if this refusal must
    /// not be logged either.
    pub fn count(&mut self) -> Option<u64> {
        if self.began.is_none_or(|began| began.elapsed() >= WINDOW) {
            (self.began, self.lines) = (Some(Instant::now()), 0);
        }
        if self.lines == LINES {
            self.unlogged += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.unlogged))
    }
}
