//! Simulates the other workers of disaggregated requests. They send planes, receive planes, or fail.

use std::collections::BTreeMap;

use tutti_proto::GraphKey;
use tutti_scheduler::{
    GraphRole, Outcome, OutputToken, PageId, Reserved, Row, SlotId, StepPlan, TransferError,
};

use crate::{Simulation, common::WORD, live::Live, memory::remember};

/// Maximum number of turns for which a request is held back.
pub const LONGEST_HOLD: usize = 6;

/// The reason for which no step may compute a request.
#[derive(Debug, PartialEq)]
pub enum Away {
    No,
    /// An encoder computes the request's media until the turn `until`. The request holds no pages.
    Parked {
        until: usize,
    },
    /// Until the turn `until`, another worker fills the slot and all pages of `room` except the first `known`.
    Filled {
        room: Vec<PageId>,
        slot: SlotId,
        known: usize,
        until: usize,
    },
    /// The request is held back until the turn `until`, because its planes are sent more slowly than it computes them.
    HeldBack {
        until: usize,
    },
    /// The request's prefill is done. Until the turn `until`, another worker copies the slot and the pages of `room`.
    Copied {
        room: Vec<PageId>,
        slot: SlotId,
        until: usize,
    },
}

impl Live<'_> {
    pub fn is_away(&self) -> bool {
        self.away != Away::No
    }

    /// True if another worker fills or reads the request's pages now or will do so later. Such a request cannot be
    /// preempted.
    pub fn gives_up_no_page(&self) -> bool {
        self.is_away() && !self.is_parked() || self.arrival.role == GraphRole::Prefill
    }

    fn is_parked(&self) -> bool {
        matches!(self.away, Away::Parked { .. })
    }

    fn is_back(&self, turn: usize) -> bool {
        match self.away {
            Away::No => false,
            Away::Parked { until }
            | Away::Filled { until, .. }
            | Away::HeldBack { until }
            | Away::Copied { until, .. } => until <= turn,
        }
    }
}

impl Simulation<'_> {
    pub fn is_any_away(&self) -> bool {
        self.live.values().any(Live::is_away)
    }

    /// Checks a reservation of the turn that planned `step`, and records it in the oracle.
    pub fn reserved(&mut self, reserved: Reserved, step: Option<&StepPlan>) {
        self.log.push(format!("{reserved:?}"));
        let Reserved { key, pages: room, known, slot, tokens } = reserved;
        let page_tokens = self.script.config.page_tokens;
        self.check_host_slot(slot, step);
        let others = self.live.values().chain(self.draining.values());
        assert!(others.into_iter().all(|live| live.slot != Some(slot)), "{slot:?} is reserved twice");
        assert!(slot != SlotId::NULL && (slot.0 as usize) < self.script.config.slots);
        let live = self.live.get_mut(&key).unwrap_or_else(|| panic!("{key} is not held"));
        assert_eq!((live.arrival.role, tokens, &live.away), (GraphRole::Decode, live.target, &Away::No));
        assert_eq!(room.len(), tokens.div_ceil(page_tokens));
        assert!(!live.preempted, "it has been imported");
        assert!(
            known < room.len()
                && (known == 0 || (live.arrival.shares && !self.script.config.settings.no_prefix_cache))
        );
        let planes = &live.history[..known * page_tokens];
        let found = self.device.pages.first_difference(&room, planes);
        assert_eq!(found, None, "{key}: {known} known pages hold other content");
        assert!(planes.last().is_none_or(|digest| self.traces.recorded.contains(digest)));
        // The other worker writes at once, even while steps wait for the device.
        self.device.fill(&room, known * page_tokens..tokens, slot, &live.history, false);
        live.away = Away::Filled { room, slot, known, until: self.turn + live.arrival.away };
        (live.cached, live.slot) = (Some(0), Some(slot));
    }

    /// Updates a request that is prefilled for another worker, after the commit of a row. Sometimes holds the request
    /// back.
    pub fn computed_for_others(&mut self, row: &Row, sampled: bool) {
        let (turn, held_back) = (self.turn, self.roll() < 20);
        let live = self.live.get_mut(&row.key).expect("it continues");
        if live.arrival.role != GraphRole::Prefill {
            return;
        }
        if sampled {
            let room = row.block_table.to_vec();
            live.away = Away::Copied { room, slot: row.slot, until: turn + live.arrival.away };
        } else if held_back {
            let until = turn + 1 + row.positions.end % LONGEST_HOLD;
            live.away = Away::HeldBack { until };
            self.scheduler.hold_back(row.key, true);
        }
    }

    /// Plays the events of other workers that are due in this turn.
    pub fn play_other_workers(&mut self) {
        self.make_a_mistake();
        self.fail_inside_a_step();
        let turn = self.turn;
        let due = self.live.iter().filter(|(_, live)| live.is_back(turn) && !live.failing);
        let due: Vec<GraphKey> = due.map(|(key, _)| *key).collect();
        for key in due {
            let live = self.live.get_mut(&key).expect("it was there");
            let fails = live.arrival.fails;
            match std::mem::replace(&mut live.away, Away::No) {
                Away::No => unreachable!("{key} is not away"),
                Away::HeldBack { .. } => self.scheduler.hold_back(key, false),
                away if fails => {
                    (live.away, live.failing) = (away, true);
                    self.scheduler.fail_transfer(key, TransferError::Lost("injected".into()));
                }
                Away::Parked { .. } => {
                    assert_eq!(live.planned.passes, 0, "{key} ran before its media were here");
                    assert!(self.scheduler.media_here(key));
                    assert!(!self.scheduler.media_here(key), "twice");
                }
                Away::Filled { room, slot, known, until } => {
                    self.complete_import(key, room, slot, known, until)
                }
                Away::Copied { room, slot, .. } => self.complete_export(key, &room, slot),
            }
        }
    }

    /// Sometimes fails a transfer while its request has rows in flight.
    fn fail_inside_a_step(&mut self) {
        let roll = self.roll();
        let breaks = |live: &Live<'_>| {
            live.in_flight > 0 && live.arrival.fails && live.arrival.role == GraphRole::Prefill
        };
        let found = self.live.iter_mut().find(|(_, live)| breaks(live));
        let Some((&key, live)) = found.filter(|_| roll < 20) else { return };
        live.failing = true;
        self.scheduler.fail_transfer(key, TransferError::Lost("injected".into()));
    }

    fn complete_import(
        &mut self,
        key: GraphKey,
        room: Vec<PageId>,
        slot: SlotId,
        known: usize,
        until: usize,
    ) {
        let page_tokens = self.script.config.page_tokens;
        let live = self.live.get_mut(&key).expect("it was there");
        let index = live.committed.generated;
        let (first, computed) = (OutputToken { token: WORD, index }, live.target);
        self.device.fill(&room, known * page_tokens..computed, slot, &live.history, true);
        assert!(self.device.holds(&room, slot, &live.history), "{key} lost pages that were known");
        let wrong = OutputToken { index: first.index + 1, ..first };
        assert!(self.scheduler.complete_import(key, wrong, computed).is_err());
        assert!(self.scheduler.complete_import(key, first, computed - 1).is_err());
        let outcome = self.scheduler.complete_import(key, first, computed);
        // If the first token ends the output, the import is refused.
        assert_eq!(outcome.is_ok(), first.index + 1 < live.arrival.max_tokens, "{outcome:?}");
        if let Err(why) = outcome {
            (live.away, live.failing) = (Away::Filled { room, slot, known, until }, true);
            self.scheduler.fail_transfer(key, TransferError::Refused(why));
            return;
        }
        assert!(self.scheduler.complete_import(key, first, computed).is_err(), "twice");
        live.skip_to(computed);
        (live.fresh, live.initialised) = (false, true);
        live.committed.generated += 1;
        live.planned.generated += 1;
        remember(&mut live.history, WORD);
        self.traces.record(&self.live[&key], 0..computed, page_tokens);
    }

    fn complete_export(&mut self, key: GraphKey, room: &[PageId], slot: SlotId) {
        let live = &self.live[&key];
        let planes = &live.history[..live.committed.computed];
        assert!(self.device.holds(room, slot, planes), "{key} lost planes that were being copied");
        let generated = live.committed.generated;
        let ending = self.scheduler.complete_export(key).expect("its prefill is done");
        assert_eq!(ending.outcome, Outcome::HandedOver { generated });
        self.end(ending);
        assert!(self.scheduler.complete_export(key).is_none(), "twice");
    }

    /// Sometimes completes an import or an export of a request that waits for none. Such a call must fail and change
    /// nothing.
    fn make_a_mistake(&mut self) {
        let roll = self.roll() as usize;
        if roll >= 40 || self.live.is_empty() {
            return;
        }
        let Some((&key, live)) = self.live.iter().nth(roll % self.live.len()) else { return };
        if !matches!(live.away, Away::Filled { .. }) {
            let first = OutputToken { token: WORD, index: live.committed.generated };
            assert!(
                self.scheduler.complete_import(key, first, live.target).is_err(),
                "{key} waits for no planes"
            );
        }
        if !matches!(live.away, Away::Copied { .. }) {
            assert!(self.scheduler.complete_export(key).is_none(), "{key} is not done");
        }
    }

    /// Asserts that no other request holds a page that another worker fills, or writes to a page that another worker
    /// reads.
    pub fn check_rooms(&self, owner: &BTreeMap<PageId, (GraphKey, bool)>) {
        for (key, live) in &self.live {
            let (room, known) = match &live.away {
                Away::Filled { room, known, .. } => (room, *known),
                Away::Copied { room, .. } => (room, room.len()),
                Away::No | Away::Parked { .. } | Away::HeldBack { .. } => continue,
            };
            let owned = room.iter().enumerate().filter_map(|(index, page)| Some((index, owner.get(page)?)));
            for (index, (other, writes)) in owned {
                let fills = index >= known;
                assert!(other == key || !(fills || *writes), "{other} has a page that {key} waits for");
            }
        }
    }
}
