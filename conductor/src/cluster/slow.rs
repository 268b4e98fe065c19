//! Slow workers: a worker whose steps take far longer than those of its peers gets no new requests for a while.
//!
//! Peers run the same part of requests, in groups of as many ranks, on devices of the same description. The last worker
//! of a role is never set aside, and neither is one whose peers are as slow. A slow worker is a last resort to
//! placement and not a dead one: if all others die or drain, it gets requests again.

use std::time::Duration;

use tutti_proto::WorkerId;

use super::{
    Cluster, State,
    pace::{self, Medians, Rule},
    roles::{Duties, GroupRole},
    standing::{Finding, Record},
    workers::{Worker, Workers},
};

/// Time between two comparisons.
const INTERVAL: Duration = Duration::from_secs(1);

impl Cluster {
    /// Lets `time` pass on the watchdog's clock. Compares the workers, if they were not compared for a while: sets slow
    /// ones aside, and tries those again whose time aside is over or that their role cannot do without.
    pub(super) fn judge_paces(&self, state: &mut State, time: Duration) {
        let workers = &mut state.membership.workers;
        let before = workers.now();
        workers.pass(time);
        let now = workers.now();
        if now.as_millis() / INTERVAL.as_millis() == before.as_millis() / INTERVAL.as_millis() {
            return;
        }
        self.try_again(workers, now);
        let rule = Rule::of(&self.limits.faults);
        let mut slow: Vec<(WorkerId, f64)> = Vec::new();
        for (id, finding) in workers.compare(&rule, now) {
            let Some(worker) = workers.get_mut(id) else { continue };
            let was_usual = worker.record.is_usual();
            let newest = worker.steps.newest();
            slow.extend(worker.record.note(finding, newest, now).map(|pace| (id, pace)));
            if !was_usual && worker.record.is_usual() {
                tracing::info!(worker = worker.rank.0, "the worker gets requests like its peers again");
            }
            self.metrics.pace(worker.rank, worker.cost_percent as f64 / 100.0);
        }
        slow.sort_by(|(_, one), (_, other)| other.total_cmp(one));
        for (id, pace) in slow {
            if workers.have_another(id, Record::is_usual)
                && let Some(worker) = workers.get_mut(id)
            {
                worker.record.set_aside(pace, self.limits.faults.slow_worker_pause(), now);
                let why = worker.record.describe(now);
                tracing::warn!(worker = worker.rank.0, why, "the worker gets no new requests");
                self.metrics.slow(worker.rank, true);
            }
        }
    }

    fn try_again(&self, workers: &mut Workers, now: Duration) {
        let mut aside: Vec<(WorkerId, f64)> =
            workers.ready().filter_map(|(id, worker)| Some((id, worker.record.aside_at()?))).collect();
        // If a role cannot do without several workers, the fastest goes first, and then the role can do without the
        // others.
        aside.sort_by(|(_, one), (_, other)| one.total_cmp(other));
        for (id, _) in aside {
            let is_needed = !workers.have_another(id, |other| !other.is_aside());
            if let Some(worker) = workers.get_mut(id).filter(|worker| is_needed || worker.record.is_due(now))
            {
                worker.record.try_again(now);
                worker.steps.clear();
                tracing::info!(worker = worker.rank.0, is_needed, "the slow worker is tried again");
                self.metrics.slow(worker.rank, false);
            }
        }
    }
}

/// Properties that two workers share if their steps are compared.
#[derive(PartialEq)]
struct Kind<'a> {
    duties: Duties,
    tp: u32,
    /// Description of the device. GPUs of one machine differ in their ordinals, which are left out.
    device: Vec<&'a str>,
}

impl<'a> Kind<'a> {
    fn of(worker: &'a Worker, workers: &Workers) -> Self {
        let is_ordinal =
            |part: &&str| part.strip_prefix("GPU ").is_some_and(|rest| rest.parse::<u32>().is_ok());
        Self {
            duties: workers.duties(worker.rank),
            tp: workers.ranks_of(worker.rank),
            device: worker.device.split(", ").filter(|part| !is_ordinal(part)).collect(),
        }
    }
}

impl Workers {
    /// Compares all ready workers. Updates the costs by the paces beside all workers of the same duties, and returns
    /// what the paces beside workers of the same kind say.
    fn compare(&mut self, rule: &Rule, now: Duration) -> Vec<(WorkerId, Finding)> {
        let steps: Vec<(WorkerId, Kind<'_>, Medians)> = self
            .ready()
            .map(|(id, worker)| (id, Kind::of(worker, self), worker.steps.medians(now)))
            .collect();
        let compared = self.ready().zip(&steps).map(|((id, worker), (_, kind, _))| {
            let pace_beside = |is_peer: &dyn Fn(&Kind<'_>) -> bool| {
                let peers = steps.iter().filter(|(other, kind, _)| *other != id && is_peer(kind));
                worker.steps.pace(peers.map(|(_, _, medians)| medians), rule, now)
            };
            let cost = pace::cost_percent(pace_beside(&|other| other.duties == kind.duties));
            let finding = match pace_beside(&|other| other == kind) {
                None => Finding::Nothing,
                Some(pace) if rule.is_slow(pace) => Finding::Slow(pace),
                Some(_) => Finding::Sound,
            };
            (id, cost, finding)
        });
        let compared: Vec<_> = compared.collect();
        let mut findings = Vec::new();
        for (id, cost, finding) in compared {
            if let Some(worker) = self.get_mut(id) {
                worker.cost_percent = cost;
                findings.push((id, finding));
            }
        }
        findings
    }

    /// True if each role of a worker has another ready worker of such a standing.
    fn have_another(&self, id: WorkerId, is_such: fn(&Record) -> bool) -> bool {
        let duties = self.duties_of(id);
        let mut roles = GroupRole::ALL.into_iter().filter(|role| duties.include(*role));
        roles.all(|role| self.ready_for(role).any(|(other, worker)| other != id && is_such(&worker.record)))
    }
}

#[cfg(test)]
mod tests;
