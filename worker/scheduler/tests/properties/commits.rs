//! Checks of commits: the effect of each row, the ends of requests, and the pages and slots that requests hold.

use std::{collections::BTreeMap, time::Duration};

use tutti_proto::GraphKey;
use tutti_scheduler::{Ending, Outcome, PageId, RowCommit, RowOutcome};

use crate::{Simulation, device::Flight, live::Live};

impl Simulation<'_> {
    /// Runs the oldest step on the device if it has not run yet, and checks its commit.
    pub fn finish_oldest(&mut self) {
        if self.flying.front().is_none_or(|flight| flight.refused) {
            return;
        }
        self.run_oldest();
        let Some(Flight { step, outcomes, saves, .. }) = self.flying.pop_front() else { return };
        let took = Duration::from_micros(200 + 50 * step.tokens() as u64);
        let commits = self.scheduler.commit(step, outcomes.clone(), took);
        assert_eq!(commits.len(), outcomes.len());
        for (commit, outcome) in commits.into_iter().zip(outcomes) {
            self.check_commit(commit, outcome);
        }
        self.traces.save(&saves);
    }

    fn check_commit(&mut self, commit: RowCommit, outcome: RowOutcome) {
        let key = commit.row.key;
        let page_tokens = self.script.config.page_tokens;
        if let Some(live) = self.draining.get_mut(&key) {
            live.in_flight -= 1;
            assert!(commit.is_void, "{key} has ended, but its row is not void");
            assert_eq!((commit.sampled, commit.ending), (None, None), "a void row leaves no trace");
            self.seen.void_rows += 1;
            self.drop_drained(key);
            return;
        }
        let live = self.live.get_mut(&key).unwrap_or_else(|| panic!("{key} committed after its end"));
        live.in_flight -= 1;
        assert!(!commit.is_void, "{key} has not ended, but its row is void");
        let is_sampled = !matches!(outcome, RowOutcome::NotSampled(_));
        let mut expected = None;
        if let RowOutcome::Failed(why) = outcome {
            expected = Some(Outcome::Failed(why));
        } else if let RowOutcome::NotSampled(why) = outcome {
            expected = self.check_not_sampled(&commit, why);
        } else {
            live.committed.computed = commit.row.positions.end;
            live.committed.passes += 1;
            if let RowOutcome::Sampled(token) = outcome {
                let sampled = commit.sampled.expect("a terminal row that was committed has its token");
                assert_eq!((sampled.token, sampled.index), (token, live.committed.generated));
                live.committed.generated += 1;
            } else {
                assert_eq!(commit.sampled, None);
            }
            self.traces.record(live, commit.row.positions.clone(), page_tokens);
            expected = expected.or_else(|| live.ending(&outcome));
        }
        assert_eq!(commit.ending.as_ref().map(|e| e.outcome.clone()), expected);
        match commit.ending {
            Some(ending) => self.end(ending),
            None if is_sampled => self.computed_for_others(&commit.row, commit.sampled.is_some()),
            None => {}
        }
    }

    pub fn end(&mut self, ending: Ending) {
        self.log.push(format!("{ending:?}"));
        let live =
            self.live.remove(&ending.key).expect("only a request that was accepted and has not ended ends");
        assert_eq!(ending.passes.0, live.committed.passes);
        if let Some(cached) = live.cached {
            assert_eq!(ending.cached_tokens as usize, cached);
        }
        if let Outcome::Finished { generated, .. } = ending.outcome {
            assert_eq!(generated, live.committed.generated);
        }
        if live.in_flight > 0 {
            self.draining.insert(ending.key, live);
        }
        assert!(self.ended.insert(ending.key, ending.outcome).is_none(), "{} ended twice", ending.key);
    }

    /// Asserts that no request writes to a page that another request holds, and that each page and slot in use has an
    /// owner.
    pub fn check_pages(&self) {
        let page_tokens = self.script.config.page_tokens;
        let mut owner = BTreeMap::<PageId, (GraphKey, bool)>::new();
        for row in self.flying.iter().flat_map(|flight| &flight.step.rows) {
            for (index, page) in row.block_table.iter().enumerate() {
                let writes = row.positions.start < (index + 1) * page_tokens;
                let (other, written) = owner.entry(*page).or_insert((row.key, writes));
                assert!(*other == row.key || !(writes || *written), "page {page:?} has two owners");
                *written |= writes;
            }
        }
        self.check_rooms(&owner);
        let load = self.scheduler.load();
        let config = &self.script.config;
        let slots = config.slots - 1;
        let running = config.settings.running_limit().min(config.settings.max_step_tokens).min(slots);
        assert!(load.running <= running);
        assert!(owner.len() <= load.pages_used, "a page is free while a step uses it");
        let held = || self.live.values().chain(self.draining.values());
        let most: usize = held().map(|live| self.pages(live)).sum();
        assert!(load.pages_used <= most, "{} pages held, {most} can be", load.pages_used);
        assert!(load.slots_used + load.slots_cached <= slots && load.slots_total == slots);
        let known = held().filter(|live| live.slot.is_some()).count();
        assert!(known <= load.slots_used, "a slot is free while its request holds it");
        let saved: usize = self.flying.iter().map(|flight| flight.saves.len()).sum();
        assert!(load.slots_used <= load.running + self.draining.len() + self.held_snapshots() + saved);
    }

    /// Upper bound on the number of snapshots from which steps in flight restore: one per request.
    fn held_snapshots(&self) -> usize {
        self.live.len() + self.draining.len()
    }

    fn pages(&self, live: &Live<'_>) -> usize {
        live.arrival.max_held().div_ceil(self.script.config.page_tokens)
    }
}
