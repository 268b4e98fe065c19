//! The scheduler's policies, by the names that operators give them.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Who cuts long prefills. The tokens are the same whoever does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Chunking {
    /// Each step mixes decodes and prefill chunks under its budget
    #[default]
    Scheduler,
    /// A prefill is one turn, which runs as chunks of max-prefill-chunk-size back to back
    Engine,
    /// A prefill is one turn, whole; one larger than the budget runs alone
    Off,
}

/// How the prefills of a step share what decodes leave of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum PrefillSharing {
    /// Half to the earliest, the rest to whoever has least left
    #[default]
    ShortestFirst,
    /// Equally; what the shortest leave of theirs goes to the others
    Fair,
    /// The earliest takes what it can, then the next
    FirstCome,
}

/// What a request must hold before it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Admission {
    /// KV pages for its prompt and all of its max_tokens
    #[default]
    WholeLife,
    /// KV pages for its prompt; when output needs more than there are, the youngest gives up its own and starts over
    Optimistic,
}
