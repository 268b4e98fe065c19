//! Device memory. The addresses of allocations differ from all host pointers.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

/// First device address. Bits 48 to 55 of a host pointer never have this value on the processors that run the emulator.
pub(crate) const FIRST_ADDRESS: u64 = 0x00d0_0000_0000_0000;
/// Bytes of the unused range after each allocation, so that an index past the end does not reach the next allocation.
const GAP: u64 = 1 << 20;
/// The alignment that the driver promises, in bytes. No address has a larger alignment, so that a kernel that relies on
/// more fails.
const ALIGNMENT: u64 = 256;
/// Number of freed ranges that the memory remembers, to tell a use after free from an address that was never allocated.
const FREED_RANGES: usize = 1 << 16;
/// Bytes that a fill writes per copy, unless the pattern is longer.
const FILL_BYTES: usize = 16 << 10;
/// Byte that fills memory that was never written. Read as bf16, f16 or f32, such memory is NaN.
pub(crate) const POISON: u8 = 0xff;

/// Error of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Bytes that were requested.
    pub bytes: u64,
    /// Bytes that were free.
    pub free: u64,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of device memory: {} bytes asked for, {} left", self.bytes, self.free)
    }
}

impl std::error::Error for OutOfMemory {}

/// Error of the host's access to device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadAddress {
    /// First address of the access.
    pub address: u64,
    /// Bytes of the access.
    pub bytes: u64,
    /// True if the address was in an allocation that has been freed.
    pub freed: bool,
    /// Description of the error.
    pub what: String,
}

impl fmt::Display for BadAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at device address {:#x}: {}", self.bytes, self.address, self.what)
    }
}

impl std::error::Error for BadAddress {}

/// One allocation. Its bytes are accessed only through raw pointers, because kernels on several threads share them.
pub(crate) struct Allocation {
    pub base: u64,
    pub bytes: u64,
    pub host: *mut u8,
    /// One byte per byte of the allocation: 1 if that byte was written. Null if the memory is not watched.
    pub written: *mut u8,
    races: OnceLock<RaceShadow>,
}

/// The last write and the last read of each byte of an allocation (see `exec::global_shadow`).
pub(crate) struct RaceShadow {
    pub writes: *mut u32,
    pub reads: *mut u32,
    bytes: u64,
}

// SAFETY: the pointers own their blocks, which are freed at the drop. Accesses go through raw pointers and may race,
// like the accesses of a GPU's threads.
unsafe impl Send for Allocation {}
// SAFETY: several threads access the blocks only through raw pointers, like the threads of a GPU.
unsafe impl Sync for Allocation {}
// SAFETY: the pointers own their blocks, which are freed at the drop.
unsafe impl Send for RaceShadow {}
// SAFETY: several threads access the blocks only through raw pointers, like the threads of a GPU.
unsafe impl Sync for RaceShadow {}

fn layout(bytes: u64) -> Option<Layout> {
    Layout::from_size_align(usize::try_from(bytes).ok()?.checked_add(256)?, 256).ok()
}

fn zeroed(bytes: u64) -> Option<*mut u8> {
    let layout = layout(bytes)?;
    // SAFETY: the layout's size is at least 256.
    let block = unsafe { alloc_zeroed(layout) };
    (!block.is_null()).then_some(block)
}

/// Frees a block that `zeroed(bytes)` returned.
fn give_back(block: *mut u8, bytes: u64) {
    if let (false, Some(layout)) = (block.is_null(), layout(bytes)) {
        // SAFETY: the block was allocated with this layout, and its owner frees it once.
        unsafe { dealloc(block, layout) };
    }
}

impl Allocation {
    fn new(base: u64, bytes: u64, watched: bool) -> Option<Self> {
        let host = zeroed(bytes)?;
        let written = if watched {
            // SAFETY: the block has at least `bytes` bytes.
            unsafe { host.write_bytes(POISON, bytes as usize) };
            match zeroed(bytes) {
                Some(shadow) => shadow,
                None => {
                    give_back(host, bytes);
                    return None;
                }
            }
        } else {
            std::ptr::null_mut()
        };
        Some(Allocation { base, bytes, host, written, races: OnceLock::new() })
    }

    /// End of the allocation: the first address after it.
    pub fn end(&self) -> u64 {
        self.base + self.bytes
    }

    /// Returns the shadow for races, which the first call creates. Returns none if the host is out of memory.
    pub fn race_shadow(&self) -> Option<&RaceShadow> {
        if self.races.get().is_none() {
            let (writes, reads) = (zeroed(self.bytes * 4)?, zeroed(self.bytes * 4)?);
            let shadow = RaceShadow { writes: writes.cast(), reads: reads.cast(), bytes: self.bytes * 4 };
            // If another thread has created a shadow meanwhile, this thread's shadow is dropped.
            drop(self.races.set(shadow));
        }
        self.races.get()
    }

    fn clear_races(&self) {
        if let Some(shadow) = self.races.get() {
            // SAFETY: both blocks have `shadow.bytes` bytes.
            unsafe {
                shadow.writes.cast::<u8>().write_bytes(0, shadow.bytes as usize);
                shadow.reads.cast::<u8>().write_bytes(0, shadow.bytes as usize);
            }
        }
    }

    fn mark_written(&self, offset: u64, bytes: u64) {
        if !self.written.is_null() {
            // SAFETY: the caller checked the range, and the shadow is as long as the allocation.
            unsafe { self.written.add(offset as usize).write_bytes(1, bytes as usize) };
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        give_back(self.host, self.bytes);
        give_back(self.written, self.bytes);
    }
}

impl Drop for RaceShadow {
    fn drop(&mut self) {
        give_back(self.writes.cast(), self.bytes);
        give_back(self.reads.cast(), self.bytes);
    }
}

#[derive(Default)]
struct Table {
    /// Sorted by address, because each new allocation has a higher address than all earlier ones.
    live: Arc<Vec<Arc<Allocation>>>,
    freed: VecDeque<(u64, u64)>,
    next: u64,
    used: u64,
}

/// A list of all allocations at one moment. It keeps the allocations' host memory alive.
pub(crate) type Snapshot = Arc<Vec<Arc<Allocation>>>;

/// Returns the index of the allocation that holds `address`.
pub(crate) fn find(live: &[Arc<Allocation>], address: u64) -> Option<usize> {
    let index = live.partition_point(|a| a.base <= address).checked_sub(1)?;
    (address < live[index].end()).then_some(index)
}

/// Memory of one emulated GPU, shared between threads.
pub struct DeviceMemory {
    table: RwLock<Table>,
    capacity: u64,
    watched: bool,
    launches: AtomicU32,
}

impl DeviceMemory {
    /// Creates a memory of `capacity` bytes. New allocations contain zeros.
    pub fn new(capacity: u64) -> Self {
        Self::with(capacity, false)
    }

    /// Creates a memory of `capacity` bytes that records which bytes were written. New allocations contain NaN.
    pub fn watched(capacity: u64) -> Self {
        Self::with(capacity, true)
    }

    fn with(capacity: u64, watched: bool) -> Self {
        let table = Table { next: FIRST_ADDRESS + ALIGNMENT, ..Table::default() };
        DeviceMemory { table: RwLock::new(table), capacity, watched, launches: AtomicU32::new(0) }
    }

    /// Capacity in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes that are allocated.
    pub fn used(&self) -> u64 {
        self.table.read().unwrap_or_else(PoisonError::into_inner).used
    }

    /// Allocates `bytes` bytes and returns the address, which is a multiple of 256 but not of 512.
    ///
    /// # Errors
    ///
    /// If the device's memory or the host's memory is too small.
    pub fn allocate(&self, bytes: u64) -> Result<u64, OutOfMemory> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let error = OutOfMemory { bytes, free: self.capacity - table.used };
        if bytes > error.free {
            return Err(error);
        }
        let base = table.next;
        let allocation = Allocation::new(base, bytes, self.watched).ok_or(error)?;
        Arc::make_mut(&mut table.live).push(Arc::new(allocation));
        table.next = (base + bytes + GAP).next_multiple_of(2 * ALIGNMENT) + ALIGNMENT;
        table.used += bytes;
        Ok(base)
    }

    /// Frees the allocation that begins at `address`.
    ///
    /// # Errors
    ///
    /// If no allocation begins at `address`.
    pub fn free(&self, address: u64) -> Result<(), BadAddress> {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        let Some(index) = find(&table.live, address).filter(|&i| table.live[i].base == address) else {
            return Err(bad_address(&table, address, 0, "no allocation begins there"));
        };
        let allocation = Arc::make_mut(&mut table.live).remove(index);
        table.used -= allocation.bytes;
        table.freed.push_back((allocation.base, allocation.bytes));
        if table.freed.len() > FREED_RANGES {
            table.freed.pop_front();
        }
        Ok(())
    }

    /// Returns the address and the size in bytes of the allocation that holds `address`.
    pub fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        let live = self.snapshot();
        find(&live, address).map(|i| (live[i].base, live[i].bytes))
    }

    /// Copies `source` to the device.
    ///
    /// # Errors
    ///
    /// If the bytes do not lie in one allocation.
    pub fn copy_in(&self, address: u64, source: &[u8]) -> Result<(), BadAddress> {
        let (allocation, offset) = self.range(address, source.len() as u64)?;
        // SAFETY: the range was checked, and the host's slice is not device memory.
        unsafe {
            allocation.host.add(offset as usize).copy_from_nonoverlapping(source.as_ptr(), source.len())
        };
        allocation.mark_written(offset, source.len() as u64);
        Ok(())
    }

    /// Copies from the device to `target`.
    ///
    /// # Errors
    ///
    /// If the bytes do not lie in one allocation.
    pub fn copy_out(&self, address: u64, target: &mut [u8]) -> Result<(), BadAddress> {
        let (allocation, offset) = self.range(address, target.len() as u64)?;
        // SAFETY: the range was checked, and the host's slice is not device memory.
        unsafe {
            allocation.host.add(offset as usize).copy_to_nonoverlapping(target.as_mut_ptr(), target.len())
        };
        Ok(())
    }

    /// Copies `bytes` bytes from `source` to `target`, both on the device. Copies of bytes that were never written
    /// count as never written, too.
    ///
    /// # Errors
    ///
    /// If one of the ranges does not lie in one allocation.
    pub fn copy_within(&self, target: u64, source: u64, bytes: u64) -> Result<(), BadAddress> {
        let (from, at) = self.range(source, bytes)?;
        let (to, into) = self.range(target, bytes)?;
        // SAFETY: both ranges were checked. `copy_to` allows overlaps.
        unsafe {
            from.host.add(at as usize).copy_to(to.host.add(into as usize), bytes as usize);
            if !to.written.is_null() {
                from.written.add(at as usize).copy_to(to.written.add(into as usize), bytes as usize);
            }
        }
        Ok(())
    }

    /// Fills `bytes` bytes with repetitions of `pattern`. The last repetition may be incomplete.
    ///
    /// # Errors
    ///
    /// If the bytes do not lie in one allocation.
    pub fn fill(&self, address: u64, bytes: u64, pattern: &[u8]) -> Result<(), BadAddress> {
        let (allocation, offset) = self.range(address, bytes)?;
        if pattern.is_empty() {
            return Ok(());
        }
        // The pattern is repeated to a block of about `FILL_BYTES`, because short copies are slow.
        let block = pattern.repeat((FILL_BYTES / pattern.len()).max(1));
        for at in (0..bytes).step_by(block.len()) {
            let n = block.len().min((bytes - at) as usize);
            // SAFETY: the range was checked, and `at + n` is at most `bytes`.
            unsafe {
                allocation.host.add((offset + at) as usize).copy_from_nonoverlapping(block.as_ptr(), n)
            };
        }
        allocation.mark_written(offset, bytes);
        Ok(())
    }

    /// Returns the first address in the range that was never written. Returns none in memory that is not watched.
    ///
    /// # Errors
    ///
    /// If the bytes do not lie in one allocation.
    pub fn first_unwritten(&self, address: u64, bytes: u64) -> Result<Option<u64>, BadAddress> {
        let (allocation, offset) = self.range(address, bytes)?;
        if allocation.written.is_null() {
            return Ok(None);
        }
        // SAFETY: the range was checked, and the shadow is as long as the allocation.
        let shadow =
            unsafe { std::slice::from_raw_parts(allocation.written.add(offset as usize), bytes as usize) };
        Ok(shadow.iter().position(|&w| w == 0).map(|i| address + i as u64))
    }

    /// Returns the host address of a range, for libraries that compute on device memory. The address is valid until the
    /// allocation is freed. A caller that writes to the range calls [`DeviceMemory::mark_written`].
    ///
    /// # Errors
    ///
    /// If the bytes do not lie in one allocation.
    pub fn host_pointer(&self, address: u64, bytes: u64) -> Result<*mut u8, BadAddress> {
        let (allocation, offset) = self.range(address, bytes)?;
        // SAFETY: the range was checked to lie in the allocation, so `offset` is inside the host block.
        Ok(unsafe { allocation.host.add(offset as usize) })
    }

    /// Marks a range as written.
    ///
    /// # Errors
    ///
    /// If the bytes do not lie in one allocation.
    pub fn mark_written(&self, address: u64, bytes: u64) -> Result<(), BadAddress> {
        let (allocation, offset) = self.range(address, bytes)?;
        allocation.mark_written(offset, bytes);
        Ok(())
    }

    fn range(&self, address: u64, bytes: u64) -> Result<(Arc<Allocation>, u64), BadAddress> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let Some(index) = find(&table.live, address) else {
            return Err(bad_address(&table, address, bytes, "it lies in no allocation"));
        };
        let allocation = &table.live[index];
        let offset = address - allocation.base;
        if bytes > allocation.bytes - offset {
            let what =
                format!("they run past an allocation of {} bytes, from byte {offset}", allocation.bytes);
            return Err(bad_address(&table, address, bytes, &what));
        }
        Ok((allocation.clone(), offset))
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        self.table.read().unwrap_or_else(PoisonError::into_inner).live.clone()
    }

    /// True if the memory records which bytes were written.
    pub(crate) fn is_watched(&self) -> bool {
        self.watched
    }

    /// Returns the number of a new launch, from 1 to `last`. The number after `last` is 1, and the shadows for races
    /// are then cleared.
    pub(crate) fn next_launch(&self, last: u32) -> u32 {
        let number = self.launches.fetch_add(1, Ordering::Relaxed) % last + 1;
        if number == 1 {
            for allocation in self.snapshot().iter() {
                allocation.clear_races();
            }
        }
        number
    }

    /// True if `address` was in an allocation that has been freed.
    pub(crate) fn was_freed(&self, address: u64) -> bool {
        freed(&self.table.read().unwrap_or_else(PoisonError::into_inner), address)
    }
}

fn freed(table: &Table, address: u64) -> bool {
    table.freed.iter().any(|&(base, bytes)| (base..base + bytes).contains(&address))
}

fn bad_address(table: &Table, address: u64, bytes: u64, what: &str) -> BadAddress {
    let freed = freed(table, address);
    let what = if freed { "the allocation was freed" } else { what };
    BadAddress { address, bytes, freed, what: what.to_owned() }
}
