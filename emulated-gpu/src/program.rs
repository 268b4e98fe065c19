//! Decoded kernels: instructions whose operands are rows of a register file.
//!
//! A row has 32 lanes. Registers, constants, special registers and kernel parameters are all rows. A row is identified
//! by its offset in a warp's register file. The row of a predicate is one 32-bit mask.

use crate::exec::Warp;

/// Row or index of an operand that an instruction does not have.
pub(crate) const NONE: u32 = u32::MAX;
/// Windows of generic addresses. The bits from `WINDOW_BITS` on select shared memory, local memory or parameters.
pub(crate) const WINDOW_BITS: u32 = 56;
pub(crate) const SHARED_WINDOW: u64 = 1 << WINDOW_BITS;
pub(crate) const LOCAL_WINDOW: u64 = 2 << WINDOW_BITS;
pub(crate) const PARAMETER_WINDOW: u64 = 3 << WINDOW_BITS;

/// Width of a row's lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Width {
    Predicate,
    W16,
    W32,
    W64,
}

impl Width {
    /// Returns the width of the registers that hold a value of `bits` bits.
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

    /// Bytes of a row with this width.
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

/// Effect of an instruction on control flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Control {
    /// Continues with the next instruction.
    Next,
    /// Jumps to `target` in the lanes whose guard holds.
    Branch,
    /// Ends the lanes whose guard holds.
    Exit,
    /// Waits until all lanes of the member mask have arrived at the instruction, and then runs the instruction.
    Converged,
    /// `bar.warp.sync`: as `Converged`, but lanes may arrive at different instructions, and the barrier orders memory
    /// accesses.
    WarpBarrier,
    /// Waits for all threads of the block. `detail` is the barrier's number.
    BlockBarrier,
}

/// Function of an instruction. The third argument is the mask of the lanes that run the instruction, at least one.
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
    /// All ones if the guard is negated, otherwise zero.
    pub guard_flip: u32,
    pub into: [u32; 2],
    pub from: [u32; 4],
    /// Row of the member masks of a warp-wide instruction; `NONE` means all lanes.
    pub members: u32,
    /// Index in [`Program::lists`] of further rows: `list_into` rows that are written, and then `list_from` rows that
    /// are read.
    pub list: u32,
    pub list_into: u8,
    pub list_from: u8,
    /// A value whose meaning depends on the operation.
    pub detail: u32,
    pub offset: i64,
    pub target: u32,
}

/// Content of a row that no instruction writes. It is a constant, or depends on the launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Fill {
    Constant(u64),
    Special(Special),
    /// `bytes` bytes of the kernel's parameters, from the byte `offset` on.
    Parameter {
        offset: u32,
        bytes: u32,
        signed: bool,
    },
    /// Address of the module's variable with this index.
    Variable(u32),
    /// End of the static shared memory. The lowering replaces this variant by a constant.
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

/// The decoded instructions of a kernel, and the sizes of the memory that they need.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub instructions: Vec<Instruction>,
    pub lists: Vec<u32>,
    pub rows: Vec<(u32, Width, Fill)>,
    /// Bytes of a warp's register file.
    pub file_bytes: u32,
    pub shared_bytes: u32,
    pub local_bytes: u32,
    /// For each instruction, the line in the PTX, and the file number and the line in the kernel's source.
    pub sources: Vec<crate::ptx::Source>,
    /// Numbers and names of the source files.
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
