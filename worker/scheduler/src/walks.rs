//! A model's walks as the scheduler sees them: by kind, never by name.

use tutti_proto::walks::{ModelDeclaration, WalkId, WalkKind};

use crate::{config::ConfigError, launch::Refusal, request::Cut};

#[derive(Debug)]
pub(crate) struct Walks {
    kinds: Vec<WalkKind>,
    mixed: WalkId,
}

impl Walks {
    pub fn new(model: &ModelDeclaration) -> Result<Self, ConfigError> {
        let kinds: Vec<WalkKind> = model.walks().iter().map(|walk| walk.kind).collect();
        let mut mixed = (0..).map(WalkId).zip(&kinds).filter(|(_, kind)| **kind == WalkKind::Mixed);
        match (mixed.next(), mixed.next()) {
            (Some((mixed, _)), None) => Ok(Self { kinds, mixed }),
            _ => Err(ConfigError::NotOneMixedWalk),
        }
    }

    /// Where a prefill under this walk may be cut.
    pub fn cut(&self, walk: WalkId) -> Result<Cut, Refusal> {
        match self.kinds.get(walk.0 as usize) {
            Some(WalkKind::Chunkable { .. }) => Ok(Cut::Anywhere),
            Some(WalkKind::Atomic { .. }) => Ok(Cut::Nowhere),
            _ => Err(Refusal::WrongWalk { walk, wanted: "a prefill" }),
        }
    }

    pub fn is_decode(&self, walk: WalkId) -> bool {
        matches!(self.kinds.get(walk.0 as usize), Some(WalkKind::Decode { .. }))
    }

    /// What a step of rows of these walks is run as: a decode walk itself when every row is of it, so that captured
    /// decode graphs are met; else the mixed walk.
    pub fn batch_walk(&self, mut rows: impl Iterator<Item = WalkId>) -> WalkId {
        match rows.next() {
            Some(first) if self.is_decode(first) && rows.all(|walk| walk == first) => first,
            _ => self.mixed,
        }
    }
}
