//! The jobs of the pool, and the order in which its threads take them.
//!
//! There are four kinds of jobs:
//!
//! - `quick`: a token of a request whose last mask was quick.
//! - `known`: the first mask of a constraint that has been compiled before.
//! - `slow`: a compilation, or a token of a request whose last mask was slow.
//! - `replays`: parts of the output of an earlier incarnation. A replay waits behind all other replays after each part.
//!
//! One thread takes quick jobs only, and one takes the four kinds in turn, so that none waits for ever. A job may turn
//! out slow although the request's last mask was quick. So a third thread takes quick jobs that have waited for
//! [`SLOW`].

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use tutti_proto::GraphKey;

use super::guide::Guide;

/// Duration of a job from which on the next job of the same request is a slow one.
pub(super) const SLOW: Duration = Duration::from_millis(2);

/// Work for one guide.
pub(super) struct Job {
    pub guide: Guide,
    pub work: Work,
    queued: Instant,
}

pub(super) enum Work {
    /// Compile the constraint, and advance by the output of earlier incarnations.
    Open(Vec<u32>),
    /// Go on with a replay.
    Replay(Replay),
    /// Advance by one token.
    Advance(u32),
}

/// The output of earlier incarnations, and the number of its tokens that the matcher is behind.
pub(super) struct Replay {
    pub tokens: Vec<u32>,
    pub done: usize,
}

impl Job {
    pub fn new(guide: Guide, work: Work) -> Self {
        Self { guide, work, queued: Instant::now() }
    }
}

/// The jobs that a thread takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Takes {
    Quick,
    /// Quick jobs that have waited for [`SLOW`].
    Overdue,
    All,
}

#[derive(Default)]
pub(super) struct Queues {
    pub quick: VecDeque<Job>,
    pub known: VecDeque<Job>,
    pub slow: VecDeque<Job>,
    pub replays: VecDeque<Job>,
    /// Number of jobs that the thread for all kinds has taken.
    pub taken: usize,
    pub is_closed: bool,
}

impl Queues {
    /// Queues a job. `has_compiled` tells whether a constraint has been compiled before.
    pub fn push(&mut self, job: Job, has_compiled: impl Fn(&Guide) -> bool) {
        let queue = match &job.work {
            Work::Open(generated) if !generated.is_empty() => &mut self.replays,
            Work::Open(_) if has_compiled(&job.guide) => &mut self.known,
            Work::Replay(_) => &mut self.replays,
            Work::Advance(_) if !job.guide.took_at_least(SLOW) => &mut self.quick,
            Work::Open(_) | Work::Advance(_) => &mut self.slow,
        };
        queue.push_back(job);
    }

    /// Takes a job. If there is none, returns the time after which there may be one, if it is known.
    pub fn take(&mut self, takes: Takes, now: Instant) -> Result<Job, Option<Duration>> {
        match takes {
            Takes::Quick => self.quick.pop_front().ok_or(None),
            Takes::Overdue => {
                let front = self.quick.front().ok_or(None)?;
                match SLOW.saturating_sub(now.saturating_duration_since(front.queued)) {
                    Duration::ZERO => self.quick.pop_front().ok_or(None),
                    left => Err(Some(left)),
                }
            }
            Takes::All => self.pop().ok_or(None),
        }
    }

    /// Takes a job of any kind. Every second one is a quick one, if there is one, and the other kinds take turns.
    fn pop(&mut self) -> Option<Job> {
        let Self { quick, known, slow, replays, taken, .. } = self;
        let order = match *taken % 6 {
            1 => [known, slow, replays, quick],
            3 => [slow, replays, known, quick],
            5 => [replays, known, slow, quick],
            _ => [quick, known, slow, replays],
        };
        let job = order.into_iter().find_map(VecDeque::pop_front);
        *taken = taken.wrapping_add(usize::from(job.is_some()));
        job
    }

    /// Removes the job of a request that has ended.
    pub fn remove(&mut self, key: GraphKey) -> Option<Job> {
        let Self { quick, known, slow, replays, .. } = self;
        [quick, known, slow, replays].into_iter().find_map(|queue| {
            let index = queue.iter().position(|job| job.guide.key() == key)?;
            queue.remove(index)
        })
    }
}

#[cfg(test)]
mod tests;
