//! Divergence: lanes of a warp run in groups. Groups merge when their program counters are equal.

use crate::fault::FaultKind;
use crate::program::{Control, Instruction, NONE};

use super::Warp;
use super::warp::State;

/// A group of lanes at one program counter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    pub pc: u32,
    pub mask: u32,
    /// True if the group waits for other lanes at its instruction.
    pub waits: bool,
}

/// The reason for which a warp stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// All lanes wait at this barrier of the block.
    Barrier(u32),
    Ended,
    /// The warp has run the instructions of its turn.
    Slice,
    Fault,
}

impl State {
    /// Adds a group, or merges it into an existing group at the same program counter.
    fn add(&mut self, pc: u32, mask: u32, waits: bool) {
        if mask == 0 {
            return;
        }
        match self.paths.iter_mut().find(|p| p.pc == pc) {
            Some(path) => {
                path.mask |= mask;
                path.waits = false;
            }
            None => self.paths.push(Path { pc, mask, waits }),
        }
    }

    /// Removes and returns the group that runs next: the group with the lowest program counter among the groups that do
    /// not wait.
    fn take(&mut self) -> Option<Path> {
        let ready = self.paths.iter().enumerate().filter(|(_, p)| !p.waits);
        let index = ready.min_by_key(|(_, p)| p.pc)?.0;
        Some(self.paths.swap_remove(index))
    }

    /// Removes and returns the group with the highest program counter among the groups that do not wait. This group
    /// runs first in a turn with [`State::furthest_first`].
    fn take_furthest(&mut self) -> Option<Path> {
        let ready = self.paths.iter().enumerate().filter(|(_, p)| !p.waits);
        let index = ready.max_by_key(|(_, p)| p.pc)?.0;
        Some(self.paths.swap_remove(index))
    }

    /// Returns the program counter at which a group that runs at `pc` must stop. At that counter, another group may run
    /// next or a waiting group can be joined.
    fn meeting(&self, pc: u32) -> u32 {
        let others = self.paths.iter().filter(|p| !p.waits || p.pc >= pc);
        others.map(|p| p.pc).min().unwrap_or(NONE)
    }

    fn wake(&mut self) {
        for path in &mut self.paths {
            path.waits = false;
        }
    }
}

impl Warp<'_> {
    /// Runs the warp until it waits for its block, ends or faults. After `limit` instructions, stops at the next
    /// branch.
    ///
    /// # Safety
    ///
    /// Register file, shared memory and local memory are as large as the program requires.
    pub unsafe fn run_slice(&mut self, limit: u64) -> Stop {
        let code = self.program.instructions.as_ptr();
        self.state.wake();
        let furthest = std::mem::take(&mut self.state.furthest_first) && self.state.paths.len() > 1;
        let first = if furthest { self.state.take_furthest() } else { self.state.take() };
        let Some(mut now) = first else { return Stop::Ended };
        let mut meet = if furthest { NONE } else { self.state.meeting(now.pc) };
        let mut left = limit as i64;
        let stop = loop {
            if now.pc >= meet {
                self.state.add(now.pc, now.mask, false);
                // `take` finds a group, because the group that was just added does not wait.
                if let Some(next) = self.state.take() {
                    now = next;
                }
                meet = self.state.meeting(now.pc);
            }
            // SAFETY: the targets of branches lie inside the program, and the program ends with an exit of all lanes.
            let instruction = unsafe { &*code.add(now.pc as usize) };
            let mask = if instruction.guard == NONE {
                now.mask
            } else {
                // SAFETY: the guard is the row of a predicate.
                now.mask & (unsafe { self.predicate(instruction.guard) } ^ instruction.guard_flip)
            };
            left -= 1;
            self.pc = now.pc;
            match instruction.control {
                Control::Next => {
                    if mask != 0 {
                        // SAFETY: the lowering chose the rows for this operation.
                        unsafe { (instruction.run)(self, instruction, mask) };
                        if self.fault.is_some() {
                            break Stop::Fault;
                        }
                    }
                    now.pc += 1;
                }
                Control::Branch => {
                    let (target, next) = (instruction.target, now.pc + 1);
                    if mask == 0 {
                        now.pc = next;
                    } else {
                        let stay = now.mask & !mask;
                        let back = target < next;
                        if stay == 0 {
                            now.pc = target;
                        } else if back {
                            self.state.add(next, stay, false);
                            (now.pc, now.mask) = (target, mask);
                        } else {
                            self.state.add(target, mask, false);
                            (now.pc, now.mask) = (next, stay);
                        }
                        if stay != 0 || back && !self.state.paths.is_empty() {
                            meet = self.state.meeting(now.pc);
                        }
                    }
                    if left <= 0 {
                        // The group with the highest program counter and the group with the lowest take turns, because
                        // either may wait for the other in a loop.
                        self.state.furthest_first = !furthest && !self.state.paths.is_empty();
                        self.state.add(now.pc, now.mask, false);
                        break Stop::Slice;
                    }
                }
                Control::Exit => {
                    self.state.alive &= !mask;
                    if mask != 0 {
                        // Other groups may have waited for the lanes that end here, and for no others.
                        self.state.wake();
                    }
                    now.mask &= !mask;
                    now.pc += 1;
                    if now.mask == 0 {
                        match self.state.take() {
                            Some(next) => now = next,
                            None => break Stop::Ended,
                        }
                    }
                    meet = self.state.meeting(now.pc);
                }
                Control::Converged | Control::WarpBarrier => {
                    if mask == 0 {
                        now.pc += 1;
                        continue;
                    }
                    // SAFETY: the lowering chose a row of masks, or `NONE`, for the members.
                    let Some(ready) = (unsafe { self.ready_lanes(instruction, mask) }) else {
                        break Stop::Fault;
                    };
                    if ready != 0 {
                        if instruction.control == Control::WarpBarrier {
                            self.state.phase += 1;
                        }
                        // SAFETY: the lowering chose the rows for this operation.
                        unsafe { (instruction.run)(self, instruction, ready) };
                        if self.fault.is_some() {
                            break Stop::Fault;
                        }
                    }
                    if ready == mask {
                        now.pc += 1;
                        continue;
                    }
                    self.state.add(now.pc + 1, now.mask & !mask | ready, false);
                    self.state.add(now.pc, mask & !ready, true);
                    match self.next_after_wait() {
                        Some(next) => now = next,
                        None => break Stop::Fault,
                    }
                    meet = self.state.meeting(now.pc);
                }
                Control::BlockBarrier => {
                    if mask == 0 {
                        now.pc += 1;
                        continue;
                    }
                    self.state.add(now.pc + 1, now.mask & !mask, false);
                    if mask == self.state.alive {
                        self.state.phase += 1;
                        self.state.add(now.pc + 1, mask, false);
                        break Stop::Barrier(instruction.detail);
                    }
                    self.state.add(now.pc, mask, true);
                    match self.next_after_wait() {
                        Some(next) => now = next,
                        None => break Stop::Fault,
                    }
                    meet = self.state.meeting(now.pc);
                }
            }
        };
        self.steps += (limit as i64 - left) as u64;
        stop
    }

    /// Returns the lanes of `mask` that can continue: all members of such a lane have arrived or ended. Sets a fault
    /// and returns `None` if a lane is not in its own member mask.
    ///
    /// # Safety
    ///
    /// The instruction's members are a row of 32-bit masks, or `NONE`.
    unsafe fn ready_lanes(&mut self, instruction: &Instruction, mask: u32) -> Option<u32> {
        if instruction.members == NONE {
            return Some(if mask == self.state.alive { mask } else { 0 });
        }
        // SAFETY: the caller promises that the members are a row of 32-bit masks or `NONE`, and they are not `NONE`.
        let members = unsafe { self.get::<u32>(instruction.members) };
        let (mut ready, mut strangers) = (0, 0);
        super::rows::each_lane(mask, |lane| {
            let own = members.0[lane];
            strangers |= (!own >> lane & 1) << lane;
            ready |= u32::from(own & self.state.alive & !mask == 0) << lane;
        });
        if strangers != 0 {
            let lane = strangers.trailing_zeros();
            let what =
                format!("lane {lane} is not in its own member mask {:#010x}", members.0[lane as usize]);
            self.fail(FaultKind::Barrier, lane, None, what);
            return None;
        }
        Some(ready)
    }

    /// Removes and returns the group that runs next, after the running group has begun to wait. If all groups wait for
    /// each other, sets a fault and returns `None`.
    fn next_after_wait(&mut self) -> Option<Path> {
        if let Some(next) = self.state.take() {
            return Some(next);
        }
        // SAFETY: the groups wait at instructions of the program.
        if unsafe { self.meet_at_warp_barriers() } {
            return self.state.take();
        }
        let waiting = self.state.paths.clone();
        let first = waiting.first()?;
        let code = &self.program.instructions;
        self.pc = first.pc;
        let positions = waiting.iter().map(|p| {
            let source = self.program.sources[p.pc as usize];
            format!("lanes {:#010x} wait at line {} (PTX line {})", p.mask, source.line, source.ptx_line)
        });
        let what = match code[first.pc as usize].control {
            Control::BlockBarrier => "a barrier that not all lanes of the warp reach",
            _ => "an instruction that not all lanes of its member mask reach",
        };
        let ended = self.state.alive;
        let what = format!(
            "{what}: {}; lanes {ended:#010x} have not ended",
            positions.collect::<Vec<_>>().join(", ")
        );
        self.fail(FaultKind::Barrier, first.mask.trailing_zeros(), None, what);
        None
    }

    /// Releases lanes that wait for each other at different `bar.warp.sync` instructions. Returns false if it releases
    /// no lane.
    ///
    /// # Safety
    ///
    /// All groups wait at instructions of the program.
    unsafe fn meet_at_warp_barriers(&mut self) -> bool {
        let code = &self.program.instructions;
        let at_barriers: Vec<(u32, u32)> = self
            .state
            .paths
            .iter()
            .filter(|p| code[p.pc as usize].control == Control::WarpBarrier)
            .map(|p| (p.mask, code[p.pc as usize].members))
            .collect();
        let mut wanted = [0; 32];
        let mut here = 0;
        for &(mask, members) in &at_barriers {
            here |= mask;
            // SAFETY: the members of a warp barrier are a row of 32-bit masks.
            let members = unsafe { self.get::<u32>(members) };
            super::rows::each_lane(mask, |lane| wanted[lane] = members.0[lane] & self.state.alive);
        }
        let mut go = 0;
        super::rows::each_lane(here, |lane| {
            let mut all = wanted[lane] & !here == 0;
            super::rows::each_lane(wanted[lane] & here, |other| all &= wanted[other] == wanted[lane]);
            go |= u32::from(all) << lane;
        });
        if go == 0 {
            return false;
        }
        self.state.phase += 1;
        let mut moved = Vec::new();
        for path in &mut self.state.paths {
            if path.mask & go != 0 && code[path.pc as usize].control == Control::WarpBarrier {
                moved.push((path.pc + 1, path.mask & go));
                path.mask &= !go;
            }
        }
        self.state.paths.retain(|p| p.mask != 0);
        for (pc, mask) in moved {
            self.state.add(pc, mask, false);
        }
        true
    }
}
