//! Shadow of shared memory. For each byte, it records whether the byte was written, which warp and lane accessed the
//! byte last, and in which epoch.

use crate::fault::FaultKind;

use super::Warp;
use super::address::Access;
use super::rows::{Row, each_lane};

const UNWRITTEN: u8 = 0;
const WRITTEN: u8 = 1;
/// State of a target byte of a `cp.async` for which the lane has not waited yet.
const PENDING: u8 = 2;
/// Number that marks atomic operations of any warps, in place of a warp's number.
const ATOMIC: u32 = 0xfe;
/// Number that marks several warps, in place of a warp's number.
const SEVERAL_WARPS: u32 = 0xff;
/// Number that marks several lanes, in place of a lane's number.
const SEVERAL_LANES: u32 = 32;
/// Largest epoch. The epoch after it is 1 again, so that epochs fit into the 24 bits above the warp's number.
const LAST_EPOCH: u32 = 0x00ff_fff0;

/// Shadow of a block's shared memory. Each vector has one element per byte: the state, the epoch and warp of the last
/// write and of the last read, and the lanes of these two accesses. An epoch is the time between two barriers of the
/// block. Accesses of two lanes of a warp are compared only within one phase of the warp, which ends at each
/// `bar.warp.sync`.
#[derive(Default)]
pub(crate) struct SharedShadow {
    state: Vec<u8>,
    writer: Vec<u32>,
    reader: Vec<u32>,
    write_lane: Vec<u32>,
    read_lane: Vec<u32>,
    epoch: u32,
}

/// The problem that an access causes.
enum Problem {
    Unwritten,
    Pending,
    /// The warp with this number wrote in this epoch. The number may also be [`ATOMIC`] or [`SEVERAL_WARPS`].
    AfterWrite(u32),
    AfterRead(u32),
    /// Another lane of this warp wrote in this phase.
    AfterLaneWrite(u32),
    AfterLaneRead(u32),
}

/// Offset of a byte in the accessed range, and the problem there.
type Found = (usize, Problem);

/// Identity of an access: epoch and warp in one tag, and the warp's phase.
#[derive(Clone, Copy)]
struct Identity {
    tag: u32,
    warp: u32,
    phase: u32,
}

/// The lanes that access a range of bytes: either one lane, or consecutive lanes with `1 << shift` bytes each.
#[derive(Clone, Copy)]
struct Lanes {
    first: u32,
    shift: u32,
}

impl Lanes {
    fn one(lane: u32) -> Self {
        Lanes { first: lane, shift: 31 }
    }

    #[inline(always)]
    fn of(self, byte: usize) -> u32 {
        self.first + (byte as u32 >> self.shift)
    }
}

impl SharedShadow {
    pub fn new(bytes: u32) -> Self {
        let n = bytes as usize;
        SharedShadow {
            state: vec![UNWRITTEN; n],
            writer: vec![0; n],
            reader: vec![0; n],
            write_lane: vec![0; n],
            read_lane: vec![0; n],
            epoch: 0,
        }
    }

    /// Records a barrier of the block, which orders all earlier accesses before all later accesses.
    pub fn pass_barrier(&mut self) {
        self.epoch += 1;
        if self.epoch > LAST_EPOCH {
            self.epoch = 1;
            self.writer.fill(0);
            self.reader.fill(0);
        }
    }

    /// Starts a new block: marks all bytes as unwritten.
    pub fn begin_block(&mut self) {
        self.pass_barrier();
        self.state.fill(UNWRITTEN);
    }

    /// True if the tag belongs to another warp and to this epoch.
    #[inline(always)]
    fn foreign(tag: u32, me: Identity) -> bool {
        (tag >> 8 == me.tag >> 8) & (tag != me.tag)
    }

    /// Records a read. The loop has no branches, so it becomes vector code.
    fn read(&mut self, me: Identity, at: usize, bytes: usize, lanes: Lanes) -> Option<Found> {
        let range = at..at + bytes;
        let (writer, write_lane) = (&self.writer[range.clone()], &self.write_lane[range.clone()]);
        let (reader, read_lane) = (&mut self.reader[range.clone()], &mut self.read_lane[range]);
        let mut race = false;
        for i in 0..bytes {
            let own_lane = me.phase | lanes.of(i);
            let by_lane =
                (writer[i] == me.tag) & (write_lane[i] != own_lane) & (write_lane[i] & !63 == me.phase);
            race |= Self::foreign(writer[i], me) | by_lane;
            let other_lane =
                (reader[i] == me.tag) & (read_lane[i] & !63 == me.phase) & (read_lane[i] != own_lane);
            read_lane[i] = if other_lane { me.phase | SEVERAL_LANES } else { own_lane };
            reader[i] = if Self::foreign(reader[i], me) { me.tag | SEVERAL_WARPS } else { me.tag };
        }
        if !race {
            return None;
        }
        (0..bytes).find_map(|i| {
            let own_lane = me.phase | lanes.of(i);
            if Self::foreign(writer[i], me) {
                Some((i, Problem::AfterWrite(writer[i] & 0xff)))
            } else if writer[i] == me.tag && write_lane[i] != own_lane && write_lane[i] & !63 == me.phase {
                Some((i, Problem::AfterLaneWrite(write_lane[i] & 63)))
            } else {
                None
            }
        })
    }

    /// Records a write. An atomic operation does not replace the tag of a plain write by the same warp, because that
    /// write still races with other warps.
    fn write(&mut self, me: Identity, at: usize, bytes: usize, lanes: Lanes, atomic: bool) -> Option<Found> {
        let range = at..at + bytes;
        let (writer, write_lane) = (&mut self.writer[range.clone()], &mut self.write_lane[range.clone()]);
        let (reader, read_lane) = (&self.reader[range.clone()], &self.read_lane[range]);
        let tag = if atomic { me.tag & !0xff | ATOMIC } else { me.tag };
        let conflict = |i: usize, writer: u32| {
            let own_lane = me.phase | lanes.of(i);
            let by_warp = Self::foreign(writer, me) & (writer != tag);
            let by_reader = Self::foreign(reader[i], me);
            let same = (reader[i] == me.tag) & (read_lane[i] & !63 == me.phase);
            (by_warp, by_reader, same & (read_lane[i] != own_lane) & !atomic)
        };
        let mut race = false;
        for (i, &writer) in writer.iter().enumerate() {
            let (by_warp, by_reader, by_lane) = conflict(i, writer);
            race |= by_warp | by_reader | by_lane;
        }
        let problem = race.then(|| {
            writer.iter().enumerate().find_map(|(i, &writer)| match conflict(i, writer) {
                (true, ..) => Some((i, Problem::AfterWrite(writer & 0xff))),
                (_, true, _) => Some((i, Problem::AfterRead(reader[i] & 0xff))),
                (_, _, true) => Some((i, Problem::AfterLaneRead(read_lane[i] & 63))),
                _ => None,
            })
        });
        for i in 0..bytes {
            let keep = atomic & (writer[i] == me.tag);
            writer[i] = if keep { me.tag } else { tag };
            write_lane[i] = if keep { write_lane[i] } else { me.phase | lanes.of(i) };
        }
        problem.flatten()
    }

    fn unwritten(&self, at: usize, bytes: usize) -> Option<Found> {
        let state = &self.state[at..at + bytes];
        let mut all = true;
        for &byte in state {
            all &= byte == WRITTEN;
        }
        if all {
            return None;
        }
        let pending = state.iter().position(|&s| s == PENDING).map(|i| (i, Problem::Pending));
        pending.or_else(|| state.iter().position(|&s| s == UNWRITTEN).map(|i| (i, Problem::Unwritten)))
    }
}

impl Warp<'_> {
    fn identity(&self) -> Identity {
        let warp = self.index;
        Identity { tag: self.shadow.epoch << 8 | warp, warp, phase: self.state.phase << 6 }
    }

    /// Checks and records an access to shared memory at the offsets in `out`. Returns `None` after a fault.
    #[inline(never)]
    pub fn shade_shared(
        &mut self,
        mask: u32,
        bytes: u32,
        access: Access,
        out: &Row<u64>,
        contiguous: bool,
    ) -> Option<()> {
        let me = self.identity();
        let (races, uninitialised) = (self.run.checks.races, self.run.checks.uninitialised);
        let mut found = None;
        let shadow = &mut self.shadow;
        // If the lanes' addresses are contiguous, all lanes are checked as one range.
        let (mask, range, shift) =
            if contiguous { (1, 32 * bytes, bytes.trailing_zeros()) } else { (mask, bytes, 31) };
        each_lane(mask, |lane| {
            let (at, bytes) = (out.0[lane] as usize, range as usize);
            let lanes = Lanes { first: lane as u32, shift };
            let mut problem = None;
            if access.reads() {
                problem = shadow
                    .unwritten(at, bytes)
                    .filter(|(_, p)| uninitialised || races && matches!(p, Problem::Pending));
            }
            if races && access != Access::StrongRead {
                let race = if access.writes() {
                    shadow.write(me, at, bytes, lanes, access.strong())
                } else {
                    shadow.read(me, at, bytes, lanes)
                };
                problem = problem.or(race);
            }
            if access.writes() {
                shadow.state[at..at + bytes].fill(WRITTEN);
            }
            if let (Some((byte, problem)), None) = (problem, &found) {
                found = Some((lanes.of(byte), (at + byte) as u64, problem));
            }
        });
        let Some((lane, at, problem)) = found else { return Some(()) };
        self.report(lane, at, &problem, access.writes());
        None
    }

    fn report(&mut self, lane: u32, at: u64, problem: &Problem, writes: bool) {
        let verb = if writes { "written" } else { "read" };
        let warp = |w: u32| match w {
            ATOMIC => "an atomic operation".to_owned(),
            SEVERAL_WARPS => "several warps".to_owned(),
            w => format!("warp {w}"),
        };
        let other =
            |l: u32| if l == SEVERAL_LANES { "several lanes".to_owned() } else { format!("lane {l}") };
        let (kind, what) = match *problem {
            Problem::Unwritten => {
                (FaultKind::Uninitialised, "shared memory is read that nothing wrote".to_owned())
            }
            Problem::Pending => {
                (FaultKind::Race, "shared memory is read before its cp.async was waited for".to_owned())
            }
            Problem::AfterWrite(w) => (
                FaultKind::Race,
                format!("shared memory is {verb} after a write of {} without a barrier between", warp(w)),
            ),
            Problem::AfterRead(w) => (
                FaultKind::Race,
                format!("shared memory is {verb} after a read of {} without a barrier between", warp(w)),
            ),
            Problem::AfterLaneWrite(l) => (
                FaultKind::Race,
                format!(
                    "shared memory is {verb} after a write of {} of the warp without __syncwarp between",
                    other(l)
                ),
            ),
            Problem::AfterLaneRead(l) => (
                FaultKind::Race,
                format!(
                    "shared memory is {verb} after a read of {} of the warp without __syncwarp between",
                    other(l)
                ),
            ),
        };
        self.fail(kind, lane, Some(at), what);
    }

    /// Records the target of a `cp.async`. Reads of the target are errors until [`shade_arrival`](Self::shade_arrival).
    /// Returns `None` after a fault.
    pub fn shade_copy(&mut self, lane: usize, at: u32, bytes: u32) -> Option<()> {
        let me = self.identity();
        let (at, n) = (at as usize, bytes as usize);
        let problem = if self.run.checks.races {
            self.shadow.write(me, at, n, Lanes::one(lane as u32), false)
        } else {
            None
        };
        self.shadow.state[at..at + n].fill(PENDING);
        match problem {
            Some((byte, problem)) => {
                self.report(lane as u32, (at + byte) as u64, &problem, true);
                None
            }
            None => Some(()),
        }
    }

    /// Records that a lane has waited for its `cp.async` to this range.
    pub fn shade_arrival(&mut self, lane: u32, at: u32, bytes: u32) {
        let me = self.identity();
        let range = at as usize..(at + bytes) as usize;
        self.shadow.state[range.clone()].fill(WRITTEN);
        self.shadow.writer[range.clone()].fill(me.tag & !0xff | me.warp);
        self.shadow.write_lane[range].fill(me.phase | lane);
    }
}
