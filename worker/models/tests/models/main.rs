//! Tests of whole models that need no process of their own. They are one executable, because an executable that
//! contains all models takes long to compile.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../../kernels/tests/support/paths.rs"]
mod cpu_paths;

mod candidates;
mod expert_loads;
mod hybrid;
mod int8;
mod invariance;
mod kv_fp8;
mod loading;
mod long;
mod media;
mod padding;
mod pages;
mod paths;
mod published_v4;
mod ranks;
mod slicings;

use tutti_kernels::cpu::Isa;
