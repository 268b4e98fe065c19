//! The words by which operators see values of the cluster's protocol.

use crate::cluster::v1::{WorkerPhase, WorkerRole};

impl WorkerPhase {
    /// One lower-case word for tables and JSON.
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
    /// One lower-case word for tables and JSON.
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
