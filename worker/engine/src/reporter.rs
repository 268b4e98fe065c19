//! Converts step outputs into reports and feeds the step observer.

use tutti_proto::{Rank, cluster::v1 as pb, declaration::ModelDeclaration};

use crate::{
    StepObserver, StepRecord,
    engine_core::{CommittedStep, StepOutput},
    observe, report,
};

pub(crate) struct Reporter {
    pub rank: Rank,
    pub declaration: ModelDeclaration,
    pub max_step_tokens: usize,
    pub observer: Option<Box<dyn StepObserver>>,
}

impl Reporter {
    /// Converts an output into a report. If no step ran, the report has no rows and the number of the next step.
    pub fn report(&mut self, output: StepOutput) -> pb::StepReport {
        let StepOutput { step, mut completions, number, load, masks, encoders, oldest_waiting } = output;
        let mut batch_walk = 0;
        let mut rows = Vec::new();
        let mut work = None;
        let mut expert_loads = Vec::new();
        let mut prefills = Vec::new();
        if let Some(CommittedStep {
            batch_walk: walk,
            rows: committed,
            padding,
            started,
            times,
            expert_loads: loads,
            ..
        }) = step
        {
            expert_loads = loads.into_iter().map(report::expert_load).collect();
            batch_walk = walk.0;
            let commits = || committed.iter().map(|(commit, _)| commit).filter(|commit| !commit.is_void);
            let void_rows = (committed.len() - commits().count()) as u32;
            let padding_tokens = padding as u32;
            work = Some(pb::StepWork {
                void_rows,
                padding_tokens,
                ..observe::work(commits(), &self.declaration, times, self.max_step_tokens)
            });
            prefills = observe::prefills(commits(), &self.declaration);
            if let Some(observer) = &mut self.observer {
                observer.observe(StepRecord {
                    number,
                    batch_walk: walk,
                    rows: commits().map(Into::into).collect(),
                    started,
                    times,
                    kv_pages_used: load.pages_used as u32,
                    kv_pages_total: load.pages_total as u32,
                    slots_used: load.slots_used as u32,
                    slots_total: load.slots_total as u32,
                    snapshots: load.slots_cached as u32,
                    void_rows,
                    padding_tokens,
                });
            }
            rows.reserve(committed.len());
            // A void row belongs to a request that has ended, so no one waits for its results.
            for (commit, result) in committed.into_iter().filter(|(commit, _)| !commit.is_void) {
                rows.extend(report::row(&commit, result));
                completions.extend(commit.ending.map(|ending| report::completion(ending, self.rank)));
            }
        }
        let load = Some(report::load(load, oldest_waiting, masks, encoders, self.lost()));
        pb::StepReport { step: number.0, batch_walk, rows, completions, load, work, expert_loads, prefills }
    }

    /// Number of steps that the observer has dropped.
    pub fn lost(&self) -> u64 {
        self.observer.as_ref().map_or(0, |observer| observer.lost())
    }
}
