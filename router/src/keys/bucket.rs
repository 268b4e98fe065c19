//! A token bucket: an amount per minute, of which up to a minute's worth can be saved.

use std::time::{Duration, Instant};

/// Seconds in the unit of all limits.
const MINUTE: f64 = 60.0;

/// The part of a minute's amount that is left, as a fraction. It is negative after more was used than was left. A
/// fraction stays meaningful when the limit changes.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    left: f64,
    since: Instant,
}

impl Bucket {
    /// A bucket with the whole amount.
    pub fn full(now: Instant) -> Self {
        Self { left: 1.0, since: now }
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.since).as_secs_f64();
        self.left = (self.left + passed / MINUTE).min(1.0);
        self.since = now;
    }

    /// Takes one from the bucket, or returns the time until there is one.
    pub fn take_one(&mut self, per_minute: u32, now: Instant) -> Result<(), Duration> {
        self.refill(now);
        let one = 1.0 / f64::from(per_minute.max(1));
        // Sums of fractions differ from the exact value in the last bits.
        if self.left + 1e-9 < one {
            return Err(Duration::from_secs_f64((one - self.left) * MINUTE));
        }
        self.left -= one;
        Ok(())
    }

    /// Returns the time until the bucket has anything, if it has nothing now.
    pub fn is_positive(&mut self, per_minute: u32, now: Instant) -> Result<(), Duration> {
        self.refill(now);
        if self.left > 0.0 {
            return Ok(());
        }
        let one = 1.0 / f64::from(per_minute.max(1));
        Err(Duration::from_secs_f64((one - self.left) * MINUTE))
    }

    /// Takes an amount that may be used, or returns the time until there is enough. An amount over a minute's worth is
    /// taken from a full bucket, which then has less than nothing.
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

    /// Gives back what was taken and not used.
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
