//! The pause before a worker is started again.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(30);
/// Minimum lifetime of a process whose end does not count as an early exit. After such a process, the pause is the
/// shortest one again.
pub const WELL: Duration = Duration::from_secs(10);

/// Computes the pause before a restart. The pause doubles with each early exit, up to a bound.
#[derive(Debug)]
pub struct Backoff {
    next: Duration,
    early_exits: u32,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { next: FIRST, early_exits: 0 }
    }
}

impl Backoff {
    /// The pause after a process that ran for `life`.
    pub fn after(&mut self, life: Duration) -> Duration {
        if life >= WELL {
            *self = Self::default();
        }
        self.early_exits += u32::from(life < WELL);
        let pause = self.next;
        self.next = (self.next * 2).min(LONGEST);
        pause
    }

    /// Number of consecutive processes that ended early.
    pub fn early_exits(&self) -> u32 {
        self.early_exits
    }
}

#[cfg(test)]
mod tests;
