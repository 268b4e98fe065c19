//! Compares the CPU device with plain arithmetic in double precision, and with itself: alone, batched and chunked, on
//! every instruction path and with several numbers of threads.

#![allow(clippy::unwrap_used)] // A failed unwrap is a failed test.

mod argmax;
mod attention;
mod compressed;
mod delta_rule;
mod encoder;
mod experts;
mod gate_up;
mod grouped;
mod hyper;
mod int4;
mod int8;
mod linear;
mod misuse;
mod nominate;
mod packed;
mod recorder;
mod rowwise;
mod sampling;
mod screen_bounds;
mod screened_argmax;
mod support;
