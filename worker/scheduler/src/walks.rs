//! A model's walks as the scheduler sees them: by kind, never by name.

use tutti_proto::declaration::{ModelDeclaration, WalkId, WalkKind};
use tutti_settings::Chunking;

use crate::{config::ConfigError, launch::Refusal, request::Cut};

/// The kind of each walk, with the chunking policy that applies to it.
#[derive(Debug)]
pub(crate) struct Walks {
    kinds: Vec<WalkKind>,
    chunking: Chunking,
}

impl Walks {
    pub fn new(model: &ModelDeclaration, chunking: Chunking) -> Result<Self, ConfigError> {
        let kinds: Vec<WalkKind> = model.walks().iter().map(|walk| walk.kind).collect();
        if !kinds.contains(&WalkKind::Mixed) {
            return Err(ConfigError::NoMixedWalk);
        }
        Ok(Self { kinds, chunking })
    }

    fn kind(&self, walk: WalkId) -> Option<WalkKind> {
        self.kinds.get(walk.0 as usize).copied()
    }

    /// The positions at which a prefill under this walk may be cut. An error if the walk is no prefill.
    pub fn cut(&self, walk: WalkId) -> Result<Cut, Refusal> {
        match (self.kind(walk), self.chunking) {
            (Some(WalkKind::Chunkable { .. }), Chunking::Scheduler) => Ok(Cut::Anywhere),
            (Some(WalkKind::Chunkable { .. }), Chunking::Engine | Chunking::Off) => Ok(Cut::BeforeOnly),
            (Some(WalkKind::Atomic { .. }), _) => Ok(Cut::Nowhere),
            _ => Err(Refusal::WrongWalk { walk, wanted: "a prefill" }),
        }
    }

    pub fn is_decode(&self, walk: WalkId) -> bool {
        matches!(self.kind(walk), Some(WalkKind::Decode { .. }))
    }

    /// The walk that recomputes sampled tokens after a prefill that ended under `last`: `last` itself if it is
    /// chunkable, else a chunkable walk that the same mixed walk batches. Returns `last` if there is no such walk.
    pub fn recompute(&self, last: WalkId) -> WalkId {
        let chunkable =
            |walk: WalkId| self.kind(walk).filter(|kind| matches!(kind, WalkKind::Chunkable { .. }));
        if chunkable(last).is_some() {
            return last;
        }
        let mixed = self.batched_by(last);
        (0..self.kinds.len() as u32)
            .map(WalkId)
            .find(|&walk| chunkable(walk).is_some_and(|kind| kind.batched_by() == mixed))
            .unwrap_or(last)
    }

    /// The mixed walk that batches this walk. Only rows with the same mixed walk share a step.
    pub fn batched_by(&self, walk: WalkId) -> Option<WalkId> {
        self.kind(walk).and_then(WalkKind::batched_by)
    }

    /// The walk that a step runs as, given the walks of its rows. If all rows are decodes of one walk, this is that
    /// decode walk, so that a device can use graphs that it captured for decodes. Otherwise it is `mixed`.
    pub fn batch_walk(&self, mixed: WalkId, mut rows: impl Iterator<Item = WalkId>) -> WalkId {
        match rows.next() {
            Some(first) if self.is_decode(first) && rows.all(|walk| walk == first) => first,
            _ => mixed,
        }
    }
}
