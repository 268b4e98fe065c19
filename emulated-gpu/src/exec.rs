//! Runs programs (lowered kernels) on the host's processor.

mod address;
mod block;
pub(crate) mod copies;
pub(crate) mod global_shadow;
mod paths;
mod rows;
mod shared_shadow;
mod specials;
mod warp;

pub(crate) use address::{Access, Addresses};
pub(crate) use block::{Run, run_blocks};
pub(crate) use rows::{Row, each_lane};
pub(crate) use warp::Warp;
