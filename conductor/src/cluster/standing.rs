//! A worker's standing among its peers: it gets requests like them, is set aside because it is slow, or is tried again.
//!
//! A worker that is slow again soon after it was tried stays aside for twice as long as the last time. While it is
//! tried, its turn for a second request comes after its peers', so a worker that stays slow delays few requests.
//!
//! All times are the watchdog's.

use std::time::Duration;

/// Time over which a worker's steps must be slow before the worker is set aside, so that a burst of other work on its
/// machine is not enough.
const SUSTAINED: Duration = Duration::from_secs(3);
/// Number of times that the pause of a worker doubles.
const DOUBLINGS: u32 = 4;

/// A worker's standing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Standing {
    /// The worker gets requests like its peers.
    #[default]
    Usual,
    /// The worker is slow and gets no new requests.
    Aside { pace: f64, until: Duration },
    /// The worker gets a request only if it has none.
    Tried { since: Duration, until: Duration },
}

/// Order in which placement considers workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Turn {
    Usual,
    /// The worker is tried again, and has a request already.
    AfterUsual,
    /// The worker is set aside.
    Last,
}

/// A worker's standing, and what decides on the next one.
#[derive(Debug, Default)]
pub struct Record {
    standing: Standing,
    /// Time of the newest step at the first of the latest comparisons that have all found the worker slow.
    slow_since: Option<Duration>,
    /// The last time for which the worker was set aside.
    pause: Option<Duration>,
    /// Time at which the worker was tried again.
    tried_at: Duration,
}

/// The result of comparing a worker with its peers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Finding {
    /// The steps were too few, or no peer had such steps.
    Nothing,
    Sound,
    /// The steps take this many times as long as the peers', at least.
    Slow(f64),
}

impl Record {
    /// True if the worker gets requests like its peers.
    pub fn is_usual(&self) -> bool {
        self.standing == Standing::Usual
    }

    /// True if the worker gets no new requests while its peers can take them.
    pub fn is_aside(&self) -> bool {
        matches!(self.standing, Standing::Aside { .. })
    }

    /// The pace for which the worker is set aside, if it is.
    pub fn aside_at(&self) -> Option<f64> {
        match self.standing {
            Standing::Aside { pace, .. } => Some(pace),
            _ => None,
        }
    }

    /// The worker's turn for a further request. `held` is the number of requests that it holds.
    pub fn turn(&self, held: u64) -> Turn {
        match self.standing {
            Standing::Usual => Turn::Usual,
            Standing::Tried { .. } if held == 0 => Turn::Usual,
            Standing::Tried { .. } => Turn::AfterUsual,
            Standing::Aside { .. } => Turn::Last,
        }
    }

    /// Records a comparison. `newest` is the time of the worker's newest step. Returns the pace for which the worker is
    /// to be set aside.
    ///
    /// Only steps prolong slowness: a worker that has been idle since a burst of slow steps is not slow for longer.
    pub fn note(&mut self, finding: Finding, newest: Option<Duration>, now: Duration) -> Option<f64> {
        let (Finding::Slow(pace), Some(newest)) = (finding, newest) else {
            self.slow_since = None;
            if let Standing::Tried { since, until } = self.standing
                && (now >= until || (finding == Finding::Sound && now >= since + SUSTAINED))
            {
                self.standing = Standing::Usual;
            }
            return None;
        };
        let since = *self.slow_since.get_or_insert(newest);
        (!self.is_aside() && newest >= since + SUSTAINED).then_some(pace)
    }

    /// Sets the worker aside, for `pause` or longer if it was tried again not long ago.
    pub fn set_aside(&mut self, pace: f64, pause: Duration, now: Duration) {
        let pause = match self.pause {
            Some(last) if now < self.tried_at + last => (2 * last).min(pause * (1 << DOUBLINGS)),
            _ => pause,
        };
        self.pause = Some(pause);
        self.slow_since = None;
        self.standing = Standing::Aside { pace, until: now + pause };
    }

    /// True if the worker's time aside is over.
    pub fn is_due(&self, now: Duration) -> bool {
        matches!(self.standing, Standing::Aside { until, .. } if now >= until)
    }

    /// Ends the worker's time aside.
    pub fn try_again(&mut self, now: Duration) {
        self.slow_since = None;
        self.tried_at = now;
        self.standing = Standing::Tried { since: now, until: now + self.pause.unwrap_or_default() };
    }

    /// Description for operators; empty for a worker of usual standing.
    pub fn describe(&self, now: Duration) -> String {
        match self.standing {
            Standing::Usual => String::new(),
            Standing::Aside { pace, until } => {
                let left = until.saturating_sub(now).as_secs();
                format!(
                    "slow: its steps take at least {pace:.1} times as long as those of its peers; tried again in {left} s"
                )
            }
            Standing::Tried { .. } => {
                "was slow: is tried with one request at a time while its peers can take the others".into()
            }
        }
    }
}

#[cfg(test)]
mod tests;
