//! Tests the emulator against the PTX ISA, and its checks on small wrong programs.
//!
//! Expected values are derived by hand from the PTX ISA's text, not from a run of the emulator.

#![allow(clippy::unwrap_used)]

mod arithmetic;
mod checks;
mod conversions;
mod decoding;
mod device_memory;
mod halves;
mod integers;
mod matrices;
mod nvrtc;
mod programs;
mod snippet;
mod warps;
