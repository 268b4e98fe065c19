//! States that the prefix cache may hold after the commits of a simulation, and counts of the simulation's events.

use std::{collections::HashSet, ops::Range};

use crate::live::Live;

/// The digests of states that requests may find in the prefix cache.
#[derive(Default)]
pub struct Traces {
    /// States at the page boundaries that committed rows have reached.
    pub recorded: HashSet<u64>,
    /// States with a snapshot. The row that reaches the state and the step that copies the slot are both committed.
    pub saved: HashSet<u64>,
    /// States at the ends of committed rows.
    ends: HashSet<u64>,
}

impl Traces {
    /// Records the states that a committed row or an import leaves at these positions.
    pub fn record(&mut self, live: &Live<'_>, positions: Range<usize>, page_tokens: usize) {
        if !live.arrival.shares {
            return;
        }
        self.ends.insert(live.history[positions.end - 1]);
        let ends = positions.filter(|position| (position + 1).is_multiple_of(page_tokens));
        self.recorded.extend(ends.map(|position| live.history[position]));
    }

    /// Records the states that a committed step saved as snapshots. Skips a state whose row failed or was void.
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
    /// Requests that a plan ended while a step in flight had one of their rows.
    pub ended_inside: usize,
    pub preempted: usize,
    pub hits: usize,
    /// Preempted requests that began again after a cached prefix.
    pub resumed: usize,
    /// Resumed requests whose slot was restored.
    pub resumed_slots: usize,
    pub saves: usize,
    pub restores: usize,
    pub zeros: usize,
    /// Terminal rows from which no token was sampled.
    pub not_sampled: usize,
    /// Rows that continued a late one.
    pub taken_back: usize,
    pub taken_back_aborted: usize,
    /// Requests that a constraint ended outside of a step.
    pub constraint_ends: usize,
}

impl Seen {
    fn counts(&mut self) -> [(&'static str, &mut usize, usize); 17] {
        [
            ("steps", &mut self.steps, 100_000),
            ("aborted", &mut self.aborted, 5000),
            ("rows ahead", &mut self.rows_ahead, 30_000),
            ("continued", &mut self.continued, 15_000),
            ("void rows", &mut self.void_rows, 800),
            ("ended inside", &mut self.ended_inside, 120),
            ("preempted", &mut self.preempted, 400),
            ("hits", &mut self.hits, 500),
            ("resumed", &mut self.resumed, 40),
            ("resumed slots", &mut self.resumed_slots, 12),
            ("saves", &mut self.saves, 3000),
            ("restores", &mut self.restores, 250),
            ("zeros", &mut self.zeros, 4000),
            ("not sampled", &mut self.not_sampled, 900),
            ("taken back", &mut self.taken_back, 60),
            ("taken back and aborted", &mut self.taken_back_aborted, 2),
            ("constraint ends", &mut self.constraint_ends, 800),
        ]
    }

    pub fn add(&mut self, other: &Self) {
        let mut other = other.clone();
        for ((_, sum, _), (_, more, _)) in self.counts().into_iter().zip(other.counts()) {
            *sum += *more;
        }
    }

    /// Returns the first event that 3000 scripts cause less often than the test requires. `None` if each happens often
    /// enough.
    pub fn too_few(&self) -> Option<&'static str> {
        let mut seen = self.clone();
        seen.counts().into_iter().find(|(_, count, least)| **count < *least).map(|(name, ..)| name)
    }
}
