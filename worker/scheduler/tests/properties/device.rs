//! A model of a device. Enqueued steps run in order, each at a random time before its commit.

use tutti_scheduler::{NotSampled, PageId, RowOutcome, SlotCopy, SlotId, StepPlan};

use crate::{
    Simulation,
    memory::{History, Pages},
    slots::{Slots, State},
};

/// A step that was planned, but neither committed nor aborted.
pub struct Flight {
    pub step: StepPlan,
    /// The outcome of each row, which the scheduler learns at the commit.
    pub outcomes: Vec<RowOutcome>,
    /// The digest of each state that the step saves.
    pub saves: Vec<u64>,
    /// True once the device has run the step.
    pub has_run: bool,
    /// True if the device refuses the step. The step then never runs, and will be aborted.
    pub refused: bool,
}

impl Flight {
    /// The copies that restore or zero slots.
    pub fn initial(&self) -> &[SlotCopy] {
        &self.step.copies[self.saves.len()..]
    }
}

/// The memory of a device.
pub struct Device {
    pub pages: Pages,
    pub slots: Slots,
}

impl Device {
    /// Writes the planes of a request from the host, as a transfer does: the pages of `positions`, and the slot. Writes
    /// garbage unless `sound` is true.
    pub fn fill(
        &mut self,
        room: &[PageId],
        positions: std::ops::Range<usize>,
        slot: SlotId,
        history: &History,
        sound: bool,
    ) {
        let state = if sound { State::before(positions.end, history) } else { State::Garbage };
        self.pages.write(room, positions, history, sound);
        self.slots.write(slot, state);
    }

    /// True if the device holds the planes of all positions of `history`.
    pub fn holds(&self, room: &[PageId], slot: SlotId, history: &[u64]) -> bool {
        let state = State::before(history.len(), history);
        self.pages.first_difference(room, history).is_none() && self.slots.holds(slot, state)
    }
}

impl Simulation<'_> {
    /// Lets the device run some of the enqueued steps.
    pub fn maybe_run(&mut self) {
        while self.roll() < 40 {
            let Some(next) = self.flying.iter().position(|flight| !flight.has_run && !flight.refused) else {
                return;
            };
            self.run_step(next);
        }
    }

    /// Runs the oldest step if it has not run yet.
    pub fn run_oldest(&mut self) {
        if self.flying.front().is_some_and(|flight| !flight.has_run) {
            self.run_step(0);
        }
    }

    fn run_step(&mut self, index: usize) {
        let Self { flying, device, live, draining, .. } = self;
        let flight = &mut flying[index];
        flight.has_run = true;
        for copy in &flight.step.copies {
            device.slots.copy(*copy);
        }
        let is_void = |outcome: &RowOutcome| matches!(outcome, RowOutcome::NotSampled(NotSampled::Void));
        let ran = || flight.step.rows.iter().zip(&flight.outcomes).filter(|(_, outcome)| !is_void(outcome));
        for (row, _) in ran() {
            let request = live.get(&row.key).or_else(|| draining.get(&row.key)).expect("its row is not back");
            if !request.poisoned {
                let found =
                    device.pages.first_difference(&row.block_table, &request.history[..row.positions.start]);
                assert_eq!(found, None, "{} finds something else at this position", row.key);
                device.slots.check(row, &request.history);
            }
        }
        for (row, outcome) in ran() {
            let request = live.get_mut(&row.key).or_else(|| draining.get_mut(&row.key));
            let request = request.expect("its row is not back");
            request.poisoned |= matches!(outcome, RowOutcome::Failed(_));
            let (history, sound) = (&request.history, !request.poisoned);
            device.pages.write(&row.block_table, row.positions.clone(), history, sound);
            match outcome {
                RowOutcome::NotSampled(_) => device.slots.advance_unsampled(row),
                _ => device.slots.advance(row, history, sound),
            }
        }
    }

    /// Aborts the step that was planned last. The device has not run it, but may have left garbage in the pages of the
    /// step's positions.
    pub fn abort_last(&mut self) {
        let Some(flight) = self.flying.pop_back() else { return };
        assert!(!flight.has_run);
        self.log.push(format!("abort {}", flight.step.number));
        self.seen.aborted += 1;
        for row in &flight.step.rows {
            let begins = flight.initial().iter().any(|copy| copy.to == row.slot);
            let key = row.key;
            let live = self.live.get_mut(&key).or_else(|| self.draining.get_mut(&key));
            let live = live.expect("its row is not back");
            if live.is_taken_back() {
                live.taken_back -= 1;
                self.seen.taken_back_aborted += 1;
            } else {
                self.device.pages.write(&row.block_table, row.positions.clone(), &live.history, false);
                if row.is_terminal() {
                    live.history.pop();
                    live.planned.generated -= 1;
                }
                live.planned.computed = row.positions.start;
                live.planned.passes -= 1;
            }
            live.in_flight -= 1;
            live.initialised &= !begins;
            self.drop_drained(key);
        }
        self.scheduler.abort(flight.step);
    }

    /// Forgets an ended request once no step has a row of it.
    pub fn drop_drained(&mut self, key: tutti_proto::GraphKey) {
        if self.draining.get(&key).is_some_and(|live| live.in_flight == 0) {
            self.draining.remove(&key);
        }
    }
}
