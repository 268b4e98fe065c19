//! Faults: the errors that a launch can end with.

use std::fmt;

/// Class of a fault. A driver chooses its error code by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// An access outside of all allocations, of shared memory or of local memory.
    OutOfBounds,
    /// An access to an allocation that was freed.
    UseAfterFree,
    /// An access whose address is no multiple of its size.
    Misaligned,
    /// A read of bytes that were never written.
    Uninitialised,
    /// Two accesses to the same bytes that nothing orders, at least one of them a write.
    Race,
    /// A barrier or warp-wide instruction that some of its lanes never reach, or that has a wrong member mask.
    Barrier,
    /// A `trap`, or a failed assertion.
    Trap,
    /// A kernel that this emulator cannot decode.
    Unsupported,
    /// Launch parameters or a grid that do not fit the kernel.
    Launch,
    /// A launch that makes no progress.
    Stuck,
}

/// A line of the source that a kernel was compiled from. It is known if the kernel was compiled with `-lineinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLine {
    /// Name of the file, as the compiler was given it.
    pub file: String,
    /// Line in the file, from 1.
    pub line: u32,
}

/// The first fault of a launch, with kernel, line, block and thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Class of the fault.
    pub kind: FaultKind,
    /// The error in words, with the offending values.
    pub what: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Line of the PTX text, from 1; 0 if no instruction caused the fault.
    pub ptx_line: u32,
    /// Line of the kernel's source, if the PTX names one.
    pub source: Option<SourceLine>,
    /// Block in the grid: x, y, z.
    pub block: [u32; 3],
    /// Thread in the block: x, y, z.
    pub thread: [u32; 3],
    /// Address of the access, for faults of memory.
    pub address: Option<u64>,
}

impl Fault {
    /// Creates the fault of a launch that failed before any thread ran.
    pub(crate) fn of_launch(kind: FaultKind, kernel: &str, what: String) -> Self {
        Fault {
            kind,
            what,
            kernel: kernel.to_owned(),
            ptx_line: 0,
            source: None,
            block: [0; 3],
            thread: [0; 3],
            address: None,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {}: {}", self.kernel, self.what)?;
        if let Some(address) = self.address {
            write!(f, " at address {address:#x}")?;
        }
        if self.ptx_line == 0 {
            return Ok(());
        }
        if let Some(source) = &self.source {
            write!(f, ", {}:{}", source.file, source.line)?;
        }
        let ([bx, by, bz], [tx, ty, tz]) = (self.block, self.thread);
        write!(f, ", PTX line {}, block ({bx}, {by}, {bz}), thread ({tx}, {ty}, {tz})", self.ptx_line)
    }
}

impl std::error::Error for Fault {}
