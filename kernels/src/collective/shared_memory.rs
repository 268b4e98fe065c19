//! Collectives of the ranks of one machine, in a file that all ranks map.
//!
//! Data is transferred in tiles of at most one slot. A rank numbers its publications, and its flags hold the last
//! number. For each tile, a rank first waits until all other ranks have published the previous tile. A rank reads a
//! tile to its end before it publishes the next one, so no rank still reads the slot that the waiting rank fills next.
//! The waiting rank then copies its data into the slot, publishes the next number, and waits until the ranks whose data
//! it needs have published that number. Every rank computes a small sum as a whole. In a large sum, each rank computes
//! one share in place, publishes its share with another number, and collects the other ranks' shares.
//!
//! A waiting rank spins briefly, then yields its core between polls, then sleeps on the awaited rank's number (a
//! futex). Without the yields, a rank on a busy machine could spin on the core that the awaited rank needs.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    thread::{Timespec, futex},
};

use super::{
    Collective, CollectiveError, GroupRank, Operation, Patience, check_parts,
    mapping::{Mapping, SLOT_BYTES, SLOTS, bytes_of},
};

/// Number of floats per slot.
const TILE: usize = SLOT_BYTES / 4;
/// Maximum number of floats of a small sum. Every rank computes a small sum as a whole, because that is faster than
/// publishing twice.
const SUMMED_BY_ALL: usize = 8 << 10;
/// Number of floats that a rank sums at a time in its share of a large sum.
const BLOCK: usize = 1 << 10;
/// Duration of spinning before a waiting rank yields its core.
const SPIN: Duration = Duration::from_micros(2);
/// Duration of polling (spins and yields) before a waiting rank sleeps.
const LOOK: Duration = Duration::from_micros(50);
/// Bit of a rank's published number that is set once the rank has left the group. Numbers use the other 31 bits and
/// wrap around.
const LEFT: u32 = 1 << 31;

/// One rank of a group on this machine.
pub struct SharedMemory {
    map: Mapping,
    group_rank: GroupRank,
    deadline: Duration,
    /// The last number that this rank has published.
    number: u32,
    /// Number of tiles so far. Tiles alternate between the slots.
    tiles: usize,
}

impl SharedMemory {
    /// Forms the group with the other ranks through the file at `path`, and waits for them up to `patience`. `deadline`
    /// applies to every later collective. The path must be new for each group. The file is removed when all ranks have
    /// joined.
    pub fn meet(
        path: &Path,
        group_rank: GroupRank,
        patience: Duration,
        deadline: Duration,
    ) -> Result<Self, CollectiveError> {
        let failed = |what: &str, e: io::Error| {
            CollectiveError::Transport(format!("cannot {what} {}: {e}", path.display()))
        };
        let file = open(path).map_err(|e| failed("open", e))?;
        let map =
            Mapping::new(&file, group_rank.rank, group_rank.world_size).map_err(|e| failed("map", e))?;
        let mut group = Self { map, group_rank, deadline: patience, number: 0, tiles: 0 };
        group.bring(Operation::Forming, group_rank.world_size, |_, _| {})?;
        group.await_all(Operation::Forming, Some(group_rank.world_size))?;
        if group_rank.is_leader() {
            fs::remove_file(path).map_err(|e| failed("remove", e))?;
        }
        group.tiles += 1;
        group.deadline = deadline;
        Ok(group)
    }

    fn slot(&self) -> usize {
        self.tiles % SLOTS
    }

    /// Waits until no rank reads this rank's next slot, fills the slot, and publishes it. The other ranks compare
    /// `operation` and `length` with those of their own call.
    fn bring(
        &mut self,
        operation: Operation,
        length: usize,
        fill: impl FnOnce(&Mapping, usize),
    ) -> Result<(), CollectiveError> {
        let since = Instant::now();
        for rank in 0..self.group_rank.world_size {
            self.await_number(rank, self.number, since, operation, Patience::Deadline)?;
        }
        let slot = self.slot();
        fill(&self.map, slot);
        let brought = (operation as u64) << 56 | length as u64;
        self.map.flags(self.group_rank.rank).brought[slot].store(brought, Ordering::Relaxed);
        self.publish();
        Ok(())
    }

    fn publish(&mut self) {
        self.number = self.number.wrapping_add(1) & !LEFT;
        self.say(self.number);
    }

    fn say(&self, number: u32) {
        let flags = self.map.flags(self.group_rank.rank);
        // A sleeper increments `sleepers` before it checks the number. So either the sleeper sees this number, or this
        // rank sees that `sleepers` is above 0.
        flags.published.store(number, Ordering::SeqCst);
        if flags.sleepers.load(Ordering::SeqCst) > 0 {
            // Ignored: if the wake fails, the sleepers wake at their deadline.
            let _ = futex::wake(&flags.published, futex::Flags::empty(), i32::MAX as u32);
        }
    }

    /// Waits until `rank` has published the current tile, and checks that `rank` made the same call as this rank.
    /// Returns the length that `rank` published.
    fn await_rank(
        &self,
        rank: usize,
        operation: Operation,
        length: Option<usize>,
        since: Instant,
        patience: Patience,
    ) -> Result<usize, CollectiveError> {
        self.await_number(rank, self.number, since, operation, patience)?;
        let brought = self.map.flags(rank).brought[self.slot()].load(Ordering::Relaxed);
        let (code, theirs) = ((brought >> 56) as u8, (brought & ((1 << 56) - 1)) as usize);
        if code != operation as u8 || length.is_some_and(|length| length != theirs) {
            let name = |code| Operation::from_code(code).map_or("no call".to_owned(), |o| o.to_string());
            return Err(CollectiveError::Mismatch {
                rank,
                theirs: format!("{} of {theirs}", name(code)),
                ours: format!("{operation} of {}", length.unwrap_or(theirs)),
            });
        }
        Ok(theirs)
    }

    fn await_all(&self, operation: Operation, length: Option<usize>) -> Result<(), CollectiveError> {
        let since = Instant::now();
        for rank in 0..self.group_rank.world_size {
            self.await_rank(rank, operation, length, since, Patience::Deadline)?;
        }
        Ok(())
    }

    fn await_number(
        &self,
        rank: usize,
        number: u32,
        since: Instant,
        operation: Operation,
        patience: Patience,
    ) -> Result<(), CollectiveError> {
        let flags = self.map.flags(rank);
        let mut turns = 0u32;
        loop {
            let seen = flags.published.load(Ordering::Acquire);
            if reached(seen, number) {
                return Ok(());
            }
            if seen & LEFT != 0 {
                return Err(CollectiveError::Left { rank, size: self.group_rank.world_size });
            }
            turns += 1;
            if turns < 64 {
                std::hint::spin_loop();
                continue;
            }
            turns = 0;
            let waited = since.elapsed();
            if waited < LOOK {
                if waited >= SPIN {
                    thread::yield_now();
                }
                continue;
            }
            let left = match patience {
                Patience::Forever => None,
                Patience::Deadline if waited < self.deadline => Some(self.deadline - waited),
                Patience::Deadline => {
                    let (size, deadline) = (self.group_rank.world_size, self.deadline);
                    return Err(CollectiveError::Missing { rank, size, operation, deadline });
                }
            };
            self.sleep(rank, seen, left)?;
        }
    }

    /// Sleeps until the rank's number differs from `seen` or `limit` has passed. May return earlier.
    fn sleep(&self, rank: usize, seen: u32, limit: Option<Duration>) -> Result<(), CollectiveError> {
        let flags = self.map.flags(rank);
        let limit = limit.map(|limit| Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: i64::from(limit.subsec_nanos()) as _,
        });
        flags.sleepers.fetch_add(1, Ordering::SeqCst);
        let slept = futex::wait(&flags.published, futex::Flags::empty(), seen, limit.as_ref());
        flags.sleepers.fetch_sub(1, Ordering::SeqCst);
        match slept {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
            Err(error) => Err(CollectiveError::Transport(format!("cannot wait on shared memory: {error}"))),
        }
    }

    /// Sums one tile of a small sum: every rank computes the whole tile.
    fn sum_small(&mut self, tile: &mut [f32]) -> Result<(), CollectiveError> {
        let (rank, slot, len) = (self.group_rank.rank, self.slot(), tile.len());
        // SAFETY: the slot is this rank's own, and `bring` runs the closure when no other rank reads the slot.
        self.bring(Operation::AllReduce, len, |map, slot| unsafe {
            map.write(rank, slot, 0, bytes_of(tile))
        })?;
        let since = Instant::now();
        for rank in 0..self.group_rank.world_size {
            self.await_rank(rank, Operation::AllReduce, Some(len), since, Patience::Deadline)?;
            // SAFETY: `await_rank` has returned, so `rank` has published its slot. `rank` does not write to the slot
            // again before our own rank publishes its next number.
            let theirs = unsafe { self.map.read_floats(rank, slot, 0, len) };
            add(rank, theirs, tile);
        }
        self.tiles += 1;
        Ok(())
    }

    /// Sums one tile of a large sum: each rank computes one share of the tile. A rank first publishes its data for the
    /// other ranks' shares, and later the result of its own share.
    fn sum_large(&mut self, tile: &mut [f32]) -> Result<(), CollectiveError> {
        let (group_rank, slot, len) = (self.group_rank, self.slot(), tile.len());
        let share =
            |rank: usize| rank * len / group_rank.world_size..(rank + 1) * len / group_rank.world_size;
        let own = share(group_rank.rank);
        self.bring(Operation::AllReduce, len, |map, slot| {
            for others in [0..own.start, own.end..len] {
                // SAFETY: the slot is this rank's own, and `bring` runs the closure when no other rank reads the slot.
                unsafe { map.write(group_rank.rank, slot, 4 * others.start, bytes_of(&tile[others])) };
            }
        })?;
        let since = Instant::now();
        for rank in 0..group_rank.world_size {
            self.await_rank(rank, Operation::AllReduce, Some(len), since, Patience::Deadline)?;
        }
        let mut sums = [0.0; BLOCK];
        for first in own.clone().step_by(BLOCK) {
            let block = first..own.end.min(first + BLOCK);
            let sums = &mut sums[..block.len()];
            for rank in 0..group_rank.world_size {
                if rank == group_rank.rank {
                    add(rank, &tile[block.clone()], sums);
                } else {
                    // SAFETY: `await_rank` has returned, so `rank` has published this range of its slot. `rank` does
                    // not write to the range again before our own rank publishes its next number.
                    add(rank, unsafe { self.map.read_floats(rank, slot, first, block.len()) }, sums);
                }
            }
            tile[block].copy_from_slice(sums);
        }
        // SAFETY: the slot is this rank's own. Other ranks read this share of the slot only after this rank has
        // published its next number.
        unsafe { self.map.write(group_rank.rank, slot, 4 * own.start, bytes_of(&tile[own])) };
        self.publish();
        for rank in (0..group_rank.world_size).filter(|&rank| rank != group_rank.rank) {
            self.await_rank(rank, Operation::AllReduce, Some(len), since, Patience::Deadline)?;
            let share = share(rank);
            // SAFETY: `await_rank` has returned, so `rank` has published its share with its second number. `rank` does
            // not write to the share again before our own rank publishes its next number.
            let theirs = unsafe { self.map.read_floats(rank, slot, share.start, share.len()) };
            tile[share].copy_from_slice(theirs);
        }
        self.tiles += 1;
        Ok(())
    }

    /// Publishes `part` tile by tile. Calls `take(rank, offset, tile)` for every rank's tiles, with the tile's offset
    /// in that rank's part.
    fn exchange(
        &mut self,
        operation: Operation,
        part: &[u8],
        mut take: Option<impl FnMut(usize, usize, &[u8])>,
    ) -> Result<(), CollectiveError> {
        let rank = self.group_rank.rank;
        // An empty part counts as one empty tile, so that the ranks synchronise.
        for first in (0..part.len().max(1)).step_by(SLOT_BYTES) {
            let tile = &part[first..part.len().min(first + SLOT_BYTES)];
            // SAFETY: the slot is this rank's own, and `bring` runs the closure when no other rank reads the slot.
            self.bring(operation, part.len(), |map, slot| unsafe { map.write(rank, slot, 0, tile) })?;
            if let Some(take) = &mut take {
                let since = Instant::now();
                for rank in 0..self.group_rank.world_size {
                    self.await_rank(rank, operation, Some(part.len()), since, Patience::Deadline)?;
                    // SAFETY: `await_rank` has returned, so `rank` has published its slot. `rank` does not write to the
                    // slot again before our own rank publishes its next number.
                    take(rank, first, unsafe { self.map.read(rank, self.slot(), 0, tile.len()) });
                }
            }
            self.tiles += 1;
        }
        Ok(())
    }
}

impl Collective for SharedMemory {
    fn group_rank(&self) -> GroupRank {
        self.group_rank
    }

    fn transport(&self) -> &'static str {
        "shared memory"
    }

    fn all_reduce(&mut self, data: &mut [f32]) -> Result<(), CollectiveError> {
        for tile in data.chunks_mut(TILE) {
            if tile.len() <= SUMMED_BY_ALL {
                self.sum_small(tile)?;
            } else {
                self.sum_large(tile)?;
            }
        }
        Ok(())
    }

    fn gather(&mut self, part: &[f32], out: Option<&mut [f32]>) -> Result<(), CollectiveError> {
        check_parts(self.group_rank, "gather into", part.len(), out.as_deref().map(<[f32]>::len))?;
        let len = part.len();
        let take = out.map(|out| {
            move |rank: usize, first: usize, tile: &[u8]| {
                let out = &mut out[rank * len + first / 4..][..tile.len() / 4];
                for (to, from) in out.iter_mut().zip(tile.as_chunks::<4>().0) {
                    *to = f32::from_ne_bytes(*from);
                }
            }
        });
        self.exchange(Operation::Gather, bytes_of(part), take)
    }

    fn gather_bytes(&mut self, part: &[u8], out: Option<&mut [u8]>) -> Result<(), CollectiveError> {
        check_parts(self.group_rank, "gather into", part.len(), out.as_deref().map(<[u8]>::len))?;
        let take = out.map(|out| {
            |rank: usize, first: usize, tile: &[u8]| {
                out[rank * part.len() + first..][..tile.len()].copy_from_slice(tile);
            }
        });
        self.exchange(Operation::Gather, part, take)
    }

    fn scatter_bytes(&mut self, parts: Option<&[u8]>, part: &mut [u8]) -> Result<(), CollectiveError> {
        check_parts(self.group_rank, "scatter", part.len(), parts.map(<[u8]>::len))?;
        if let Some(parts) = parts {
            part.copy_from_slice(&parts[..part.len()]);
            return self.exchange(Operation::Scatter, parts, None::<fn(usize, usize, &[u8])>);
        }
        let GroupRank { rank, world_size } = self.group_rank;
        let (own, total) = (rank * part.len()..(rank + 1) * part.len(), part.len() * world_size);
        // An empty message counts as one empty tile, so that the ranks synchronise.
        for first in (0..total.max(1)).step_by(SLOT_BYTES) {
            self.bring(Operation::Scatter, total, |_, _| {})?;
            self.await_rank(0, Operation::Scatter, Some(total), Instant::now(), Patience::Deadline)?;
            let here = own.start.max(first)..own.end.min(first + SLOT_BYTES);
            if here.start < here.end {
                // SAFETY: `await_rank` has returned, so rank 0 has published its slot. Rank 0 does not write to the
                // slot again before our own rank publishes its next number.
                let tile = unsafe { self.map.read(0, self.slot(), here.start - first, here.len()) };
                part[here.start - own.start..here.end - own.start].copy_from_slice(tile);
            }
            self.tiles += 1;
        }
        Ok(())
    }

    fn all_gather(&mut self, part: &[u8], out: &mut Vec<u8>) -> Result<(), CollectiveError> {
        out.clear();
        out.resize(part.len() * self.group_rank.world_size, 0);
        let take = |rank: usize, first: usize, tile: &[u8]| {
            out[rank * part.len() + first..][..tile.len()].copy_from_slice(tile);
        };
        self.exchange(Operation::AllGather, part, Some(take))
    }

    fn broadcast(&mut self, message: &mut Vec<u8>, patience: Patience) -> Result<(), CollectiveError> {
        if self.group_rank.is_leader() {
            return self.exchange(Operation::Broadcast, message, None::<fn(usize, usize, &[u8])>);
        }
        message.clear();
        let mut patience = patience;
        loop {
            self.bring(Operation::Broadcast, 0, |_, _| {})?;
            let total = self.await_rank(0, Operation::Broadcast, None, Instant::now(), patience)?;
            let tile = (total - message.len()).min(SLOT_BYTES);
            // SAFETY: `await_rank` has returned, so rank 0 has published its slot. Rank 0 does not write to the slot
            // again before our own rank publishes its next number.
            message.extend_from_slice(unsafe { self.map.read(0, self.slot(), 0, tile) });
            self.tiles += 1;
            if message.len() == total {
                return Ok(());
            }
            patience = Patience::Deadline;
        }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        self.say(self.number | LEFT);
    }
}

/// True if a rank whose last number is `seen` has reached `number`.
fn reached(seen: u32, number: u32) -> bool {
    // Numbers have 31 bits and wrap around. Shifted left by one, the difference is negative if `seen` is before
    // `number`.
    (seen.wrapping_sub(number) << 1) as i32 >= 0
}

/// Adds a rank's floats to `sum`. Rank 0 comes first: its floats replace the contents of `sum`.
fn add(rank: usize, theirs: &[f32], sum: &mut [f32]) {
    if rank == 0 {
        sum.copy_from_slice(theirs);
    } else {
        sum.iter_mut().zip(theirs).for_each(|(sum, theirs)| *sum += theirs);
    }
}

/// Opens the group's file, which the first rank creates. Only the current user can access it.
fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}
