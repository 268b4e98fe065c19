//! The time that a simulated step takes.

use std::{
    thread,
    time::{Duration, Instant},
};

use tutti_kernels::RowInputs;
use tutti_settings::{SimCosts, SimSettings};

use super::digest;

/// A clock that makes the engine's thread wait for as long as the device would compute.
pub struct SimClock {
    costs: SimCosts,
    jitter_percent: u32,
    /// State of the random numbers of the jitter.
    random: u64,
}

impl SimClock {
    /// Returns the clock of one worker; `rank` makes the jitter of workers differ.
    pub fn new(settings: &SimSettings, rank: u32) -> Self {
        let random = digest::extend(settings.seed, rank);
        Self { costs: settings.costs(), jitter_percent: settings.jitter_percent, random }
    }

    /// Waits as long as a step with these rows takes, and calls `pause` at intervals of `until_pause`.
    pub fn pass<E>(
        &mut self,
        rows: &[RowInputs<'_>],
        until_pause: Duration,
        mut pause: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let end = Instant::now() + self.step_time(rows);
        // A sleep may end late, by the kernel's timer slack, but never early.
        while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            thread::sleep(left.min(until_pause));
            pause()?;
        }
        Ok(())
    }

    /// Returns the duration of a step with these rows, jitter included.
    pub fn step_time(&mut self, rows: &[RowInputs<'_>]) -> Duration {
        let exact =
            u64::from(self.costs.fixed_us) * 1000 + rows.iter().map(|row| self.row_ns(row)).sum::<u64>();
        if self.jitter_percent == 0 {
            return Duration::from_nanos(exact);
        }
        self.random = digest::extend(self.random, 0);
        // A random share of the maximum jitter, in units of 1/100,000 of the exact time.
        let share = self.random % 1001 * u64::from(self.jitter_percent);
        Duration::from_nanos(exact + (u128::from(exact) * u128::from(share) / 100_000) as u64)
    }

    /// Returns the nanoseconds that a request's row adds to a step. A row of one token costs as much as a decode, even
    /// if the token is the end of a prompt.
    fn row_ns(&self, row: &RowInputs<'_>) -> u64 {
        let (tokens, start) = (row.tokens as u64, row.start as u64);
        let attended = tokens * start + tokens * (tokens + 1) / 2;
        let (own, attention) = match tokens {
            1 => (self.costs.decode_ns_per_row, self.costs.decode_ns_per_attended_token),
            _ => (self.costs.prefill_ns_per_token, self.costs.prefill_ns_per_attended_token),
        };
        tokens * u64::from(own) + attended * u64::from(attention)
    }
}

/// Simulates a device that hangs: never returns.
pub fn hang() -> ! {
    loop {
        thread::park();
    }
}
