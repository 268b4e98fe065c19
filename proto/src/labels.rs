//! The words that show values of the cluster's protocol to operators.

use crate::cluster::v1::{WorkerPhase, WorkerRole};

impl WorkerPhase {
    /// Returns one lower-case word for tables and JSON.
    pub fn label(self) -> &'static str {
        match self {
            Self::Unspecified => "unknown",
            Self::Starting => "starting",
            Self::Loading => "loading",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Gone => "gone",
            Self::Drained => "drained",
        }
    }
}

impl WorkerRole {
    /// Returns one lower-case word for tables and JSON.
    pub fn label(self) -> &'static str {
        match self {
            Self::Unspecified => "unknown",
            Self::WholeRequest => "whole",
            Self::PrefillApart => "prefill",
            Self::DecodeApart => "decode",
            Self::EncoderApart => "encode",
        }
    }
}
