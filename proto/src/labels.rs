//! Labels of protocol values, for operators.

use crate::cluster::v1::{WorkerPhase, WorkerRole};

impl WorkerPhase {
    /// Returns one lower-case word for the phase, for tables and JSON.
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
    /// Returns one lower-case word for the role, for tables and JSON.
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
