//! The sequences of running requests, by slot. The device's thread owns them, so it needs neither a look-up by key nor
//! a lock to find the sequence of a row.

use tutti_proto::GraphKey;
use tutti_scheduler::{Row, SlotId};

use crate::sequence::Sequence;

#[derive(Default)]
pub(crate) struct Sequences(Vec<Option<Held>>);

struct Held {
    key: GraphKey,
    sequence: Sequence,
    /// True once a row of the request was refused. Later rows of the request do not run, because the request ends with
    /// the refused row.
    has_failed: bool,
    /// True if no token was sampled from the request's last row that was to sample one. A later row that continues it
    /// does not run.
    lacks_token: bool,
}

impl Sequences {
    /// Takes over the sequence of a request that holds `slot`.
    pub fn insert(&mut self, slot: SlotId, key: GraphKey, sequence: Sequence) {
        let index = slot.0 as usize;
        if index >= self.0.len() {
            self.0.resize_with(index + 1, || None);
        }
        self.0[index] = Some(Held { key, sequence, has_failed: false, lacks_token: false });
    }

    /// Returns the sequence of the row's request; `None` if the row's slot does not hold that sequence.
    pub fn get(&self, row: &Row) -> Option<&Sequence> {
        self.held(row).map(|held| &held.sequence)
    }

    /// Returns the sequence of the row's request as a mutable reference.
    pub fn get_mut(&mut self, row: &Row) -> Option<&mut Sequence> {
        self.held_mut(row).map(|held| &mut held.sequence)
    }

    /// True if a row of the same request was refused.
    pub fn has_failed(&self, row: &Row) -> bool {
        self.held(row).is_some_and(|held| held.has_failed)
    }

    /// Records that this row was refused.
    pub fn fail(&mut self, row: &Row) {
        if let Some(held) = self.held_mut(row) {
            held.has_failed = true;
        }
    }

    /// True if the row continues one from which no token was sampled.
    pub fn lacks_token(&self, row: &Row) -> bool {
        row.continues && self.held(row).is_some_and(|held| held.lacks_token)
    }

    /// Records whether a token is sampled from a row that is to sample one.
    pub fn set_lacks_token(&mut self, row: &Row, lacks_token: bool) {
        if let Some(held) = self.held_mut(row) {
            held.lacks_token = lacks_token;
        }
    }

    /// Removes the sequence of a request from its slot; `None` if the slot has another request's sequence by now.
    pub fn remove(&mut self, slot: SlotId, key: GraphKey) -> Option<Sequence> {
        let held = self.0.get_mut(slot.0 as usize)?;
        held.take_if(|held| held.key == key).map(|held| held.sequence)
    }

    fn held(&self, row: &Row) -> Option<&Held> {
        self.0.get(row.slot.0 as usize)?.as_ref().filter(|held| held.key == row.key)
    }

    fn held_mut(&mut self, row: &Row) -> Option<&mut Held> {
        self.0.get_mut(row.slot.0 as usize)?.as_mut().filter(|held| held.key == row.key)
    }
}
