//! Checks of a plan's rows against the oracle's knowledge of their requests.

use tutti_scheduler::{PageId, Row, Terminality};
use tutti_settings::Chunking;

use crate::{
    Simulation,
    common::{AUDIO, EOS, STOP},
};

impl Simulation<'_> {
    pub fn check_row(&self, row: &Row) {
        let config = &self.script.config;
        let live = self.live.get(&row.key).unwrap_or_else(|| panic!("{} is not held", row.key));
        let arrival = live.arrival;
        assert!(!live.in_step, "{} is in two steps", row.key);
        assert!(!live.is_away(), "{} runs while {:?}", row.key, live.away);
        assert_eq!(row.positions.start, live.computed, "a position is skipped or computed again");
        assert_eq!(row.epoch.0, live.passes);
        match live.segment() {
            None => assert_eq!((row.walk, row.positions.len()), (arrival.decode(), 1)),
            Some((walk, end)) if walk == AUDIO || config.settings.chunking == Chunking::Off => {
                assert_eq!((row.walk, row.positions.end), (walk, end), "an atomic segment was cut");
            }
            Some((walk, end)) => {
                assert_eq!(row.walk, walk);
                assert!(!row.positions.is_empty() && row.positions.end <= end);
                assert!(row.positions.len() <= config.settings.max_prefill_chunk_size.unwrap_or(usize::MAX));
            }
        }
        let last = row.positions.end >= live.target;
        assert_eq!(row.is_terminal(), last && live.generated < arrival.max_tokens);
        if let Terminality::Terminal { forbidden } = &row.terminality {
            let early = arrival.stops && live.generated < arrival.min_tokens;
            assert_eq!(**forbidden, if early { vec![EOS, STOP] } else { vec![] });
        }
        assert!(row.block_table.len() * config.page_tokens >= row.positions.end, "pages do not cover");
        assert!(!row.block_table.contains(&PageId::NULL));
    }

    /// Checks the first row after an admission, which may begin behind whole cached blocks.
    pub fn check_start(&mut self, row: &Row) {
        let config = &self.script.config;
        let live = self.live.get_mut(&row.key).unwrap_or_else(|| panic!("{} is not there", row.key));
        let start = row.positions.start;
        if live.fresh && start > 0 {
            assert!(live.arrival.shares && live.arrival.may_reuse && !config.settings.no_prefix_cache);
            assert!(start.is_multiple_of(config.page_tokens) && start < live.target);
            live.computed = start;
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

    /// Checks that only the first prefill that is cut ends off the grid.
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
