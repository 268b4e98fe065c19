//! Reports of what went wrong in a launch.

use std::fmt;

/// Class of a fault, from which a driver chooses its error code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// An access outside of every allocation, of shared memory or of local memory.
    OutOfBounds,
    /// An access to an allocation that was freed.
    UseAfterFree,
    /// An access whose address is no multiple of its size.
    Misaligned,
    /// A read of bytes that nothing wrote.
    Uninitialised,
    /// Two accesses to the same bytes that nothing orders, at least one of them a write.
    Race,
    /// A barrier or an instruction of a whole warp that not all of its lanes reach, or that names lanes wrongly.
    Barrier,
    /// A `trap`, or a call of the function behind a failed assertion.
    Trap,
    /// A kernel that this emulator cannot decode.
    Unsupported,
    /// Launch parameters or a grid that do not fit the kernel.
    Launch,
    /// A launch that makes no progress.
    Stuck,
}

/// Line of the source that a kernel was compiled from, known when it was compiled with `-lineinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLine {
    /// Name that the compiler was given.
    pub file: String,
    /// Line in the file, from 1.
    pub line: u32,
}

/// The first error of a launch, with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Class of the fault.
    pub kind: FaultKind,
    /// The error in words, with the offending values.
    pub what: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Line of the PTX text, from 1; 0 if the fault is none of an instruction's.
    pub ptx_line: u32,
    /// Line of the kernel's source, if the PTX names one.
    pub source: Option<SourceLine>,
    /// Block in the grid: x, y, z.
    pub block: [u32; 3],
    /// Thread in the block: x, y, z.
    pub thread: [u32; 3],
    /// Address that was touched, for faults of memory.
    pub address: Option<u64>,
}

impl Fault {
    /// A fault of a whole launch, before any thread runs.
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
