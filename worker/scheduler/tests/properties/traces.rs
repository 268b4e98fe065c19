//! The traces that committed rows leave in the prefix cache, and the counts of a run.

use std::{collections::HashSet, ops::Range};

use crate::live::Live;

/// The digests of states that requests may find in the prefix cache.
#[derive(Default)]
pub struct Traces {
    /// States at the ends of whole blocks that a committed row has left.
    pub recorded: HashSet<u64>,
    /// States of which a snapshot was taken: the row that ends there and the step with the copy are committed.
    pub saved: HashSet<u64>,
    /// States at the ends of committed rows.
    ends: HashSet<u64>,
}

impl Traces {
    /// Follows the commit of a row, or the import, of these positions.
    pub fn record(&mut self, live: &Live<'_>, positions: Range<usize>, page_tokens: usize) {
        if !live.arrival.shares {
            return;
        }
        self.ends.insert(live.history[positions.end - 1]);
        let ends = positions.filter(|position| (position + 1).is_multiple_of(page_tokens));
        self.recorded.extend(ends.map(|position| live.history[position]));
    }

    /// Follows the commit of a step that saves these states. A state whose row failed or was void is not kept.
    pub fn save(&mut self, states: &[u64]) {
        self.saved.extend(states.iter().filter(|state| self.ends.contains(state)));
    }
}

/// Counts of the events in one or more runs.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub steps: usize,
    pub aborted: usize,
    /// Rows that were prepared by `plan_ahead`.
    pub rows_ahead: usize,
    /// Rows whose first token the host did not know.
    pub continued: usize,
    pub void_rows: usize,
    /// Requests that a plan ended while a step had a row of them.
    pub ended_inside: usize,
    pub preempted: usize,
    pub hits: usize,
    /// Preempted requests that began again behind a cached prefix.
    pub resumed: usize,
    /// Resumed requests whose slot was restored.
    pub resumed_slots: usize,
    pub saves: usize,
    pub restores: usize,
    pub zeros: usize,
}

impl Seen {
    fn counts(&mut self) -> [(&'static str, &mut usize, usize); 13] {
        [
            ("steps", &mut self.steps, 100_000),
            ("aborted", &mut self.aborted, 5000),
            ("rows ahead", &mut self.rows_ahead, 30_000),
            ("continued", &mut self.continued, 15_000),
            ("void rows", &mut self.void_rows, 800),
            ("ended inside", &mut self.ended_inside, 120),
            ("preempted", &mut self.preempted, 150),
            ("hits", &mut self.hits, 500),
            ("resumed", &mut self.resumed, 20),
            ("resumed slots", &mut self.resumed_slots, 5),
            ("saves", &mut self.saves, 3000),
            ("restores", &mut self.restores, 250),
            ("zeros", &mut self.zeros, 4000),
        ]
    }

    pub fn add(&mut self, other: &Self) {
        let mut other = other.clone();
        for ((_, sum, _), (_, more, _)) in self.counts().into_iter().zip(other.counts()) {
            *sum += *more;
        }
    }

    /// The first event that 3000 scripts see too seldom, if there is one.
    pub fn too_few(&self) -> Option<&'static str> {
        let mut seen = self.clone();
        seen.counts().into_iter().find(|(_, count, least)| **count < *least).map(|(name, ..)| name)
    }
}
