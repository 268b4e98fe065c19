//! In how many bits weights are held.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What becomes of a checkpoint's matrices when they are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Quantize {
    /// They stay as they are stored.
    #[default]
    None,
    /// Eight bits a weight, and activations in eight bits where they meet.
    Int8,
}
