//! A token bucket: it refills by a given amount per minute, and holds at most one minute's amount.

use std::time::{Duration, Instant};

/// Seconds per minute. All limits are amounts per minute.
const MINUTE: f64 = 60.0;

/// The amount left, as a fraction of one minute's amount. The fraction is negative if more was used than was left. It
/// stays meaningful when the limit changes.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    left: f64,
    since: Instant,
}

impl Bucket {
    /// Creates a full bucket.
    pub fn full(now: Instant) -> Self {
        Self { left: 1.0, since: now }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.since).as_secs_f64();
        self.left = (self.left + passed / MINUTE).min(1.0);
        self.since = now;
    }

    /// Takes one unit, or returns the time until one unit is left.
    pub fn take_one(&mut self, per_minute: u32, now: Instant) -> Result<(), Duration> {
        self.refill(now);
        let one = 1.0 / f64::from(per_minute.max(1));
        // The tolerance covers rounding errors in sums of fractions.
        if self.left + 1e-9 < one {
            return Err(Duration::from_secs_f64((one - self.left) * MINUTE));
        }
        self.left -= one;
        Ok(())
    }

    /// Returns `Ok` if the bucket is not empty, or the time until it has one unit.
    pub fn is_positive(&mut self, per_minute: u32, now: Instant) -> Result<(), Duration> {
        self.refill(now);
        if self.left > 0.0 {
            return Ok(());
        }
        let one = 1.0 / f64::from(per_minute.max(1));
        Err(Duration::from_secs_f64((one - self.left) * MINUTE))
    }

    /// Takes an amount in advance, or returns the time until enough is left. More than one minute's amount can be taken
    /// only from a full bucket, which becomes negative.
    pub fn reserve(&mut self, amount: u64, per_minute: u32, now: Instant) -> Result<(), Duration> {
        self.refill(now);
        let part = amount as f64 / f64::from(per_minute.max(1));
        let needed = part.min(1.0);
        if self.left + 1e-9 < needed {
            return Err(Duration::from_secs_f64((needed - self.left) * MINUTE));
        }
        self.left -= part;
        Ok(())
    }

    /// Puts an unused amount back into the bucket.
    pub fn give_back(&mut self, amount: u64, per_minute: u32, now: Instant) {
        self.refill(now);
        self.left = (self.left + amount as f64 / f64::from(per_minute.max(1))).min(1.0);
    }

    /// Takes an amount that was used, even if less is left.
    pub fn charge(&mut self, amount: u64, per_minute: u32, now: Instant) {
        self.refill(now);
        self.left -= amount as f64 / f64::from(per_minute.max(1));
    }
}

#[cfg(test)]
mod tests;
