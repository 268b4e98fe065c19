//! Shared memory of one host, for the pages of one request.
//!
//! The receiver makes the segment, and the sender writes to it by the receiver's own path to it. It has no name in any
//! file system: it is gone once both processes have let go of it, however they end. It cannot be made shorter or longer,
//! and neither side maps it, so nothing that one side does can fault in the other.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::FileExt},
    path::Path,
};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// What stands before the pages: the secret of the transfer, so that a path that means another file to the sender, in
/// another container say, is not taken for the segment.
const HEADER_BYTES: u64 = 4096;

/// Either side's end.
#[derive(Debug)]
pub(super) struct Segment {
    file: File,
    bytes: u64,
}

impl Segment {
    /// Room for so many bytes of pages.
    pub fn create(secret: &[u8], bytes: u64) -> io::Result<Self> {
        let file = File::from(memfd_create("tutti-planes", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.set_len(HEADER_BYTES + bytes)?;
        file.write_all_at(secret, 0)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(Self { file, bytes })
    }

    /// Where a process of this host finds it.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    /// The segment at a receiver's path. An error where that is none of this host, or not this transfer's.
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

    /// Whether pages have room here.
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
mod tests {
    use super::*;

    const SECRET: [u8; 16] = [7; 16];

    #[test]
    fn what_one_end_writes_the_other_reads() {
        let here = Segment::create(&SECRET, 100).unwrap();
        let there = Segment::open(&here.path(), &SECRET).unwrap();
        there.write(60, &[1; 40]).unwrap();
        assert_eq!(here.read(60, 40).unwrap(), [1; 40]);
        assert!(there.holds(60, 40) && !there.holds(60, 41) && !there.holds(u64::MAX, 2));
        assert!(there.write(61, &[1; 40]).is_err(), "it does not grow");
        assert!(there.file.set_len(10).is_err(), "nor shrink");
    }

    #[test]
    fn another_secret_is_another_segment() {
        // Not the other tests': their segments may take the number of the file that is gone.
        let secret = [9; 16];
        let here = Segment::create(&secret, 100).unwrap();
        assert!(Segment::open(&here.path(), &[8; 16]).is_err());
        let path = here.path();
        drop(here);
        assert!(Segment::open(&path, &secret).is_err(), "it is gone with its holders");
        assert!(Segment::open("/proc/self/fd/0/none", &secret).is_err());
    }
}
