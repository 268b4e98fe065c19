//! Decoded kernels: instructions over rows of a register file.
//!
//! Each operand is a row of 32 lanes: registers, constants, special registers and parameters of the kernel alike. A row
//! is named by its offset in a warp's register file. A predicate is one 32-bit mask.

use crate::exec::Warp;

/// No operand.
pub(crate) const NONE: u32 = u32::MAX;
/// Generic addresses of shared memory begin here, those of local memory and of the parameters at the next windows.
pub(crate) const WINDOW_BITS: u32 = 56;
pub(crate) const SHARED_WINDOW: u64 = 1 << WINDOW_BITS;
pub(crate) const LOCAL_WINDOW: u64 = 2 << WINDOW_BITS;
pub(crate) const PARAMETER_WINDOW: u64 = 3 << WINDOW_BITS;

/// Bytes of a lane in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Width {
    Predicate,
    W16,
    W32,
    W64,
}

impl Width {
    /// The register that holds a value of `bits` bits.
    pub fn of_bits(bits: u32) -> Self {
        match bits {
            1 => Width::Predicate,
            0 | 2..=16 => Width::W16,
            17..=32 => Width::W32,
            _ => Width::W64,
        }
    }

    /// Bits of a lane.
    pub fn bits(self) -> u32 {
        match self {
            Width::Predicate => 1,
            Width::W16 => 16,
            Width::W32 => 32,
            Width::W64 => 64,
        }
    }

    /// Bytes of the row.
    pub fn row_bytes(self) -> u32 {
        match self {
            Width::Predicate => 4,
            other => other.bits() * 4,
        }
    }
}

/// State space of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Generic,
    Global,
    Shared,
    Local,
    Parameter,
}

/// Effect of an instruction on the flow of control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Control {
    /// Goes on to the next instruction.
    Next,
    /// Goes to `target` in the lanes whose guard holds.
    Branch,
    /// Ends the lanes whose guard holds.
    Exit,
    /// Waits until all lanes of the member mask are there, then runs.
    Converged,
    /// `bar.warp.sync`: as `Converged`, but lanes may meet from several places, and memory is ordered.
    WarpBarrier,
    /// Waits for all threads of the block; `detail` is the barrier.
    BlockBarrier,
}

/// Function of an instruction. The mask names the lanes that run it, at least one.
///
/// # Safety
///
/// The instruction's rows lie in the warp's register file and have the widths that the function reads and writes.
pub(crate) type Operation = unsafe fn(&mut Warp<'_>, &Instruction, u32);

/// An instruction. Unused rows are [`NONE`].
#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    pub run: Operation,
    pub control: Control,
    pub space: Space,
    /// True if the row of addresses has 64 bits per lane.
    pub wide_address: bool,
    pub guard: u32,
    /// All ones if the guard is negated.
    pub guard_flip: u32,
    pub into: [u32; 2],
    pub from: [u32; 4],
    /// Row of member masks of instructions that run together; `NONE` means all lanes.
    pub members: u32,
    /// First of further rows in [`Program::lists`]: `list_into` that are written, then `list_from` that are read.
    pub list: u32,
    pub list_into: u8,
    pub list_from: u8,
    /// A value whose meaning depends on the operation.
    pub detail: u32,
    pub offset: i64,
    pub target: u32,
}

/// First content of a row, the same in each launch or computed from its grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fill {
    Constant(u64),
    Special(Special),
    /// Bytes of the kernel's parameters from this offset, as many as given.
    Parameter {
        offset: u32,
        bytes: u32,
        signed: bool,
    },
    /// Address of a variable of the module.
    Variable(u32),
    /// End of the static shared memory. The lowering makes a constant of it.
    DynamicShared,
}

/// Special registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Thread(u8),
    Threads(u8),
    Block(u8),
    Blocks(u8),
    Lane,
    Warp,
    Warps,
    LanesBelow,
    LanesUpTo,
    LanesAbove,
    LanesFrom,
    LaneBit,
    DynamicSharedBytes,
    TotalSharedBytes,
}

/// A kernel that can run.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub instructions: Vec<Instruction>,
    pub lists: Vec<u32>,
    pub rows: Vec<(u32, Width, Fill)>,
    /// Bytes of a warp's register file.
    pub file_bytes: u32,
    pub shared_bytes: u32,
    pub local_bytes: u32,
    /// Per instruction, its line in the PTX, its file's number and its line there.
    pub sources: Vec<crate::ptx::Source>,
    /// Files by number.
    pub files: Vec<(u32, String)>,
}

impl Instruction {
    /// Rows that a list instruction writes.
    pub fn list_into<'p>(&self, program: &'p Program) -> &'p [u32] {
        &program.lists[self.list as usize..][..usize::from(self.list_into)]
    }

    /// Rows that a list instruction reads.
    pub fn list_from<'p>(&self, program: &'p Program) -> &'p [u32] {
        &program.lists[self.list as usize + usize::from(self.list_into)..][..usize::from(self.list_from)]
    }
}
