//! Device memory of a context. An allocation happens at the call, and a free when it runs in its stream.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use tutti_emulated_gpu::{BadAddress, DeviceMemory};

use crate::error::{Error, Outcome};

/// Top byte (bits 48 to 55) of every device address. No host pointer has this byte in that place.
const DEVICE_BYTE: u64 = 0xd0;

/// True if an address can be a device address. False for every host pointer.
pub fn is_device_address(address: u64) -> bool {
    (address >> 48) & 0xff == DEVICE_BYTE
}

/// Memory of a context.
pub struct Memory {
    /// The emulator's memory, for launches.
    pub device: DeviceMemory,
    /// Size of the device's memory in bytes.
    pub capacity: u64,
    /// First addresses of the allocations whose free is enqueued but has not run.
    freeing: Mutex<HashSet<u64>>,
}

impl Memory {
    /// Creates a memory of `capacity` bytes. A `watched` memory can report reads of unwritten bytes and races.
    pub fn new(capacity: u64, watched: bool) -> Self {
        let device = if watched { DeviceMemory::watched(capacity) } else { DeviceMemory::new(capacity) };
        Memory { device, capacity, freeing: Mutex::default() }
    }

    /// Allocates memory.
    ///
    /// # Errors
    ///
    /// `OUT_OF_MEMORY`.
    pub fn allocate(&self, bytes: u64) -> Outcome<u64> {
        self.device.allocate(bytes).map_err(|_| Error::OUT_OF_MEMORY)
    }

    /// Bytes that are not allocated.
    pub fn free_bytes(&self) -> u64 {
        self.capacity - self.device.used()
    }

    /// Notes that a free of `address` is enqueued.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if no allocation begins at `address`, or if its free is already enqueued.
    pub fn will_free(&self, address: u64) -> Outcome {
        match self.device.allocation(address) {
            Some((base, _)) if base == address && self.lock().insert(address) => Ok(()),
            _ => Err(Error::INVALID_VALUE),
        }
    }

    /// Frees memory that was passed to [`Memory::will_free`].
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if no allocation begins at `address`.
    pub fn free(&self, address: u64) -> Outcome {
        let freed = self.device.free(address).map_err(|_| Error::INVALID_VALUE);
        self.lock().remove(&address);
        freed
    }

    /// True if there is an enqueued free that has not run.
    pub fn has_pending_frees(&self) -> bool {
        !self.lock().is_empty()
    }

    /// Checks that a range that a program passes to a call lies in one allocation.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if the range does not lie in one allocation, as for a host pointer.
    pub fn check(&self, address: u64, bytes: u64) -> Outcome {
        match self.device.allocation(address) {
            Some((base, size)) if bytes <= base + size - address => Ok(()),
            _ => Err(Error::INVALID_VALUE),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashSet<u64>> {
        self.freeing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Prints a report of a bad address that work has accessed, and returns the error for it.
pub fn illegal(what: &str, device: usize, error: &BadAddress) -> Error {
    report(device, &format!("{what}: {error}"));
    Error::ILLEGAL_ADDRESS
}

/// Prints a message about a device to stderr.
pub fn report(device: usize, text: &str) {
    eprintln!("emulated GPU {device}: {text}");
}
