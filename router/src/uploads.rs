//! Limits on the request bodies that clients send: memory for all bodies together, memory per peer, and the pace at
//! which a body must arrive.
//!
//! Memory is reserved as bytes arrive. So a client that announces a large body and sends little of it holds little
//! memory.

use std::{collections::HashMap, net::IpAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tutti_runtime::{Error, ErrorKind, serve::Peer};
use tutti_settings::RouterSettings;

/// Memory for all bodies together, as a multiple of the maximum size of one body.
pub const LARGEST_AT_ONCE: usize = 16;
/// Memory for the bodies of one peer, as a multiple of the maximum size of one body.
pub const LARGEST_PER_PEER: usize = 8;
/// Unit of the memory limit, in bytes.
pub const PIECE_BYTES: usize = 4096;
/// Time that a body may take beyond the time that its received bytes take at the minimum rate.
const PATIENCE: Duration = Duration::from_secs(10);

/// The pace at which a body must arrive.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Time that a body may take beyond the time that its received bytes take at the minimum rate.
    pub patience: Duration,
    /// Maximum time for a whole body.
    pub whole: Duration,
    /// Minimum rate in bytes per second.
    pub bytes_per_second: u32,
}

impl Pace {
    /// The pace of these settings, with the default patience.
    pub fn of(settings: &RouterSettings) -> Self {
        let (whole, bytes_per_second) = (settings.upload_timeout(), settings.upload_bytes_per_second);
        Self { patience: PATIENCE, whole, bytes_per_second }
    }
}

/// The bodies that are arriving or being parsed. Clones share the limits.
#[derive(Clone)]
pub struct Uploads {
    room: Arc<Room>,
    /// Returns the pace of a body that begins now.
    pace: Arc<dyn Fn() -> Pace + Send + Sync>,
}

struct Room {
    /// Maximum size of one body in bytes.
    limit: usize,
    /// One permit per `PIECE_BYTES` of memory.
    memory: Arc<Semaphore>,
    /// Bytes held per peer. A peer without bytes has no entry.
    peers: Mutex<HashMap<IpAddr, usize>>,
}

/// One body that is arriving or being parsed. Dropping it releases its memory.
pub struct Upload {
    room: Arc<Room>,
    pace: Pace,
    peer: Option<IpAddr>,
    started: Instant,
    /// Bytes received.
    bytes: usize,
    /// Number of bytes that count towards the peer's memory limit.
    counted: usize,
    memory: Option<OwnedSemaphorePermit>,
    /// Number of permits in `memory`.
    pieces: usize,
}

impl Uploads {
    /// Creates the limits for bodies of at most `limit` bytes each. `pace` returns the pace of a body that begins now.
    pub fn new(limit: usize, pace: impl Fn() -> Pace + Send + Sync + 'static) -> Self {
        let pieces = limit.div_ceil(PIECE_BYTES).saturating_mul(LARGEST_AT_ONCE);
        let memory = Arc::new(Semaphore::new(pieces.min(Semaphore::MAX_PERMITS)));
        Self { room: Arc::new(Room { limit, memory, peers: Mutex::default() }), pace: Arc::new(pace) }
    }

    /// Maximum size of one body in bytes.
    pub fn limit(&self) -> usize {
        self.room.limit
    }

    /// Begins to receive a body. The pace counts from now. Without a known peer, the limit per peer does not apply.
    pub fn begin(&self, peer: Option<IpAddr>) -> Upload {
        Upload {
            room: self.room.clone(),
            pace: (self.pace)(),
            peer: peer.map(Peer::network),
            started: Instant::now(),
            bytes: 0,
            counted: 0,
            memory: None,
            pieces: 0,
        }
    }
}

impl Upload {
    /// Reserves memory for bytes that have arrived. Returns an error if the body, its peer or all bodies together
    /// exceed their limit.
    pub fn take(&mut self, bytes: usize) -> Result<(), Error> {
        let total = self.bytes + bytes;
        if total > self.room.limit {
            return Err(self.too_large());
        }
        if let Some(peer) = self.peer {
            let most = self.room.limit.saturating_mul(LARGEST_PER_PEER);
            let mut peers = self.room.peers.lock();
            let held = peers.entry(peer).or_default();
            if *held + bytes > most {
                let message = format!("the bodies from {peer} reach the limit of {most} bytes at once");
                return Err(Error::rate_limited(message, Duration::from_secs(1)));
            }
            *held += bytes;
            self.counted += bytes;
        }
        let pieces = total.div_ceil(PIECE_BYTES);
        let more = u32::try_from(pieces - self.pieces).unwrap_or(u32::MAX);
        let permit = self.room.memory.clone().try_acquire_many_owned(more).map_err(|_| {
            let most = self.room.limit.saturating_mul(LARGEST_AT_ONCE);
            let message = format!("the bodies being read reach the limit of {most} bytes");
            Error::overloaded(message, Duration::from_secs(1))
        })?;
        match &mut self.memory {
            Some(held) => held.merge(permit),
            None => self.memory = Some(permit),
        }
        (self.pieces, self.bytes) = (pieces, total);
        Ok(())
    }

    /// Time after which the body is too slow, unless more of it arrives before.
    pub fn due(&self) -> Instant {
        let seconds = self.bytes as f64 / f64::from(self.pace.bytes_per_second.max(1));
        // The cap keeps the number of seconds within the range of `Duration`.
        let earned = Duration::from_secs_f64(seconds.min(1e9));
        self.started + self.pace.whole.min(self.pace.patience.saturating_add(earned))
    }

    /// The error of a body that did not arrive in time.
    pub fn too_slow(&self) -> Error {
        let (bytes, pace) = (self.bytes, self.pace);
        let message = format!(
            "the body arrives too slowly: {bytes} bytes in {:?}; a body needs {} bytes per second after {:?}, and may take {:?}",
            self.started.elapsed(),
            pace.bytes_per_second,
            pace.patience,
            pace.whole
        );
        Error::new(ErrorKind::TooSlow, message)
    }

    /// The error of a body over the limit.
    pub fn too_large(&self) -> Error {
        let message = format!("the body is over the limit of {} bytes", self.room.limit);
        Error::new(ErrorKind::TooLarge, message)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let Some(peer) = self.peer.filter(|_| self.counted > 0) else { return };
        let mut peers = self.room.peers.lock();
        if let Some(held) = peers.get_mut(&peer) {
            *held -= self.counted;
            if *held == 0 {
                peers.remove(&peer);
            }
        }
    }
}

/// The error of a body that was not received completely.
pub fn broken(how: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("the body {how}"))
}

#[cfg(test)]
mod tests;
