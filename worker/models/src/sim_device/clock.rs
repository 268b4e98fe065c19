//! The timeline of simulated steps. A step begins when it is enqueued or when the step before it ends, whichever is
//! later.

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use tutti_kernels::RowInputs;
use tutti_settings::{SimCosts, SimSettings};

use super::digest;

/// The time that a simulated device has spent so far, readable from any thread.
#[derive(Debug, Default)]
pub struct SimMeter {
    busy_ns: AtomicU64,
    idle_ns: AtomicU64,
}

impl SimMeter {
    /// Time spent in steps.
    pub fn busy(&self) -> Duration {
        Duration::from_nanos(self.busy_ns.load(Ordering::Relaxed))
    }

    /// Time between the end of one step and the beginning of the next, summed over all steps.
    pub fn idle(&self) -> Duration {
        Duration::from_nanos(self.idle_ns.load(Ordering::Relaxed))
    }
}

/// Number of times that a slow step takes as long as it should, at most.
const MOST_TIMES: u32 = 1000;

/// The timeline of one device.
pub struct SimClock {
    costs: SimCosts,
    jitter_percent: u32,
    /// Time between a step's end and the moment at which the host can notice the end.
    late: Duration,
    /// File that names slow ranks; see `SimSettings`.
    slow_file: Option<PathBuf>,
    rank: u32,
    /// State of the random numbers for the jitter.
    random: u64,
    /// End of the last enqueued step.
    last_end: Option<Instant>,
    meter: Arc<SimMeter>,
}

impl SimClock {
    /// Returns the clock of one worker. Workers of different ranks have different jitter.
    pub fn new(settings: &SimSettings, rank: u32) -> Self {
        Self {
            costs: settings.costs(),
            jitter_percent: settings.jitter_percent,
            late: Duration::from_micros(settings.late_us.into()),
            slow_file: settings.slow_file.clone(),
            rank,
            random: digest::extend(settings.seed, rank),
            last_end: None,
            meter: Arc::default(),
        }
    }

    /// Returns the meter of this device's time.
    pub fn meter(&self) -> &Arc<SimMeter> {
        &self.meter
    }

    /// Enqueues a step of these rows, padded by `padding` tokens. Returns the time from which the host can notice the
    /// step's end.
    pub fn enqueue(&mut self, rows: &[RowInputs<'_>], padding: usize) -> Instant {
        let (now, took) = (Instant::now(), self.step_time(rows, padding) * self.times_slower());
        let begin = self.last_end.map_or(now, |end| end.max(now));
        let idle = self.last_end.map_or(Duration::ZERO, |end| begin - end);
        self.last_end = Some(begin + took);
        let ns = |time: Duration| time.as_nanos() as u64;
        self.meter.busy_ns.fetch_add(ns(took), Ordering::Relaxed);
        self.meter.idle_ns.fetch_add(ns(idle), Ordering::Relaxed);
        begin + took + self.late
    }

    /// Returns the duration of a step with these rows, jitter included. A padding token costs as much as a prefill
    /// token without attention.
    pub fn step_time(&mut self, rows: &[RowInputs<'_>], padding: usize) -> Duration {
        let padding = padding as u64 * u64::from(self.costs.prefill_ns_per_token);
        let rows = rows.iter().map(|row| self.row_ns(row)).sum::<u64>();
        let exact = u64::from(self.costs.fixed_us) * 1000 + rows + padding;
        if self.jitter_percent == 0 {
            return Duration::from_nanos(exact);
        }
        self.random = digest::extend(self.random, 0);
        // A random share of the maximum jitter, in 1/100,000 of the exact time.
        let share = self.random % 1001 * u64::from(self.jitter_percent);
        Duration::from_nanos(exact + (u128::from(exact) * u128::from(share) / 100_000) as u64)
    }

    /// Returns the number of times that a step now takes as long as it should. Lines that cannot be read count as
    /// absent.
    fn times_slower(&self) -> u32 {
        let Some(lines) = self.slow_file.as_ref().and_then(|file| fs::read_to_string(file).ok()) else {
            return 1;
        };
        let pairs = lines.lines().filter_map(|line| line.split_once(' '));
        let mut own = pairs.filter(|(rank, _)| rank.parse() == Ok(self.rank));
        own.find_map(|(_, times)| times.trim().parse().ok()).unwrap_or(1).min(MOST_TIMES)
    }

    /// Returns the nanoseconds that a request's row adds to a step. A row of one token costs as much as a decode, even
    /// if its token belongs to a prompt.
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

/// Waits until `end`, but at most until `until`. Calls `pause` at intervals of `until_pause`. Returns false if it stops
/// before `end`.
pub fn wait<E>(
    end: Instant,
    until: Option<Instant>,
    until_pause: Duration,
    mut pause: impl FnMut() -> Result<(), E>,
) -> Result<bool, E> {
    let wake = until.map_or(end, |until| until.min(end));
    // A sleep may end late because of the kernel's timer slack, but never early, so the loop needs no margin.
    while let Some(left) = wake.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        thread::sleep(left.min(until_pause));
        pause()?;
    }
    Ok(wake == end)
}

/// Simulates a device that hangs: never returns.
pub fn hang() -> ! {
    loop {
        thread::park();
    }
}
