//! Shapes of the models that the benches serve with random weights: folders of `tests/bench` with a config.json.
#![allow(dead_code, reason = "each bench uses some of it")]

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;

/// Shape of a model. All have Qwen's vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
pub enum Shape {
    /// Dense: Qwen3-0.6B.
    #[value(name = "qwen3-0.6b")]
    #[serde(rename = "qwen3-0.6b")]
    Qwen3,
    /// Mixture of experts: 24 layers with 32 experts, of which a token uses 4; 1.5 billion parameters.
    #[value(name = "qwen3-moe-1.5b")]
    #[serde(rename = "qwen3-moe-1.5b")]
    Qwen3Moe,
    /// Hybrid: 18 layers with a gated delta rule and 6 with attention; 0.8 billion parameters.
    #[value(name = "qwen3.5-0.8b")]
    #[serde(rename = "qwen3.5-0.8b")]
    Qwen35,
}

impl Shape {
    /// Name of the shape's folder.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qwen3 => "qwen3-0.6b",
            Self::Qwen3Moe => "qwen3-moe-1.5b",
            Self::Qwen35 => "qwen3.5-0.8b",
        }
    }

    /// Folder with the shape's config.json.
    pub fn dir(self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bench").join(self.name())
    }
}
