//! The launched graphs of a request's current try, except the encoder's.

use tutti_proto::cluster::v1 as pb;

use crate::request::run::Run;

/// The launched graphs of the current try, except the encoder's.
#[derive(Debug)]
pub(super) enum Stage {
    Waiting,
    Reserving {
        decode: Run,
    },
    Prefilling {
        prefill: Run,
        decode: Run,
        /// Rows of the decode that arrived before the prefill's last row, because messages of two workers may overtake
        /// each other. These rows have at most the request's `max_tokens` tokens.
        early: Vec<pb::RowReport>,
    },
    Running {
        run: Run,
    },
}

/// Iterates over the runs of a stage. The items are `Run`, `&Run` or `&mut Run`, as the stage is passed by value, by
/// reference or by mutable reference.
macro_rules! runs_of {
    ($stage:expr) => {{
        let (first, second) = match $stage {
            Stage::Waiting => (None, None),
            Stage::Reserving { decode: run } | Stage::Running { run } => (Some(run), None),
            Stage::Prefilling { prefill, decode, .. } => (Some(prefill), Some(decode)),
        };
        first.into_iter().chain(second)
    }};
}

impl Stage {
    /// The run that receives the media's embeddings: the run of the prefill, or the run of the whole request.
    pub(super) fn prefilling(&self) -> Option<&Run> {
        match self {
            Self::Prefilling { prefill: run, .. } | Self::Running { run } => Some(run),
            Self::Waiting | Self::Reserving { .. } => None,
        }
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = &Run> {
        runs_of!(self)
    }

    pub(super) fn runs_mut(&mut self) -> impl Iterator<Item = &mut Run> {
        runs_of!(self)
    }

    pub(super) fn into_runs(self) -> impl Iterator<Item = Run> {
        runs_of!(self)
    }
}
