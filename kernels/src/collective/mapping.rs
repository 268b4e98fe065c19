//! Memory that the ranks of a group share: flags that say how far each is, and slots for what it brings.
//!
//! All unsafe access to shared memory is here. What makes it sound is the order in which [`super::SharedMemory`] uses
//! it: a slot's part is written by one rank while no other looks at it, and read by others only after its writer has
//! said so through its flag (release and acquire).

use std::{
    fs::File,
    io,
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64},
};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Slots of each rank, used in turn: while others still read one, the rank fills the other.
pub(super) const SLOTS: usize = 2;
/// Bytes of a slot. Two of each rank stay in a core's own cache while large data streams through them.
pub(super) const SLOT_BYTES: usize = 256 << 10;

/// How far a rank is. On cache lines of its own, since it is polled by all the others.
#[repr(C, align(128))]
pub(super) struct Flags {
    /// The number of the rank's last publication, and whether it has left: what others wait for.
    pub published: AtomicU32,
    /// How many sleep until `published` changes.
    pub sleepers: AtomicU32,
    /// Of what the rank brought into each slot: operation and length.
    pub brought: [AtomicU64; SLOTS],
}

/// A mapped file of one group: flags of all ranks, then slots of all ranks.
pub(super) struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    ranks: usize,
}

// SAFETY: the mapping belongs to this value; what it holds is only reached as the module's page says.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Bytes for a group of so many ranks.
    fn bytes(ranks: usize) -> usize {
        ranks * (size_of::<Flags>() + SLOTS * SLOT_BYTES)
    }

    /// Maps a file, which is made as long as needed; all ranks make it equally long.
    pub fn new(file: &File, ranks: usize) -> io::Result<Self> {
        let bytes = Self::bytes(ranks);
        file.set_len(bytes as u64)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe {
            mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)
        }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, bytes, ranks })
    }

    /// A rank's flags.
    pub fn flags(&self, rank: usize) -> &Flags {
        assert!(rank < self.ranks, "rank {rank} of {}", self.ranks);
        // SAFETY: inside the mapping, which is page aligned and was zeroed, a valid state of atomics; nobody has other
        // than shared access to it.
        unsafe { self.start.cast::<Flags>().add(rank).as_ref() }
    }

    fn slot(&self, rank: usize, slot: usize, first: usize, bytes: usize) -> NonNull<u8> {
        assert!(rank < self.ranks && slot < SLOTS, "slot {slot} of rank {rank}");
        assert!(first <= SLOT_BYTES && bytes <= SLOT_BYTES - first, "{bytes} bytes from {first} on");
        let before = self.ranks * size_of::<Flags>() + (rank * SLOTS + slot) * SLOT_BYTES + first;
        // SAFETY: inside the mapping by the assertions above.
        unsafe { self.start.add(before) }
    }

    /// Copies into a rank's slot, from byte `first` on.
    ///
    /// # Safety
    ///
    /// The rank is this one's own, and no other reads or writes that part now.
    pub unsafe fn write(&self, rank: usize, slot: usize, first: usize, data: &[u8]) {
        let to = self.slot(rank, slot, first, data.len());
        // SAFETY: in range, nobody else is there, and the mapping is not part of `data`, which is the caller's.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to.as_ptr(), data.len()) };
    }

    /// Part of a rank's slot.
    ///
    /// # Safety
    ///
    /// The rank has published it, and does not write there while the slice lives.
    pub unsafe fn read(&self, rank: usize, slot: usize, first: usize, bytes: usize) -> &[u8] {
        let from = self.slot(rank, slot, first, bytes);
        // SAFETY: in range, written before, and left alone meanwhile.
        unsafe { std::slice::from_raw_parts(from.as_ptr(), bytes) }
    }

    /// The same as floats: `first` and `len` count elements.
    ///
    /// # Safety
    ///
    /// As for [`Mapping::read`].
    pub unsafe fn read_floats(&self, rank: usize, slot: usize, first: usize, len: usize) -> &[f32] {
        let from = self.slot(rank, slot, 4 * first, 4 * len);
        // SAFETY: in range, written before, and left alone meanwhile; aligned, since flags and slots are multiples of
        // 128 bytes; any bits are a float.
        unsafe { std::slice::from_raw_parts(from.as_ptr().cast(), len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; nothing borrows from it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Floats as the bytes that they are.
pub(super) fn bytes_of(floats: &[f32]) -> &[u8] {
    // SAFETY: a float is four bytes without padding, and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(floats.as_ptr().cast(), size_of_val(floats)) }
}
