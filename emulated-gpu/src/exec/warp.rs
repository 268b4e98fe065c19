//! A warp, as its instructions see it.

use crate::fault::{Fault, FaultKind, SourceLine};
use crate::program::Program;

use super::Run;
use super::copies::Copies;
use super::paths::Path;
use super::shared_shadow::SharedShadow;

/// State of a warp that is not running.
#[derive(Default)]
pub(crate) struct State {
    /// Groups of lanes with program counters of their own.
    pub paths: Vec<Path>,
    /// Lanes that have not ended.
    pub alive: u32,
    /// Barrier of the block that the warp waits at.
    pub barrier: Option<u32>,
    pub copies: Copies,
    /// Count of `bar.warp.sync` and barriers that the warp passed.
    pub phase: u32,
    /// True after a slice with several paths: the path that is furthest goes first in the next one.
    pub furthest_first: bool,
}

/// The warp that runs, with its block's memory. One per host thread: warps take turns in it.
pub(crate) struct Warp<'a> {
    /// Register file of the warp.
    pub file: *mut u8,
    /// Always 1 (see [`Warp::lanes`]).
    pub warp_size_in_32: usize,
    pub program: &'a Program,
    pub run: &'a Run<'a>,
    /// Shared memory of the block.
    pub shared: *mut u8,
    pub shared_bytes: u32,
    /// Local memory of the warp: `Program::local_bytes` per lane, a lane's bytes together.
    pub local: *mut u8,
    /// Warp in the block.
    pub index: u32,
    pub block: [u32; 3],
    /// Block in the grid, x fastest.
    pub block_index: u32,
    /// Instruction that runs.
    pub pc: u32,
    pub state: State,
    pub shadow: SharedShadow,
    /// Allocation that was touched last.
    pub last_allocation: usize,
    /// First fault. The launch ends with it.
    pub fault: Option<Box<Fault>>,
    /// Instructions that ran.
    pub steps: u64,
}

impl Warp<'_> {
    /// Records a fault of the running instruction.
    #[cold]
    #[inline(never)]
    pub fn fail(&mut self, kind: FaultKind, lane: u32, address: Option<u64>, what: String) {
        if self.fault.is_some() {
            return;
        }
        let source = self.program.sources.get(self.pc as usize).copied().unwrap_or_default();
        let file = self.program.files.iter().find(|(number, _)| *number == source.file);
        let [x, y, _] = self.run.grid.threads;
        let thread = self.index * 32 + lane;
        self.fault = Some(Box::new(Fault {
            kind,
            what,
            kernel: self.run.kernel.to_owned(),
            ptx_line: source.ptx_line,
            source: file
                .filter(|_| source.line != 0)
                .map(|(_, name)| SourceLine { file: name.clone(), line: source.line }),
            block: self.block,
            thread: [thread % x, thread / x % y, thread / x / y],
            address,
        }));
    }
}
