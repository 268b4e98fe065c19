//! History of each rank across its workers: faults, early exits, drains.

use std::{collections::BTreeMap, fmt};

use tutti_proto::Rank;

use super::topology::Replica;

/// Number of consecutive early exits that make a crash loop.
const CRASH_LOOP: u32 = 3;
/// Number of kills while loading after which a replica is given up.
const MOST_KILLED_LOADING: u32 = 3;

/// The fault of a process that was killed before it was ready.
const KILLED_LOADING: &str = "killed while loading the model (signal 9), likely for memory";

/// A worker's latest fault.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Trouble {
    /// A fault that the worker reported, or for which the conductor turned the worker away.
    Reported(String),
    /// A fault that the conductor observed. A later observation replaces an earlier one.
    Observed(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Reported(why) | Self::Observed(why)) = self;
        f.write_str(why)
    }
}

/// The departure of a rank's latest worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    pub pid: u32,
    pub manner: Manner,
}

/// The manner in which a worker left the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// The worker's stream ended.
    Left,
    /// The worker was taken for dead while its stream was open. Its process may still run.
    Fenced,
}

/// History of one rank.
#[derive(Debug, Default)]
pub struct RankRecord {
    trouble: Option<Trouble>,
    /// The departure of the rank's latest worker. Cleared when the next worker joins.
    pub departure: Option<Departure>,
    /// Number of the rank's consecutive processes that ended early, up to the latest process.
    early_exits: u32,
    /// Number of processes that have ended since a worker of this rank was last ready.
    unready_exits: u32,
    /// True if an operator has drained the rank for good.
    pub drained: bool,
    /// True from the time that a process of the rank joins until it is ready.
    is_loading: bool,
    /// Number of processes that were killed while they loaded the model, since one was last ready.
    killed_loading: u32,
    /// True if the rank's processes are not started now, because loading the model kills them.
    pub given_up: bool,
}

impl RankRecord {
    /// Records an observed fault, unless the worker has reported a fault itself, because a reported fault says more.
    pub fn observe_trouble(&mut self, why: String) {
        if !matches!(self.trouble, Some(Trouble::Reported(_))) {
            self.trouble = Some(Trouble::Observed(why));
        }
    }

    /// Records a fault that the worker reported.
    pub fn report_trouble(&mut self, why: String) {
        self.trouble = Some(Trouble::Reported(why));
    }

    pub fn has_trouble(&self) -> bool {
        self.trouble.is_some()
    }

    /// Records that a worker has joined. Keeps the last fault during a crash loop, since the fault may recur.
    pub fn joined(&mut self) {
        self.departure = None;
        self.is_loading = true;
        if !self.is_crash_looping() {
            self.trouble = None;
        }
    }

    /// Records that the rank's worker is ready for requests.
    pub fn ready(&mut self) {
        self.unready_exits = 0;
        (self.is_loading, self.killed_loading) = (false, 0);
    }

    /// Records that a process of the rank was killed. Returns true if it was loading the model, and names that.
    pub fn killed(&mut self) -> bool {
        if std::mem::take(&mut self.is_loading) {
            self.killed_loading += 1;
            self.trouble = Some(Trouble::Reported(KILLED_LOADING.into()));
            return true;
        }
        false
    }

    /// Records that a process of the rank ended in another way than by a kill, perhaps while it was loading.
    pub fn ended_unkilled(&mut self) {
        self.is_loading = false;
    }

    /// Records that the process has run long enough to end a crash loop.
    pub fn well(&mut self) {
        (self.early_exits, self.unready_exits) = (0, 0);
        self.trouble = None;
    }

    /// Records the end of a process. `early_exits` is the number of consecutive early exits up to this one.
    pub fn ended(&mut self, early_exits: u32) {
        self.early_exits = early_exits;
        self.unready_exits += 1;
    }

    /// True if at least `CRASH_LOOP` consecutive processes of the rank have ended early.
    pub fn is_crash_looping(&self) -> bool {
        self.early_exits >= CRASH_LOOP
    }

    /// True if this rank is not expected to have a ready worker again.
    pub fn is_hopeless(&self) -> bool {
        self.drained || self.given_up || self.unready_exits >= CRASH_LOOP
    }

    /// Description for operators; `None` if the rank has neither a fault nor a drain.
    pub fn detail(&self) -> Option<String> {
        if self.drained {
            return Some("drained".into());
        }
        let trouble = self.trouble.as_ref().map(ToString::to_string);
        if self.given_up {
            return Some(format!("given up; {}", trouble.as_deref().unwrap_or(KILLED_LOADING)));
        }
        if !self.is_crash_looping() {
            return trouble;
        }
        let last = trouble.map(|trouble| format!("; {trouble}")).unwrap_or_default();
        Some(format!("crash loop, {} processes in a row have ended early{last}", self.early_exits))
    }
}

/// Histories by rank.
#[derive(Debug, Default)]
pub struct Ranks(BTreeMap<Rank, RankRecord>);

impl Ranks {
    pub fn get(&self, rank: Rank) -> Option<&RankRecord> {
        self.0.get(&rank)
    }

    pub fn entry(&mut self, rank: Rank) -> &mut RankRecord {
        self.0.entry(rank).or_default()
    }

    /// True if so many processes of a replica were killed while they loaded the model, since its ranks were last ready,
    /// that another one is not started. Each of the replica's ranks may be the one that the kernel kills.
    pub fn are_killed_by_loading(&self, replica: Replica) -> bool {
        let killed = |rank| self.get(rank).map_or(0, |record| record.killed_loading);
        replica.ranks().map(killed).sum::<u32>() >= MOST_KILLED_LOADING
    }

    /// Description for operators; empty if the rank has neither a fault nor a drain.
    pub fn detail(&self, rank: Rank) -> String {
        self.get(rank).and_then(RankRecord::detail).unwrap_or_default()
    }

    /// Descriptions of all ranks that have a fault or a drain, in order of rank.
    pub fn details(&self) -> Vec<String> {
        let say = |(rank, record): (&Rank, &RankRecord)| {
            record.detail().map(|detail| format!("worker {rank}: {detail}"))
        };
        self.0.iter().filter_map(say).collect()
    }
}

#[cfg(test)]
mod tests;
