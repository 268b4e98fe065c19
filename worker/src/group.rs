//! A rank's way into its TP group.

use std::{path::PathBuf, time::Duration};

use tutti_engine::{EngineSettings, kv_pages};
use tutti_kernels::collective::{Collective, Seat, SharedMemory};
use tutti_models::{Model, lockstep};
use tutti_proto::cluster::v1 as pb;
use tutti_runtime::Error;

/// How long a rank waits for others that are still starting.
const STARTING: Duration = Duration::from_secs(60);
/// How long it waits for others that still load. The death of one is seen by the conductor long before.
const LOADING: Duration = Duration::from_secs(3600);

/// What the conductor has said of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Formation {
    seat: Seat,
    meeting_place: PathBuf,
    /// Of each collective.
    deadline: Duration,
}

impl Formation {
    /// The group of the conductor's message, whose collectives have this deadline.
    pub fn new(message: pb::FormGroup, deadline: Duration) -> Self {
        let seat = Seat { rank: message.rank as usize, size: message.size as usize };
        Self { seat, meeting_place: message.meeting_place.into(), deadline }
    }

    /// Whether this rank decides for the others.
    pub fn leads(&self) -> bool {
        self.seat.leads()
    }

    /// The group that the device computes with. All ranks have been told to come.
    pub fn for_device(&self) -> Result<Box<dyn Collective>, Error> {
        self.meet("data", STARTING)
    }

    /// The group on which the leader's plans travel, once all ranks have loaded.
    fn for_plans(&self) -> Result<Box<dyn Collective>, Error> {
        self.meet("plans", LOADING)
    }

    fn meet(&self, what: &str, patience: Duration) -> Result<Box<dyn Collective>, Error> {
        let path = self.meeting_place.with_extension(what);
        let group = SharedMemory::meet(&path, self.seat, patience, self.deadline)
            .map_err(|e| Error::internal(format!("cannot form a group of {}: {e}", self.seat.size)))?;
        let Seat { rank, size } = self.seat;
        tracing::debug!(rank, size, transport = group.transport(), what, "group formed");
        Ok(Box::new(group))
    }

    /// Waits until all ranks have loaded, and agrees with them on the KV pages that each of them has room for.
    pub fn join(&self, model: Box<dyn Model>, settings: &EngineSettings) -> Result<Member, Error> {
        let mut plans = self.for_plans()?;
        let pages = kv_pages(&*model, settings)? as u64;
        let mut all = Vec::new();
        plans
            .all_gather(&pages.to_le_bytes(), &mut all)
            .map_err(|e| Error::internal(format!("cannot agree on KV pages: {e}")))?;
        let least = all.as_chunks::<8>().0.iter().map(|pages| u64::from_le_bytes(*pages)).min();
        Ok(Member { model, plans, pages: least.unwrap_or(pages) as usize })
    }
}

/// A rank whose group is complete.
pub struct Member {
    model: Box<dyn Model>,
    plans: Box<dyn Collective>,
    pages: usize,
}

impl Member {
    /// KV pages of every rank, the null page included.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// This rank's part.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// Leads: the whole group as one model, and settings with the pool that all have room for.
    pub fn lead(self, mut settings: EngineSettings) -> (Box<dyn Model>, EngineSettings) {
        settings.kv_cache_memory = Some(self.pages as u64 * self.model.page_bytes() as u64);
        (Box::new(lockstep::Leader::new(self.model, self.plans)), settings)
    }

    /// Follows until the leader leaves; `ran` is told how many forwards there have been.
    pub fn follow(mut self, ran: impl FnMut(u64)) -> Result<(), Error> {
        lockstep::follow(&mut *self.model, &mut *self.plans, ran)
            .map_err(|e| Error::internal(format!("this rank cannot follow its leader any more: {e}")))
    }
}
