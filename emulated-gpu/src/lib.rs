//! A GPU in software. It decodes PTX that NVRTC made, and runs its kernels on the CPU.
//!
//! ```text
//! PTX text --ptx--> statements --lower--> programs of rows --exec--> launches over device memory
//! ```
//!
//! A warp runs each instruction for its 32 lanes, and a register is a row of 32 values. Lanes that diverge run in
//! groups. The group with the lowest program counter runs first, and groups with equal counters merge. [`Checks`] find
//! errors that a real GPU does not report. A report ([`Fault`]) names kernel, source line, block and thread.
//!
//! Approximate instructions (such as `ex2.approx`) are within the error that PTX states, but do not have the bits of
//! any real GPU. Weak memory orders, timing and occupancy are not emulated.

#![cfg_attr(not(target_arch = "x86_64"), allow(unused))]

mod exec;
mod fault;
mod grid;
mod launch;
mod lower;
mod memory;
mod module;
mod ops;
mod program;
mod ptx;

pub use fault::{Fault, FaultKind, SourceLine};
pub use grid::{Checks, Grid};
pub use launch::launch;
pub use memory::{BadAddress, DeviceMemory, OutOfMemory};
pub use module::{DecodeError, Kernel, Module, Parameter, Variable};
