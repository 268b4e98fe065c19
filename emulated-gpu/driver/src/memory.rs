//! Device memory of a context: what is allocated in the order of calls, over the emulator's memory, whose frees happen
//! in the order of streams.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use tutti_emulated_gpu::{BadAddress, DeviceMemory};

use crate::error::{Error, Outcome};

/// First byte of every device address; no host pointer has it.
const DEVICE_BYTE: u64 = 0xd0;

/// True if an address could be a device's. A host pointer never is one.
pub fn is_device_address(address: u64) -> bool {
    (address >> 48) & 0xff == DEVICE_BYTE
}

/// Memory of a context.
pub struct Memory {
    /// The emulator's memory, for launches.
    pub device: DeviceMemory,
    /// Bytes of the device.
    pub capacity: u64,
    /// First addresses of allocations whose free was asked for and has not run.
    freeing: Mutex<HashSet<u64>>,
}

impl Memory {
    /// Memory of `capacity` bytes, `watched` if reads of unwritten bytes or races are reported.
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

    /// Notes that a free of `address` was asked for.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if no allocation begins there, or its free was asked for already.
    pub fn will_free(&self, address: u64) -> Outcome {
        match self.device.allocation(address) {
            Some((base, _)) if base == address && self.lock().insert(address) => Ok(()),
            _ => Err(Error::INVALID_VALUE),
        }
    }

    /// Frees memory that [`Memory::will_free`] named.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if no allocation begins there.
    pub fn free(&self, address: u64) -> Outcome {
        let freed = self.device.free(address).map_err(|_| Error::INVALID_VALUE);
        self.lock().remove(&address);
        freed
    }

    /// True if a free was asked for and has not run.
    pub fn has_pending_frees(&self) -> bool {
        !self.lock().is_empty()
    }

    /// Checks at a call that a range lies in one allocation.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if not, as for a host pointer.
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

/// The error of work that met a bad address, which is reported.
pub fn illegal(what: &str, device: usize, error: &BadAddress) -> Error {
    report(device, &format!("{what}: {error}"));
    Error::ILLEGAL_ADDRESS
}

/// Prints a report of a device.
pub fn report(device: usize, text: &str) {
    eprintln!("emulated GPU {device}: {text}");
}
