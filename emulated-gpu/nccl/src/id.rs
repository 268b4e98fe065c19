//! Unique ids: an id holds the name of the socket at which the ranks of a group meet.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::result::{Error, Outcome};

/// First bytes of every id.
const MAGIC: &[u8; 8] = b"tutti-id";
/// Bytes of an id (`NCCL_UNIQUE_ID_BYTES`).
const BYTES: usize = 128;

/// `ncclUniqueId`: the magic, the length of a socket's name, and the name.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; BYTES]);

/// Returns an unused name in the abstract namespace of Unix sockets. A socket of this namespace leaves no file.
pub fn unused_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("tutti-emulated-nccl-{}-{next}-{now:x}", std::process::id())
}

/// Returns the address of a named socket.
///
/// # Errors
///
/// `INVALID_ARGUMENT` for text that cannot be a socket's name.
pub fn address(name: &str) -> Outcome<SocketAddr> {
    SocketAddr::from_abstract_name(name).map_err(|_| Error::INVALID_ARGUMENT)
}

impl UniqueId {
    /// Makes the id for a socket's name.
    pub fn new(name: &str) -> Self {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8] = name.len() as u8;
        bytes[9..9 + name.len()].copy_from_slice(name.as_bytes());
        UniqueId(bytes)
    }

    /// Returns the socket's name.
    ///
    /// # Errors
    ///
    /// `INVALID_ARGUMENT` for bytes that are not an id of this library.
    pub fn name(&self) -> Outcome<&str> {
        let length = usize::from(self.0[8]);
        let name = self.0.get(9..9 + length).filter(|_| self.0.starts_with(MAGIC));
        name.and_then(|name| std::str::from_utf8(name).ok()).ok_or(Error::INVALID_ARGUMENT)
    }
}
