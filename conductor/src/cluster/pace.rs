//! Pace: the time of a worker's steps beside the steps of its peers.
//!
//! The time of a step is a sum of parts. Each part is constant, or grows in proportion to the tokens of the step, to
//! the tokens that it samples, or to the tokens that it attends to. A step with at most `f` times as much of each as a
//! peer's step therefore takes at most `f` times as long on an equal worker. Each step is compared with this bound, so
//! that a worker does not look slow because its requests are more or longer. Only recent steps are compared, so that a
//! machine that is slower for all its workers makes none of them slow.
//!
//! All times are the watchdog's: the sum of its ticks.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use tutti_proto::cluster::v1 as pb;
use tutti_settings::FaultSettings;

/// Age beyond which a step is not compared, unless the step itself was long.
const CURRENT: Duration = Duration::from_secs(30);
/// Number of times that a step's own duration adds to the age up to which the step is compared. It is more than `FEW`,
/// so that some steps are compared however long they are.
const OWN_TIMES: u32 = 4;
/// Time that every step counts at least, in microseconds: below it, differences are the scheduling of processes.
const SHORTEST_US: u32 = 5_000;
/// Time of steps that is enough to compare a worker whose steps are too long to be as many as the setting says.
const LONG: Duration = Duration::from_secs(10);
/// Number of steps below which no worker is compared.
const FEW: usize = 3;
/// One step in so many, the slowest, does not count, so that a long pause now and then does not make a worker slow.
const PAUSES: usize = 16;
/// A step counts at most this many times `slow_worker_ratio`.
const MOST: f64 = 16.0;
/// Paces below this one are equal to placement, because they depend on chance.
const LIKE: f64 = 2.0;
/// Number of a peer's steps of one class from which on their median counts.
const ENOUGH: usize = 4;

/// The amount of work in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size {
    walk: u32,
    /// Number of tokens, padding included.
    tokens: u64,
    /// Number of rows that sample a token.
    sampled: u64,
    /// Sum over the tokens of the number of tokens that each attends to.
    attended: u64,
}

/// Steps of one walk whose numbers are equal up to a factor of two: binary logarithms of the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Class {
    walk: u32,
    tokens: u32,
    sampled: u32,
    attended: u32,
}

impl Size {
    fn of(walk: u32, work: &pb::StepWork) -> Self {
        Self {
            walk,
            tokens: u64::from(work.tokens) + u64::from(work.padding_tokens),
            sampled: u64::from(work.decode_rows) + u64::from(work.last_prefill_rows),
            attended: work.attended_tokens,
        }
    }

    fn class(self) -> Class {
        let log = |number: u64| number.checked_ilog2().map_or(0, |log| log + 1);
        let Self { walk, tokens, sampled, attended } = self;
        Class { walk, tokens: log(tokens), sampled: log(sampled), attended: log(attended) }
    }

    /// Upper bound of this step's time divided by the time of a step of the other size.
    fn times(self, other: Self) -> f64 {
        let times = |own: u64, other: u64| own as f64 / other.max(1) as f64;
        times(self.tokens, other.tokens)
            .max(times(self.sampled, other.sampled))
            .max(times(self.attended, other.attended))
            .max(1.0)
    }

    /// The mean of the sizes of steps of one walk. `None` if there are no steps.
    fn mean(steps: &[Step]) -> Option<Self> {
        let mean = |number: fn(&Self) -> u64| {
            // The numbers come from workers, so that a sum of them may not fit in 64 bits.
            let sum: u128 = steps.iter().map(|step| u128::from(number(&step.size))).sum();
            (sum / steps.len().max(1) as u128) as u64
        };
        Some(Self {
            walk: steps.first()?.size.walk,
            tokens: mean(|size| size.tokens),
            sampled: mean(|size| size.sampled),
            attended: mean(|size| size.attended),
        })
    }
}

#[derive(Clone, Copy, Debug)]
struct Step {
    size: Size,
    us: u32,
    at: Duration,
}

/// The last steps of one worker.
#[derive(Debug, Default)]
pub struct Steps(VecDeque<Step>);

/// Median times of a worker's current steps in microseconds, by class, each with the mean size of the steps.
#[derive(Debug, Default)]
pub struct Medians(BTreeMap<Class, (Size, u32)>);

impl Medians {
    /// Upper bound of the time of a step of this size on this worker, in microseconds. `None` if the worker has had no
    /// steps of the same walk.
    fn bound(&self, size: Size) -> Option<f64> {
        let alike = self.0.values().filter(|(other, _)| other.walk == size.walk);
        alike.map(|(other, us)| f64::from(*us) * size.times(*other)).min_by(f64::total_cmp)
    }
}

/// The rule by which a worker is slow.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Steps that take at least this many times as long as the peers' are slow; `None` if no worker is ever slow.
    ratio: Option<f64>,
    /// Number of steps that are compared.
    steps: usize,
}

impl Rule {
    pub fn of(settings: &FaultSettings) -> Self {
        let ratio = (settings.slow_worker_ratio > 0).then(|| settings.slow_worker_ratio.into());
        Self { ratio, steps: settings.slow_worker_steps as usize }
    }

    /// True if a worker of this pace is far off its peers.
    pub fn is_slow(&self, pace: f64) -> bool {
        self.ratio.is_some_and(|ratio| pace >= ratio)
    }
}

impl Steps {
    /// Keeps a step that is reported at `now`.
    pub fn take(&mut self, report: &pb::StepReport, rule: &Rule, now: Duration) {
        let Some(work) = &report.work else { return };
        let us = work.plan_us.saturating_add(work.run_us).saturating_add(work.commit_us);
        if self.0.len() >= rule.steps {
            self.0.pop_front();
        }
        let size = Size::of(report.batch_walk, work);
        self.0.push_back(Step { size, us: us.max(SHORTEST_US), at: now });
    }

    /// Forgets all steps, so that the next ones decide.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Time at which the last step was reported.
    pub fn newest(&self) -> Option<Duration> {
        self.0.back().map(|step| step.at)
    }

    fn current(&self, now: Duration) -> impl Iterator<Item = &Step> {
        self.0.iter().filter(move |step| {
            let own = Duration::from_micros(step.us.into());
            now.saturating_sub(step.at) <= CURRENT + OWN_TIMES * own
        })
    }

    fn by_class(&self, now: Duration) -> BTreeMap<Class, Vec<Step>> {
        let mut classes: BTreeMap<Class, Vec<Step>> = BTreeMap::new();
        for step in self.current(now) {
            classes.entry(step.size.class()).or_default().push(*step);
        }
        classes
    }

    /// Median times of the current steps.
    pub fn medians(&self, now: Duration) -> Medians {
        let enough = self.by_class(now).into_iter().filter(|(_, steps)| steps.len() >= ENOUGH);
        let median = |(class, steps): (Class, Vec<Step>)| {
            let mut times: Vec<u32> = steps.iter().map(|step| step.us).collect();
            Some((class, (Size::mean(&steps)?, lower_median(&mut times, u32::cmp)?)))
        };
        Medians(enough.filter_map(median).collect())
    }

    /// Lower bound of the times of the current steps divided by those of a peer. `None` unless the
    /// steps are as many as `rule` compares, or took long, and for at least half of them a peer had steps of the same
    /// walk.
    ///
    /// The result is the mean over all steps but the slowest few, or the median of a few long steps.
    pub fn pace<'a>(
        &self,
        peers: impl Iterator<Item = &'a Medians> + Clone,
        rule: &Rule,
        now: Duration,
    ) -> Option<f64> {
        let most = MOST * rule.ratio.unwrap_or(LIKE);
        let (mut all, mut took) = (0, Duration::ZERO);
        let mut ratios = Vec::new();
        for steps in self.by_class(now).into_values() {
            all += steps.len();
            took += steps.iter().map(|step| Duration::from_micros(step.us.into())).sum::<Duration>();
            let Some(size) = Size::mean(&steps) else { continue };
            let mut bounds: Vec<f64> = peers.clone().filter_map(|peer| peer.bound(size)).collect();
            let Some(bound) = lower_median(&mut bounds, f64::total_cmp) else { continue };
            ratios.extend(steps.iter().map(|step| (f64::from(step.us) / bound).min(most)));
        }
        let compared = ratios.len();
        if 2 * compared < all {
            None
        } else if all >= rule.steps {
            ratios.sort_by(f64::total_cmp);
            ratios.truncate(compared - compared.div_ceil(PAUSES));
            (!ratios.is_empty()).then(|| ratios.iter().sum::<f64>() / ratios.len() as f64)
        } else if all >= FEW && took >= LONG {
            lower_median(&mut ratios, f64::total_cmp)
        } else {
            None
        }
    }
}

/// The factor of a worker's cost in placement, in percent: 100 unless the pace is far from 1.
pub fn cost_percent(pace: Option<f64>) -> u64 {
    pace.filter(|pace| *pace >= LIKE).map_or(100, |pace| (100.0 * pace) as u64)
}

/// The median; of an even number of values the lower one, so that of two peers the faster one counts.
fn lower_median<T: Copy>(values: &mut [T], order: fn(&T, &T) -> std::cmp::Ordering) -> Option<T> {
    let middle = values.len().checked_sub(1)? / 2;
    Some(*values.select_nth_unstable_by(middle, order).1)
}

#[cfg(test)]
mod tests;
