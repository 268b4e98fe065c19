//! Pace: the time of a worker's steps beside the steps of its peers.
//!
//! A step is compared with peers' steps of the same walk that have at least as many tokens and at least as many pages of
//! KV in use, both up to a factor of two: a peer that does more in less time shows that the worker is slow, whatever the
//! requests are. Only steps of the last half minute are compared, so that a machine that is slower for all workers makes
//! none of them slow.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use tutti_proto::cluster::v1 as pb;
use tutti_settings::FaultSettings;

/// Age beyond which a step is not compared.
const CURRENT: Duration = Duration::from_secs(30);
/// Time that every step counts at least, in microseconds: below it, differences are the scheduling of processes.
const SHORTEST_US: u32 = 5_000;
/// Time of steps that is enough to compare a worker whose steps are too long to be as many as the setting says.
const LONG: Duration = Duration::from_secs(10);
/// Number of steps below which no worker is compared.
const FEW: usize = 8;
/// A step counts at most this many times `slow_worker_ratio`, so that one long pause does not make a worker slow.
const MOST: f64 = 4.0;
/// Paces below this one are equal to placement, because they depend on chance.
const LIKE: f64 = 2.0;
/// Number of a peer's steps of one size from which on their median counts.
const ENOUGH: usize = 4;

/// Size of a step, up to a factor of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Size {
    walk: u32,
    /// Binary logarithm of the number of tokens, padding included.
    tokens: u32,
    /// Binary logarithm of the number of KV pages in use.
    pages: u32,
}

#[derive(Clone, Copy, Debug)]
struct Step {
    size: Size,
    us: u32,
    at: Instant,
}

/// The last steps of one worker.
#[derive(Debug, Default)]
pub struct Steps(VecDeque<Step>);

/// Median times of a worker's current steps, by size, in microseconds.
#[derive(Debug, Default)]
pub struct Medians(BTreeMap<Size, u32>);

impl Medians {
    /// The shortest median of the sizes that are no smaller than this one.
    fn of_at_least(&self, size: Size) -> Option<u32> {
        let is_enough = |other: &Size| {
            other.walk == size.walk && other.tokens >= size.tokens && other.pages >= size.pages
        };
        self.0.iter().filter(|(other, _)| is_enough(other)).map(|(_, us)| *us).min()
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
    /// Keeps a step that has been reported.
    pub fn take(&mut self, report: &pb::StepReport, rule: &Rule, now: Instant) {
        let Some(work) = &report.work else { return };
        let us = work.plan_us.saturating_add(work.run_us).saturating_add(work.commit_us);
        let log = |number: u32| number.checked_ilog2().map_or(0, |log| log + 1);
        let pages = report.load.map_or(0, |load| load.kv_pages_used);
        let tokens = work.tokens.saturating_add(work.padding_tokens);
        let size = Size { walk: report.batch_walk, tokens: log(tokens), pages: log(pages) };
        if self.0.len() >= rule.steps {
            self.0.pop_front();
        }
        self.0.push_back(Step { size, us: us.max(SHORTEST_US), at: now });
    }

    /// Forgets all steps, so that the next ones decide.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    fn current(&self, now: Instant) -> impl Iterator<Item = &Step> {
        self.0.iter().filter(move |step| now.saturating_duration_since(step.at) <= CURRENT)
    }

    /// Median times of the current steps.
    pub fn medians(&self, now: Instant) -> Medians {
        let mut times: BTreeMap<Size, Vec<u32>> = BTreeMap::new();
        for step in self.current(now) {
            times.entry(step.size).or_default().push(step.us);
        }
        let enough = times.into_iter().filter(|(_, times)| times.len() >= ENOUGH);
        Medians(enough.map(|(size, mut times)| (size, lower_median(&mut times))).collect())
    }

    /// Mean of the times of the current steps, each divided by the time of the peers' steps of its size or more. `None`
    /// unless the steps are as many as `rule` compares, or took long, and for at least half of them a peer has such
    /// steps.
    pub fn pace<'a>(
        &self,
        peers: impl Iterator<Item = &'a Medians> + Clone,
        rule: &Rule,
        now: Instant,
    ) -> Option<f64> {
        let most = MOST * rule.ratio.unwrap_or(LIKE);
        let mut usual: BTreeMap<Size, Option<u32>> = BTreeMap::new();
        let (mut all, mut compared, mut sum, mut took) = (0, 0, 0.0, Duration::ZERO);
        for step in self.current(now) {
            all += 1;
            took += Duration::from_micros(step.us.into());
            let usual = usual.entry(step.size).or_insert_with(|| {
                let mut times: Vec<u32> =
                    peers.clone().filter_map(|peer| peer.of_at_least(step.size)).collect();
                (!times.is_empty()).then(|| lower_median(&mut times))
            });
            if let Some(usual) = usual {
                compared += 1;
                sum += (f64::from(step.us) / f64::from(*usual)).min(most);
            }
        }
        let is_enough = all >= rule.steps || (all >= FEW && took >= LONG);
        (is_enough && 2 * compared >= all).then(|| sum / f64::from(compared as u32))
    }
}

/// The factor of a worker's cost in placement, in percent: 100 unless the pace is far from 1.
pub fn cost_percent(pace: Option<f64>) -> u64 {
    pace.filter(|pace| *pace >= LIKE).map_or(100, |pace| (100.0 * pace) as u64)
}

/// The median; of an even number of times the lower one, so that of two peers the faster one counts.
fn lower_median(times: &mut [u32]) -> u32 {
    let middle = times.len().saturating_sub(1) / 2;
    *times.select_nth_unstable(middle).1
}

#[cfg(test)]
mod tests;
