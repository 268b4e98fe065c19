//! A GPU made of software: PTX as NVRTC makes it is decoded, and launches of its kernels run on the CPU.
//!
//! ```text
//! PTX text --ptx--> statements --lower--> programs of rows --exec--> launches over device memory
//! ```
//!
//! A warp runs 32 lanes per instruction: a register is a row of 32 values. Lanes that diverge run in groups, the lowest
//! program counter first, and meet again where their counters are equal. The checks ([`Checks`]) report what silicon
//! lets pass: a report ([`Fault`]) names kernel, source line, block and thread.
//!
//! Approximate instructions (`ex2.approx` and its like) are within the error that PTX states, but not equal to any
//! silicon's bits. Weak memory orders, timing and occupancy do not show here.

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
