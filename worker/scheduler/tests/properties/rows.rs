//! Checks of a plan's rows against the oracle's knowledge of their requests.

use tutti_scheduler::{PageId, Row, SlotId, StepPlan, Terminality};
use tutti_settings::Chunking;

use crate::{
    Simulation,
    common::{AUDIO, EOS, STOP},
    live::Live,
};

impl Simulation<'_> {
    pub fn check_row(&self, step: &StepPlan, row: &Row) {
        let config = &self.script.config;
        let live = self.live.get(&row.key).unwrap_or_else(|| panic!("{} is not held", row.key));
        let (arrival, planned) = (live.arrival, live.planned);
        assert!(live.in_flight < config.steps_in_flight, "{} is in too many steps", row.key);
        assert!(!live.is_away(), "{} runs while {:?}", row.key, live.away);
        assert!(!live.awaits_mask(), "{} runs without its mask", row.key);
        assert_eq!(row.positions.start, planned.computed, "a position is skipped or computed again");
        assert_eq!(row.epoch.0, planned.passes);
        let decodes = live.decodes();
        match live.segment() {
            None => assert_eq!((row.walk, row.positions.len()), (arrival.decode(), 1)),
            Some((walk, end)) if walk == AUDIO || config.settings.chunking == Chunking::Off => {
                assert_eq!((row.walk, row.positions.end), (walk, end), "an atomic segment was cut");
            }
            Some((walk, end)) => {
                assert_eq!(row.walk, walk);
                assert!(!row.positions.is_empty() && row.positions.end <= end);
                assert!(row.positions.len() <= config.settings.max_prefill_chunk_size.unwrap_or(usize::MAX));
                let rung = self.next_rung(live, row.positions.start);
                assert!(row.positions.end <= rung, "a chunk goes beyond the rung at {rung}: {row:?}");
            }
        }
        assert!(!live.is_planned_out(), "no more output is wanted: {row:?}");
        let last = row.positions.end >= live.target;
        assert_eq!(row.is_terminal(), last && planned.generated < arrival.max_tokens);
        let awaits_token = planned.generated > live.committed.generated;
        assert_eq!(
            row.continues,
            decodes && awaits_token,
            "the host knows its first token: {}",
            !awaits_token
        );
        if let Terminality::Terminal { forbidden } = &row.terminality {
            let early = arrival.stops && planned.generated < arrival.min_tokens;
            assert_eq!(**forbidden, if early { vec![EOS, STOP] } else { vec![] });
        }
        assert!(row.block_table.len() * config.page_tokens >= row.positions.end, "pages do not cover");
        assert!(!row.block_table.contains(&PageId::NULL));
        self.check_slot(step, row, live);
    }

    /// Checks that the request has kept its slot since its admission, and that no other request has the slot.
    fn check_slot(&self, step: &StepPlan, row: &Row, live: &Live<'_>) {
        let slot = row.slot;
        assert!(step.rows.iter().filter(|other| other.slot == slot).count() == 1, "{slot:?} has two rows");
        assert!(slot != SlotId::NULL && (slot.0 as usize) < self.script.config.slots);
        assert!(live.slot.is_none_or(|held| held == slot), "{} changes its slot to {slot:?}", row.key);
        let others = self.live.iter().chain(&self.draining).filter(|(key, _)| **key != row.key);
        for (other, holder) in others {
            assert_ne!(holder.slot, Some(slot), "{} has the slot of {other}", row.key);
        }
        if live.slot.is_none() {
            let restores = self.flying.iter().flat_map(|flight| flight.initial()).chain(&step.copies);
            let mut sources = restores.map(|copy| copy.from);
            assert!(!sources.any(|from| from == slot), "{} has a slot that is being restored", row.key);
        }
    }

    /// The next position behind `start` at which the slot is saved. No chunk that begins at `start` may end behind it.
    /// `usize::MAX` if the request leaves no snapshots.
    fn next_rung(&self, live: &Live<'_>, start: usize) -> usize {
        let page_tokens = self.script.config.page_tokens;
        if !self.keeps_snapshots() || !live.arrival.shares {
            return usize::MAX;
        }
        let of_prefill = (live.target - 1) / page_tokens * page_tokens;
        let mut blocks = start / page_tokens + 1;
        while !is_rung(blocks) {
            blocks += 1;
        }
        let next = blocks * page_tokens;
        if of_prefill > start { next.min(of_prefill) } else { next }
    }

    /// True if the request's next row begins at a position at which the slot is saved.
    pub fn is_at_rung(&self, live: &Live<'_>) -> bool {
        let (page_tokens, computed) = (self.script.config.page_tokens, live.planned.computed);
        let blocks = computed / page_tokens;
        let whole = computed > 0 && computed.is_multiple_of(page_tokens);
        whole && live.arrival.shares && (is_rung(blocks) || blocks == (live.target - 1) / page_tokens)
    }

    /// Checks the start of a row. The first row after an admission may begin behind whole cached blocks.
    pub fn check_start(&mut self, row: &Row) {
        let config = &self.script.config;
        let live = self.live.get_mut(&row.key).unwrap_or_else(|| panic!("{} is not there", row.key));
        let start = row.positions.start;
        if live.fresh && start > 0 {
            assert!(live.arrival.shares && live.arrival.may_reuse && !config.settings.no_prefix_cache);
            assert!(start.is_multiple_of(config.page_tokens) && start < live.target);
            let digest = live.history[start - 1];
            assert!(self.traces.recorded.contains(&digest), "{} begins behind what no row left", row.key);
            let saved = !self.script.model.has_slots() || self.traces.saved.contains(&digest);
            assert!(saved, "{} begins at {start}, where no snapshot is", row.key);
            self.seen.hits += 1;
            self.seen.resumed += usize::from(live.preempted);
            self.seen.resumed_slots += usize::from(live.preempted && self.script.model.has_slots());
            live.skip_to(start);
            if let Some((AUDIO, end)) = live.segment() {
                assert_eq!(row.positions.end, end);
                let length = live.arrival.prefill.iter().scan(0, |at, s| {
                    Some((*at, {
                        *at += s.1;
                        *at
                    }))
                });
                assert!(
                    length.into_iter().any(|segment| segment == (start, end)),
                    "it begins inside an atomic segment"
                );
            }
        }
        if live.fresh && !live.preempted {
            live.cached = Some(start.min(live.arrival.prompt_tokens()));
        }
    }

    /// Checks that each chunk ends at a page boundary or at the end of its prefill segment. Only the chunk of a step's
    /// first prefill may end elsewhere, and any chunk if the limits are smaller than a page.
    pub fn check_grid(&self, prefills: &[Row], rows: usize) {
        let config = &self.script.config;
        for (index, row) in prefills.iter().enumerate() {
            let Some((walk, end)) = self.live[&row.key].segment() else { continue };
            if walk == AUDIO || config.settings.chunking == Chunking::Off {
                continue;
            }
            let threshold =
                config.settings.long_prefill_token_threshold.filter(|_| rows > 1).unwrap_or(usize::MAX);
            assert!(row.positions.len() <= threshold);
            let cap = config.settings.max_prefill_chunk_size.unwrap_or(usize::MAX).min(threshold);
            let on_grid = row.positions.end.is_multiple_of(config.page_tokens) || row.positions.end == end;
            let small = cap.min(config.settings.max_step_tokens) < config.page_tokens;
            assert!(on_grid || index == 0 || small, "a sliver: {row:?}");
        }
    }
}

/// True if `blocks` is a power of two and at least 4.
fn is_rung(blocks: usize) -> bool {
    blocks >= 4 && blocks.is_power_of_two()
}
