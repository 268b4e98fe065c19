//! Shared memory on one host that holds the pages or embeddings of one request.
//!
//! The receiver creates the segment. The sender opens the path that the receiver has announced, and writes to the
//! segment. The segment has no name in any file system, and disappears when both processes have closed it or have died.
//! The segment's size is sealed and the segment is never mapped, so neither process can cause a fault in the other.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::Path,
};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// Bytes before the first unit. They hold the transfer's secret. The sender checks the secret, because the same path
/// may be a different file on the sender's side, for example in another container.
const HEADER_BYTES: u64 = 4096;

/// A segment, as either side holds it.
#[derive(Debug)]
pub(super) struct Segment {
    file: File,
    bytes: u64,
}

impl Segment {
    /// Creates a segment with room for units of `bytes` bytes in total.
    pub fn create(secret: &[u8], bytes: u64) -> io::Result<Self> {
        let file = File::from(memfd_create("tutti-planes", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.set_len(HEADER_BYTES + bytes)?;
        file.write_all_at(secret, 0)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { file, bytes })
    }

    /// Creates a segment. On failure, logs the reason and returns `None`.
    pub fn offer(secret: &[u8], bytes: u64) -> Option<Self> {
        Self::create(secret, bytes)
            .inspect_err(|error| tracing::warn!(%error, "no shared memory; planes come as bytes"))
            .ok()
    }

    /// Path of the segment for other processes of this host.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// Opens the segment at a receiver's path. Fails if the path does not exist on this host or belongs to another
    /// transfer.
    pub fn open(path: &str, secret: &[u8]) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(Path::new(path))?;
        let length = file.metadata()?.len();
        let mut found = vec![0; secret.len()];
        file.read_exact_at(&mut found, 0)?;
        if length < HEADER_BYTES || found != secret {
            return Err(io::Error::other("it belongs to something else"));
        }
        Ok(Self { file, bytes: length - HEADER_BYTES })
    }

    /// True if the range lies within the segment. Offset 0 is the end of the header.
    pub fn holds(&self, offset: u64, length: u64) -> bool {
        offset.checked_add(length).is_some_and(|end| end <= self.bytes)
    }

    pub fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, HEADER_BYTES + offset)
    }

    pub fn read(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut data = vec![0; length];
        self.file.read_exact_at(&mut data, HEADER_BYTES + offset)?;
        Ok(data)
    }
}

#[cfg(test)]
mod tests;
