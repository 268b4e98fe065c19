//! Checks of a plan's slot copies: saves of snapshots first, then the initial state of each request that begins.

use std::collections::BTreeSet;

use tutti_proto::GraphKey;
use tutti_scheduler::{SlotCopy, SlotId, StepPlan};

use crate::Simulation;

impl Simulation<'_> {
    /// True if the prefix cache keeps snapshots of slots.
    pub fn keeps_snapshots(&self) -> bool {
        self.script.model.has_slots() && !self.script.config.settings.no_prefix_cache
    }

    /// Checks the copies of a step before the oracle counts its rows as planned. Returns the digest of each state that
    /// the step saves.
    pub fn check_copies(&mut self, step: &StepPlan) -> Vec<u64> {
        let begins = |key: &GraphKey| !self.live[key].initialised;
        let begin = if self.script.model.has_slots() {
            step.rows.iter().filter(|row| begins(&row.key)).count()
        } else {
            0
        };
        let saves = step.copies.len().checked_sub(begin).expect("each request that begins has a copy");
        let (saves, initial) = step.copies.split_at(saves);
        let mut digests = Vec::new();
        let mut written = BTreeSet::new();
        for copy in saves {
            digests.push(self.check_save(step, copy));
            assert!(written.insert(copy.to), "two copies to {:?}", copy.to);
        }
        for copy in initial {
            self.check_initial(step, copy);
            assert!(!written.contains(&copy.from), "{copy:?} reads what its own step saves");
            assert!(written.insert(copy.to), "two copies to {:?}", copy.to);
        }
        self.seen.saves += saves.len();
        let restores = initial.iter().filter(|copy| copy.from != SlotId::NULL).count();
        self.seen.restores += restores;
        self.seen.zeros += initial.len() - restores;
        digests
    }

    fn check_save(&self, step: &StepPlan, copy: &SlotCopy) -> u64 {
        assert!(self.keeps_snapshots(), "{copy:?}: no snapshots are kept");
        let SlotCopy { from, to } = *copy;
        assert!(to != SlotId::NULL && (to.0 as usize) < self.script.config.slots);
        let row = step.rows.iter().find(|row| row.slot == from);
        let row = row.unwrap_or_else(|| panic!("{copy:?} saves the slot of no row"));
        let live = &self.live[&row.key];
        assert!(live.initialised, "{copy:?} saves a slot before its first row");
        assert!(self.is_at_rung(live), "{copy:?} saves at {}", live.planned.computed);
        let held = self.live.values().chain(self.draining.values()).any(|live| live.slot == Some(to));
        assert!(!held && step.rows.iter().all(|row| row.slot != to), "{copy:?} overwrites a running slot");
        let restored = self.flying.iter().flat_map(|flight| flight.initial()).chain(&step.copies);
        let reads = |other: &SlotCopy| other.from == to;
        assert!(!restored.into_iter().any(reads), "{copy:?} overwrites a snapshot that is being restored");
        live.history[live.planned.computed - 1]
    }

    fn check_initial(&self, step: &StepPlan, copy: &SlotCopy) {
        let SlotCopy { from, to } = *copy;
        let begins = step.rows.iter().find(|row| row.slot == to && !self.live[&row.key].initialised);
        let row = begins.unwrap_or_else(|| panic!("{copy:?} writes the slot of no request that begins"));
        assert_eq!(from == SlotId::NULL, row.positions.start == 0, "{copy:?} for {row:?}");
        let held = self.live.values().chain(self.draining.values()).any(|live| live.slot == Some(from));
        assert!(!held, "{copy:?} restores the slot of a request");
        let saves = |copies: &[SlotCopy]| copies.iter().any(|other| from != SlotId::NULL && other.to == from);
        let unsettled = self.flying.iter().any(|flight| saves(&flight.step.copies));
        assert!(!unsettled, "{copy:?} reads a snapshot whose step is not committed");
    }

    /// Asserts that no step that may still run uses a slot that the host is about to write.
    pub fn check_host_slot(&self, slot: SlotId, step: Option<&StepPlan>) {
        for step in self.flying.iter().map(|flight| &flight.step).chain(step) {
            let copies = step.copies.iter().any(|copy| copy.from == slot || copy.to == slot);
            let rows = step.rows.iter().any(|row| row.slot == slot);
            assert!(
                !copies && !rows,
                "{slot:?} is filled by another worker while step {} uses it",
                step.number
            );
        }
    }
}
