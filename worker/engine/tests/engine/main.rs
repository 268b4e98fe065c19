//! Tests of the engine with a test model whose output reveals every misplaced token, and with small models of real
//! layers.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod atomic;
mod common;
mod divided;
mod flight;
mod masks;
mod qwen3;
mod slots;
mod steps;
mod threads;
