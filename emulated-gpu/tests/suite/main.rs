//! The emulator against PTX's own definition, and its checks against small programs that are wrong.
//!
//! Expected values are made by hand from the PTX ISA's text, not by another run of the emulator.

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
