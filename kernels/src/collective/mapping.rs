//! Memory that the ranks of a group share. Each rank has flags, which publish its progress, and slots for its data.
//!
//! All unsafe access to shared memory is in this module. The access is sound because of the order in which
//! [`super::SharedMemory`] uses the slots. A rank writes a range of a slot only while no other rank accesses the range.
//! Other ranks read the range only after the writer has published it through the writer's flags (release and acquire).

use std::{
    fs::File,
    io,
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64},
};

use rustix::{
    fs::{FallocateFlags, fallocate},
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

/// Number of slots per rank. The slots alternate: while other ranks still read one slot, its owner fills the other.
pub(super) const SLOTS: usize = 2;
/// Bytes per slot. The two slots of each rank stay in a core's own cache while large data streams through them.
pub(super) const SLOT_BYTES: usize = 256 << 10;

/// Progress of a rank, in its own cache lines because all other ranks poll it.
#[repr(C, align(128))]
pub(super) struct Flags {
    /// Number of the rank's last publication, and a bit that is set once the rank has left the group. Other ranks wait
    /// until this value changes.
    pub published: AtomicU32,
    /// Number of ranks that sleep until `published` changes.
    pub sleepers: AtomicU32,
    /// Operation and length of the data in each slot, which other ranks compare with their own call.
    pub brought: [AtomicU64; SLOTS],
}

/// The mapped file of a group: the flags of all ranks, then the slots of all ranks.
pub(super) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    ranks: usize,
}

// SAFETY: this value owns the mapping. The contents of the mapping are accessed only in the order that the module's
// documentation states.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Size in bytes for a group of `ranks` ranks.
    fn bytes(ranks: usize) -> usize {
        ranks * (size_of::<Flags>() + SLOTS * SLOT_BYTES)
    }

    /// Extends `file` to the size of the group's memory and maps it. The size is the same at all ranks. `rank` is the
    /// caller's rank.
    ///
    /// This function allocates the memory that this rank writes. A later write to a page that the file system cannot
    /// allocate would end the process with SIGBUS. Each rank allocates its own slots, which lie on the memory node
    /// where it runs.
    pub fn new(file: &File, rank: usize, ranks: usize) -> io::Result<Self> {
        let bytes = Self::bytes(ranks);
        file.set_len(bytes as u64)?;
        let (flags, slots) = (ranks * size_of::<Flags>(), SLOTS * SLOT_BYTES);
        for (first, bytes) in [(0, flags), (flags + rank * slots, slots)] {
            fallocate(file, FallocateFlags::empty(), first as u64, bytes as u64)?;
        }
        // SAFETY: a new mapping at an address of the operating system's choice affects no other memory.
        let start = unsafe {
            mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, bytes, ranks })
    }

    /// A rank's flags.
    pub fn flags(&self, rank: usize) -> &Flags {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        // SAFETY: the flags lie inside the mapping, which is page-aligned. They are atomics, for which the zeros of a
        // new file are valid, and they are accessed only through shared references.
        unsafe { self.start.cast::<Flags>().add(rank).as_ref() }
    }

    fn slot(&self, rank: usize, slot: usize, first: usize, bytes: usize) -> NonNull<u8> {
        assert!(rank < self.ranks && slot < SLOTS, "slot {slot} of rank {rank}");
        assert!(first <= SLOT_BYTES && bytes <= SLOT_BYTES - first, "{bytes} bytes from {first} on");
        let before = self.ranks * size_of::<Flags>() + (rank * SLOTS + slot) * SLOT_BYTES + first;
        // SAFETY: the address lies inside the mapping, by the assertions above.
        unsafe { self.start.add(before) }
    }

    /// Copies into a rank's slot, from byte `first` on.
    ///
    /// # Safety
    ///
    /// The rank is the caller's own, and no other rank accesses the range during the call.
    pub unsafe fn write(&self, rank: usize, slot: usize, first: usize, data: &[u8]) {
        let to = self.slot(rank, slot, first, data.len());
        // SAFETY: the range is in bounds. By the contract, no other rank accesses the range during the call. `data`
        // does not overlap the mapping.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to.as_ptr(), data.len()) };
    }

    /// A range of a rank's slot.
    ///
    /// # Safety
    ///
    /// The rank has published the range, and does not write to it while the slice exists.
    pub unsafe fn read(&self, rank: usize, slot: usize, first: usize, bytes: usize) -> &[u8] {
        let from = self.slot(rank, slot, first, bytes);
        // SAFETY: the range is in bounds. By the contract, the range was written before, and nobody writes to it while
        // the slice exists.
        unsafe { std::slice::from_raw_parts(from.as_ptr(), bytes) }
    }

    /// A range of a rank's slot as floats. `first` and `len` count elements.
    ///
    /// # Safety
    ///
    /// The rank has published the range, and does not write to it while the slice exists.
    pub unsafe fn read_floats(&self, rank: usize, slot: usize, first: usize, len: usize) -> &[f32] {
        let from = self.slot(rank, slot, 4 * first, 4 * len);
        // SAFETY: the range is in bounds, and by the contract nobody writes to it while the slice exists. The address
        // is aligned, because the sizes of flags and slots are multiples of 128 bytes. Any bits are a valid float.
        unsafe { std::slice::from_raw_parts(from.as_ptr().cast(), len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this is the mapping made in `new`, and no borrows of it are left.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// The bytes of a slice of floats.
pub(super) fn bytes_of(floats: &[f32]) -> &[u8] {
    // SAFETY: a float is four bytes without padding, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(floats.as_ptr().cast(), size_of_val(floats)) }
}
