//! Tests of the engine against a model that shows every misplaced token, and against small models of
//! real layers.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod atomic;
mod common;
mod divided;
mod flight;
mod qwen3;
mod slots;
mod steps;
mod threads;
