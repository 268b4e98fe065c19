//! The state that the instructions of a warp read and write.

use crate::fault::{Fault, FaultKind, SourceLine};
use crate::program::Program;

use super::Run;
use super::copies::Copies;
use super::paths::Path;
use super::shared_shadow::SharedShadow;

/// The part of a warp's state that is stored while other warps run.
#[derive(Default)]
pub(crate) struct State {
    /// Groups of lanes, each with its own program counter.
    pub paths: Vec<Path>,
    /// Lanes that have not ended.
    pub alive: u32,
    /// Number of the block's barrier at which the warp waits.
    pub barrier: Option<u32>,
    pub copies: Copies,
    /// Number of barriers that the warp has passed: of the warp (`bar.warp.sync`) and of the block.
    pub phase: u32,
    /// True if the next turn starts with the group that has the highest program counter. While a warp has several
    /// groups, such turns alternate with other turns.
    pub furthest_first: bool,
}

/// The running warp and its block's memory. Each host thread has one `Warp`, which the warps of a block use in turns.
pub(crate) struct Warp<'a> {
    /// Register file of the warp.
    pub file: *mut u8,
    /// Number of lanes divided by 32: always 1 (see [`Warp::lanes`]).
    pub warp_size_in_32: usize,
    pub program: &'a Program,
    pub run: &'a Run<'a>,
    /// Shared memory of the block.
    pub shared: *mut u8,
    pub shared_bytes: u32,
    /// Local memory of the warp. Each lane has `Program::local_bytes` contiguous bytes.
    pub local: *mut u8,
    /// Index of the warp in the block.
    pub index: u32,
    pub block: [u32; 3],
    /// Index of the block in the grid; x varies fastest.
    pub block_index: u32,
    /// Index of the running instruction.
    pub pc: u32,
    pub state: State,
    pub shadow: SharedShadow,
    /// Index of the allocation that was accessed last.
    pub last_allocation: usize,
    /// First fault. It ends the launch.
    pub fault: Option<Box<Fault>>,
    /// Number of instructions that the warp has run.
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
