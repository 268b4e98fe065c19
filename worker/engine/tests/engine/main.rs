//! Tests of the engine against a model that shows every misplaced token, and against a small Qwen3.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;
mod divided;
mod flight;
mod qwen3;
mod steps;
mod threads;
