//! A model of a device's slots. It detects a missing, late or wrong restore or save when the slot is read.

use tutti_scheduler::{Row, SlotCopy, SlotId};

/// The state that a slot holds in all slot planes of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// A state that was never written, or was written by a row that failed or has not ended.
    Garbage,
    /// The state before the first token.
    Zero,
    /// The state after the tokens of this digest.
    After(u64),
}

impl State {
    /// The state before position `start` of a history.
    pub fn before(start: usize, history: &[u64]) -> Self {
        start.checked_sub(1).map_or(Self::Zero, |last| Self::After(history[last]))
    }
}

/// The slots of a device.
pub struct Slots {
    /// False for a model without slot planes, in which a slot holds only the token sampled last.
    has_planes: bool,
    states: Vec<State>,
    /// For each slot, the digest that ends with the token that the last row of the slot sampled. `None` if that row
    /// sampled none.
    sampled: Vec<Option<u64>>,
}

impl Slots {
    pub fn new(slots: usize, has_planes: bool) -> Self {
        Self { has_planes, states: vec![State::Garbage; slots], sampled: vec![None; slots] }
    }

    /// Performs a copy at the beginning of a step.
    pub fn copy(&mut self, copy: SlotCopy) {
        let SlotCopy { from, to } = copy;
        let state = if from == SlotId::NULL { State::Zero } else { self.states[from.0 as usize] };
        self.states[to.0 as usize] = state;
        self.sampled[to.0 as usize] = None;
    }

    /// Asserts that the slot has the state before the row and, if the row continues, the token sampled last.
    pub fn check(&self, row: &Row, history: &[u64]) {
        let (slot, start) = (row.slot.0 as usize, row.positions.start);
        if self.has_planes {
            let expected = State::before(start, history);
            assert_eq!(self.states[slot], expected, "{} finds another state at position {start}", row.key);
        }
        if row.continues {
            let expected = Some(history[start]);
            assert_eq!(self.sampled[slot], expected, "{} continues another token at {start}", row.key);
        }
    }

    /// Updates a slot after a row has run.
    pub fn advance(&mut self, row: &Row, history: &[u64], sound: bool) {
        let (slot, end) = (row.slot.0 as usize, row.positions.end);
        self.states[slot] = if sound { State::After(history[end - 1]) } else { State::Garbage };
        self.sampled[slot] = (sound && row.is_terminal()).then(|| history[end]);
    }

    /// Updates a slot after a row from which no token was sampled. The engine runs no such row in a model with slot
    /// planes, so the state stays.
    pub fn advance_unsampled(&mut self, row: &Row) {
        self.sampled[row.slot.0 as usize] = None;
    }

    /// Writes a slot from the host.
    pub fn write(&mut self, slot: SlotId, state: State) {
        self.states[slot.0 as usize] = state;
        self.sampled[slot.0 as usize] = None;
    }

    /// True if the slot holds this state. Always true for a model without slot planes.
    pub fn holds(&self, slot: SlotId, state: State) -> bool {
        !self.has_planes || self.states[slot.0 as usize] == state
    }
}
