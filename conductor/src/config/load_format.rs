//! Where weights come from.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Where weights come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LoadFormat {
    /// The checkpoint's safetensors files.
    #[default]
    Auto,
    /// Seeded random weights in the shapes of config.json, which alone is needed.
    Dummy,
}
