//! What the cluster remembers of a rank beside the worker that has it now: what went wrong, and how often.

use std::{collections::BTreeMap, fmt};

use tutti_proto::Rank;

/// So many short lives in a row are a crash loop.
const CRASH_LOOP: u32 = 3;

/// What is wrong with a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Trouble {
    /// In its own words, or in those that it was turned away with.
    Told(String),
    /// As seen from outside: the latest sign of it says most.
    Seen(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Told(why) | Self::Seen(why)) = self;
        f.write_str(why)
    }
}

/// How the last process of a rank went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    pub pid: u32,
    /// It was taken for dead while it held its stream: it may still be there.
    pub fenced: bool,
}

/// One rank.
#[derive(Debug, Default)]
pub struct RankRecord {
    trouble: Option<Trouble>,
    /// Until it is back.
    pub departure: Option<Departure>,
    /// Processes in a row that ended early.
    early_exits: u32,
    /// Processes in a row that ended before they were ready.
    unready_exits: u32,
    /// An operator has sent it away for good.
    pub drained: bool,
}

impl RankRecord {
    /// A sign that the worker is gone. What it said itself says more.
    pub fn see_trouble(&mut self, why: String) {
        if !matches!(self.trouble, Some(Trouble::Told(_))) {
            self.trouble = Some(Trouble::Seen(why));
        }
    }

    /// In its own words.
    pub fn tell_trouble(&mut self, why: String) {
        self.trouble = Some(Trouble::Told(why));
    }

    pub fn has_trouble(&self) -> bool {
        self.trouble.is_some()
    }

    /// A worker has come. What it came from is still told while it may go the same way.
    pub fn joined(&mut self) {
        self.departure = None;
        if !self.is_crash_looping() {
            self.trouble = None;
        }
    }

    /// It takes requests.
    pub fn ready(&mut self) {
        self.unready_exits = 0;
    }

    /// It has lived long enough.
    pub fn well(&mut self) {
        (self.early_exits, self.unready_exits) = (0, 0);
        self.trouble = None;
    }

    /// Its process has ended, so many times early in a row.
    pub fn ended(&mut self, early_exits: u32) {
        self.early_exits = early_exits;
        self.unready_exits += 1;
    }

    /// Whether what it serves is not to be counted on.
    pub fn is_crash_looping(&self) -> bool {
        self.early_exits >= CRASH_LOOP
    }

    /// Whether nothing is to be expected of it.
    pub fn is_hopeless(&self) -> bool {
        self.drained || self.unready_exits >= CRASH_LOOP
    }

    /// For operators, where there is something to say.
    pub fn detail(&self) -> Option<String> {
        if self.drained {
            return Some("drained".into());
        }
        let trouble = self.trouble.as_ref().map(ToString::to_string);
        if !self.is_crash_looping() {
            return trouble;
        }
        let last = trouble.map(|trouble| format!("; {trouble}")).unwrap_or_default();
        Some(format!("crash loop, {} processes in a row have ended early{last}", self.early_exits))
    }
}

/// All ranks of which there is something to remember.
#[derive(Debug, Default)]
pub struct Ranks(BTreeMap<Rank, RankRecord>);

impl Ranks {
    pub fn get(&self, rank: Rank) -> Option<&RankRecord> {
        self.0.get(&rank)
    }

    pub fn of(&mut self, rank: Rank) -> &mut RankRecord {
        self.0.entry(rank).or_default()
    }

    /// In words, empty where there is nothing to say.
    pub fn detail(&self, rank: Rank) -> String {
        self.get(rank).and_then(RankRecord::detail).unwrap_or_default()
    }

    /// What there is to say, by rank.
    pub fn details(&self) -> Vec<String> {
        let say = |(rank, record): (&Rank, &RankRecord)| {
            record.detail().map(|detail| format!("worker {rank}: {detail}"))
        };
        self.0.iter().filter_map(say).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_loop_is_told_with_its_last_sign_until_a_process_lives() {
        let mut record = RankRecord::default();
        for lives in 1..=3 {
            assert!(!record.is_crash_looping());
            record.see_trouble("signal 9".into());
            record.ended(lives);
        }
        record.joined();
        record.ready();
        let detail = record.detail().unwrap();
        assert!(detail.contains("crash loop, 3 processes") && detail.contains("signal 9"), "{detail}");
        assert!(!record.is_hopeless(), "it was ready in between");
        record.well();
        assert_eq!(record.detail(), None);
    }

    #[test]
    fn one_that_never_gets_ready_is_hopeless() {
        let mut record = RankRecord::default();
        (1..=3).for_each(|lives| record.ended(lives));
        assert!(record.is_hopeless());
    }
}
