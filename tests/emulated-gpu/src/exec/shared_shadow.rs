//! Shadow of shared memory: what was written, by which warp and lane, and if a barrier has passed since.

use crate::fault::FaultKind;

use super::Warp;
use super::address::Access;
use super::rows::{Row, each_lane};

const UNWRITTEN: u8 = 0;
const WRITTEN: u8 = 1;
/// Target of a `cp.async` that was not waited for.
const PENDING: u8 = 2;
/// In place of a warp: atomic operations of any warps.
const ATOMIC: u32 = 0xfe;
/// In place of a warp: several warps.
const SEVERAL_WARPS: u32 = 0xff;
/// In place of a lane: several lanes.
const SEVERAL_LANES: u32 = 32;
/// Epochs begin anew before they reach the bits of a warp.
const LAST_EPOCH: u32 = 0x00ff_fff0;

/// Per byte: its state, and the epoch and warp of the last write and read. An epoch lies between two barriers of a block.
/// Lanes are told apart by the warp's phase, which ends at each `bar.warp.sync`.
#[derive(Default)]
pub(crate) struct SharedShadow {
    state: Vec<u8>,
    writer: Vec<u32>,
    reader: Vec<u32>,
    write_lane: Vec<u32>,
    read_lane: Vec<u32>,
    epoch: u32,
}

/// Problem of an access, before it is put into words.
enum Problem {
    Unwritten,
    Pending,
    /// Another warp (or [`ATOMIC`], [`SEVERAL_WARPS`]) wrote.
    AfterWrite(u32),
    AfterRead(u32),
    /// Another lane of the warp wrote.
    AfterLaneWrite(u32),
    AfterLaneRead(u32),
}

/// Identity of an access: epoch and warp, and the warp's phase.
#[derive(Clone, Copy)]
struct Identity {
    tag: u32,
    warp: u32,
    phase: u32,
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

    /// A barrier of the block: what was before it is ordered before what comes.
    pub fn pass_barrier(&mut self) {
        self.epoch += 1;
        if self.epoch > LAST_EPOCH {
            self.epoch = 1;
            self.writer.fill(0);
            self.reader.fill(0);
        }
    }

    /// A new block: nothing is written.
    pub fn begin_block(&mut self) {
        self.pass_barrier();
        self.state.fill(UNWRITTEN);
    }

    /// True if another warp wrote in this epoch.
    fn foreign(tag: u32, me: Identity) -> bool {
        tag >> 8 == me.tag >> 8 && tag != me.tag
    }

    fn read(&mut self, me: Identity, at: usize, bytes: usize, lane: u32) -> Option<Problem> {
        let range = at..at + bytes;
        let mut problem = None;
        let own_lane = me.phase | lane;
        for i in range {
            let (writer, write_lane) = (self.writer[i], self.write_lane[i]);
            if Self::foreign(writer, me) {
                problem = Some(Problem::AfterWrite(writer & 0xff));
            } else if writer == me.tag && write_lane != own_lane && write_lane & !63 == me.phase {
                problem = Some(Problem::AfterLaneWrite(write_lane & 63));
            }
            let reader = self.reader[i];
            let same_phase = reader == me.tag && self.read_lane[i] & !63 == me.phase;
            self.read_lane[i] =
                if same_phase && self.read_lane[i] != own_lane { me.phase | SEVERAL_LANES } else { own_lane };
            self.reader[i] = if Self::foreign(reader, me) { me.tag | SEVERAL_WARPS } else { me.tag };
        }
        problem
    }

    fn write(&mut self, me: Identity, at: usize, bytes: usize, lane: u32, atomic: bool) -> Option<Problem> {
        let mut problem = None;
        let own_lane = me.phase | lane;
        let tag = if atomic { me.tag & !0xff | ATOMIC } else { me.tag };
        for i in at..at + bytes {
            let (writer, reader) = (self.writer[i], self.reader[i]);
            if Self::foreign(writer, me) && writer != tag {
                problem = Some(Problem::AfterWrite(writer & 0xff));
            } else if Self::foreign(reader, me) {
                problem = Some(Problem::AfterRead(reader & 0xff));
            } else if reader == me.tag {
                let read_lane = self.read_lane[i];
                if read_lane != own_lane && read_lane & !63 == me.phase && !atomic {
                    problem = Some(Problem::AfterLaneRead(read_lane & 63));
                }
            }
            // An atomic operation does not hide a plain write of its own warp from other warps.
            if !(atomic && writer == me.tag) {
                self.writer[i] = tag;
                self.write_lane[i] = own_lane;
            }
        }
        problem
    }

    fn unwritten(&self, at: usize, bytes: usize) -> Option<Problem> {
        let state = &self.state[at..at + bytes];
        if state.iter().all(|&s| s == WRITTEN) {
            return None;
        }
        Some(if state.contains(&PENDING) { Problem::Pending } else { Problem::Unwritten })
    }
}

impl Warp<'_> {
    fn identity(&self) -> Identity {
        let warp = self.index;
        Identity { tag: self.shadow.epoch << 8 | warp, warp, phase: self.state.phase << 6 }
    }

    /// Checks and notes an access to shared memory at the offsets in `out`. None after a fault.
    #[inline(never)]
    pub fn shade_shared(
        &mut self,
        mask: u32,
        bytes: u32,
        access: Access,
        out: &Row<u64>,
        _together: bool,
    ) -> Option<()> {
        let me = self.identity();
        let (races, uninitialised) = (self.run.checks.races, self.run.checks.uninitialised);
        let mut found = None;
        let shadow = &mut self.shadow;
        each_lane(mask, |lane| {
            let (at, bytes) = (out.0[lane] as usize, bytes as usize);
            let mut problem = None;
            if access.reads() {
                problem = shadow
                    .unwritten(at, bytes)
                    .filter(|p| uninitialised || races && matches!(p, Problem::Pending));
            }
            if races && access != Access::StrongRead {
                let race = if access.writes() {
                    shadow.write(me, at, bytes, lane as u32, access.strong())
                } else {
                    shadow.read(me, at, bytes, lane as u32)
                };
                problem = problem.or(race);
            }
            if access.writes() {
                shadow.state[at..at + bytes].fill(WRITTEN);
            }
            if let (Some(problem), None) = (problem, &found) {
                found = Some((lane, problem));
            }
        });
        let Some((lane, problem)) = found else { return Some(()) };
        self.report(lane, out.0[lane], &problem, access.writes());
        None
    }

    fn report(&mut self, lane: usize, at: u64, problem: &Problem, writes: bool) {
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
        self.fail(kind, lane as u32, Some(at), what);
    }

    /// Notes the target of a `cp.async`, which may not be read before the wait. None after a fault.
    pub fn shade_copy(&mut self, lane: usize, at: u32, bytes: u32) -> Option<()> {
        let me = self.identity();
        let (at, n) = (at as usize, bytes as usize);
        let problem =
            if self.run.checks.races { self.shadow.write(me, at, n, lane as u32, false) } else { None };
        self.shadow.state[at..at + n].fill(PENDING);
        match problem {
            Some(problem) => {
                self.report(lane, at as u64, &problem, true);
                None
            }
            None => Some(()),
        }
    }

    /// Notes that a `cp.async` was waited for by its lane.
    pub fn shade_arrival(&mut self, lane: u32, at: u32, bytes: u32) {
        let me = self.identity();
        let range = at as usize..(at + bytes) as usize;
        self.shadow.state[range.clone()].fill(WRITTEN);
        self.shadow.writer[range.clone()].fill(me.tag & !0xff | me.warp);
        self.shadow.write_lane[range].fill(me.phase | lane);
    }
}
