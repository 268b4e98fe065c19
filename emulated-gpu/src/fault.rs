//! Faults: the errors that end a launch.

use std::fmt;

/// Class of a fault. It determines the driver's error code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// An access outside of all allocations, outside of shared memory or outside of local memory.
    OutOfBounds,
    /// An access to an allocation that was freed.
    UseAfterFree,
    /// An access whose address is not a multiple of the access's size.
    Misaligned,
    /// A read of bytes that were never written.
    Uninitialised,
    /// Two unordered accesses to the same bytes, of which at least one is a write.
    Race,
    /// A barrier or warp-wide instruction that some member lanes never reach, or that has a wrong member mask.
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

/// A line of a kernel's source. PTX names such lines only if it was compiled with `-lineinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceLine {
    /// Name of the file, as it was passed to the compiler.
    pub file: String,
    /// Line in the file, from 1.
    pub line: u32,
}

/// The first fault of a launch, with kernel, line, block and thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Class of the fault.
    pub kind: FaultKind,
    /// Description of the error, with the wrong values.
    pub what: String,
    /// Name of the kernel.
    pub kernel: String,
    /// Line of the PTX text, from 1; 0 if no instruction caused the fault.
    pub ptx_line: u32,
    /// Line of the kernel's source, if the PTX names one.
    pub source: Option<SourceLine>,
    /// Index of the block in the grid: x, y, z.
    pub block: [u32; 3],
    /// Index of the thread in the block: x, y, z.
    pub thread: [u32; 3],
    /// Address of the access, if the fault is about memory.
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
