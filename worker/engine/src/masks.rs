//! Masks of tokens, for output that follows a constraint.
//!
//! ```text
//! launch ──▶ open ────▶ pool: compile, replay ──▶ the request is admitted
//! commit ──▶ advance ─▶ pool: commit, mask ─────▶ awaited before the logits of the next step are enqueued
//! ```
//!
//! - [`guide`]: the constraint of one request, with its matcher and its next mask.
//! - [`budget`]: the limit of tokens inside a thinking block.
//! - [`pool`]: the threads that compile constraints and make masks.
//! - [`queues`]: their jobs, and the thread that takes each.
//! - [`environments`]: the vocabulary, prepared for masks.
//! - [`deadline`]: the time limit of one mask.
//! - [`memory`]: the limit of the memory of all matchers.
//!
//! Neither a commit nor a mask runs under the engine's lock or on the device's thread. The pool works beside the
//! forward of the next step. The device's thread waits for the masks behind the forward, for a short time only: a row
//! whose mask is late has no effect, and its request is left out of steps until the mask is ready. So is a request
//! whose last mask was slow. A slow grammar delays its own request, and no other one. A failure ends one request.
//!
//! A mask is a function of the constraint and of the output so far. So the tokens do not depend on lateness, batches,
//! preemption or replays.

mod budget;
mod deadline;
mod environments;
mod guide;
mod memory;
mod pool;
mod queues;
#[cfg(test)]
pub(crate) mod testing;

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use tutti_kernels::TokenMask;
use tutti_proto::GraphKey;
use tutti_runtime::{Error, ErrorKind};
use tutti_scheduler::{ConstraintFailure, FailureCause, NotSampled, Scheduler};

pub use self::environments::ReadVocabulary;
use self::{
    guide::Next,
    pool::MaskPool,
    queues::{Job, SLOW, Work},
};
pub(crate) use self::{
    guide::{Guide, Guided, NextMask},
    pool::PoolCounts,
};
use crate::Waker;

/// Time for which the device's thread waits for the masks of a step behind its forward.
pub(crate) const GRACE: Duration = Duration::from_millis(5);

/// The masks of all requests of an engine.
#[derive(Default)]
pub(crate) struct Masks {
    /// Reads the model's vocabulary; `None` if the engine has none.
    vocabulary: Option<ReadVocabulary>,
    waker: Waker,
    /// `None` until the first request with a constraint.
    pool: Option<MaskPool>,
    /// Requests that are left out of steps until their next mask is ready.
    awaited: HashMap<GraphKey, Guide>,
    /// Number of rows whose masks were late.
    late: u64,
    /// True if every request is left out of steps until its next mask is ready.
    awaits_all: bool,
}

/// Counts of masks for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MaskCounts {
    pub pool: PoolCounts,
    /// Requests that wait for a mask now.
    pub awaited: usize,
    pub late: u64,
}

impl Masks {
    pub fn set_vocabulary(&mut self, vocabulary: ReadVocabulary) {
        self.vocabulary = Some(vocabulary);
    }

    /// Sets the waker of the thread that plans.
    pub fn set_waker(&mut self, waker: Waker) {
        self.pool.iter().for_each(|pool| pool.set_waker(waker.clone()));
        self.waker = waker;
    }

    /// Leaves every request out of steps until its next mask is ready, because rows of the model cannot run again and
    /// would hold up the whole step.
    pub fn await_all(&mut self) {
        self.awaits_all = true;
    }

    /// Starts the pool, if it does not run yet. An error if this engine makes no masks.
    pub fn prepare(&mut self) -> Result<(), Error> {
        if self.pool.is_none() {
            let vocabulary = self.vocabulary.clone().ok_or_else(|| {
                let message = "needs a tokenizer, and this worker has none";
                Error::new(ErrorKind::Unsupported, message).with_field("constraint")
            })?;
            let pool = MaskPool::start(vocabulary, self.waker.clone())
                .map_err(|error| Error::internal(format!("cannot start threads for masks: {error}")))?;
            self.pool = Some(pool);
        }
        Ok(())
    }

    /// Compiles the constraint of an accepted request, which is left out of steps meanwhile.
    pub fn open(&mut self, guide: &Guide, generated: &[u32]) {
        guide.await_next();
        self.awaited.insert(guide.key(), guide.clone());
        self.push([Job::new(guide.clone(), Work::Open(generated.to_vec()))]);
    }

    /// Advances requests by committed tokens. A request whose last mask was slow is left out of steps until the next
    /// one is ready. So is every request of a model whose rows [cannot run again](Self::await_all). Any other one may
    /// have a row in a step whose forward runs before its mask can be made.
    pub fn advance(&mut self, tokens: Vec<(Guide, u32)>, scheduler: &mut Scheduler) {
        let mut jobs = Vec::with_capacity(tokens.len());
        for (guide, token) in tokens {
            let is_slow = self.awaits_all || guide.took_at_least(SLOW);
            // Otherwise the whole step would wait for the mask.
            scheduler.run_ahead(guide.key(), !is_slow);
            if !guide.begin_advance(token) {
                continue;
            }
            if is_slow {
                self.await_next(&guide, scheduler);
            }
            jobs.push(Job::new(guide, Work::Advance(token)));
        }
        self.push(jobs);
    }

    /// Advances a request by a token that another worker sampled, and leaves it out of steps until the next mask is
    /// ready.
    pub fn advance_imported(&mut self, guide: &Guide, token: u32, scheduler: &mut Scheduler) {
        if guide.begin_advance(token) {
            self.await_next(guide, scheduler);
            self.push([Job::new(guide.clone(), Work::Advance(token))]);
        }
    }

    /// Leaves a request out of steps until its next mask is ready, because the mask was late for a row.
    pub fn was_late(&mut self, guide: &Guide, scheduler: &mut Scheduler) {
        self.late += 1;
        self.await_next(guide, scheduler);
    }

    fn await_next(&mut self, guide: &Guide, scheduler: &mut Scheduler) {
        if guide.await_next() {
            scheduler.await_mask(guide.key());
            self.awaited.insert(guide.key(), guide.clone());
        }
    }

    /// Tells the scheduler of all requests whose next mask is no longer pending.
    pub fn tell(&mut self, scheduler: &mut Scheduler) {
        let Some(pool) = self.pool.as_ref().filter(|_| !self.awaited.is_empty()) else { return };
        for key in pool.take_events() {
            let Some(guide) = self.awaited.remove(&key) else { continue };
            match guide.next_or_await() {
                // A row in flight has sampled with the mask of the event, and the one behind its token is pending now.
                Next::Pending => {
                    self.awaited.insert(key, guide);
                }
                Next::Ready(_) => scheduler.mask_ready(key),
                Next::Complete => scheduler.complete_output(key),
                Next::Failed(why) => scheduler.fail_constraint(key, why),
            }
        }
    }

    /// True if a request is left out of steps until its next mask is ready.
    pub fn are_awaited(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// Blocks until a request that is left out of steps may go on.
    pub fn wait(&self) {
        self.pool.iter().for_each(MaskPool::wait_for_event);
    }

    /// Forgets a request that has ended.
    pub fn ended(&mut self, key: GraphKey) {
        self.awaited.remove(&key).iter().for_each(Guide::end);
        self.pool.iter().for_each(|pool| pool.forget(key));
    }

    pub fn counts(&self) -> MaskCounts {
        MaskCounts {
            pool: self.pool.as_ref().map(MaskPool::counts).unwrap_or_default(),
            awaited: self.awaited.len(),
            late: self.late,
        }
    }

    fn push(&self, jobs: impl IntoIterator<Item = Job>) {
        if let Some(pool) = &self.pool {
            pool.push(jobs);
        }
    }
}

/// True if a row may run again in a later step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rerun {
    /// The row writes the same planes again.
    Possible,
    /// The row would change its request's state in a slot a second time. The request is left out of steps until its
    /// mask is ready ([`Masks::await_all`]).
    Impossible,
}

/// The masks of a step's rows while they are collected. Rows with equal masks share the words.
pub(crate) struct StepMasks {
    until: Instant,
    shared: HashMap<u64, TokenMask>,
}

impl StepMasks {
    /// Begins to wait for masks, behind the forward.
    pub fn begin(grace: Duration) -> Self {
        Self { until: Instant::now() + grace, shared: HashMap::new() }
    }

    /// The mask of a row that samples the output's token `index`, or the reason for which no token is sampled.
    pub fn of(&mut self, guide: &Guide, index: usize, rerun: Rerun) -> Result<NextMask, NotSampled> {
        match guide.wait(index, self.until) {
            Next::Ready(mut next) => {
                if let Some(mask) = &mut next.mask {
                    let shared = self.shared.entry(next.hash).or_insert_with(|| mask.clone());
                    if shared == mask {
                        *mask = shared.clone();
                    }
                }
                Ok(next)
            }
            Next::Complete => Err(NotSampled::Complete),
            Next::Failed(why) => Err(NotSampled::ConstraintFailed(why)),
            Next::Pending if rerun == Rerun::Possible => Err(NotSampled::Late),
            Next::Pending => Err(NotSampled::ConstraintFailed(ConstraintFailure {
                cause: FailureCause::Worker,
                why: "a row that cannot run again has no mask".to_owned(),
            })),
        }
    }
}

#[cfg(test)]
mod tests;
