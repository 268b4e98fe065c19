//! The cluster's report of itself: the served model, readiness, and the workers.

use std::sync::Arc;

use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_runtime::{Error, VERSION, health::State as HealthState};

use super::{
    Cluster, State, membership::Membership, ranks::RankRecord, recent, roles::GroupRole, topology::GroupSpec,
};
use crate::metrics::ConductorMetrics;

impl Cluster {
    /// Returns the served model, and whether the cluster is ready for requests. Returns an error until the first worker
    /// has loaded the model.
    pub fn describe(&self) -> Result<pb::DescribeResponse, Error> {
        let model = self.state.lock().membership.model_view()?.description;
        let model = Some(model.as_ref().clone());
        Ok(match self.health.ready() {
            HealthState::Ok => pb::DescribeResponse { model, ready: true, reason: String::new() },
            HealthState::Not(reason) => pb::DescribeResponse { model, ready: false, reason },
        })
    }

    /// The workers and the number of requests in flight.
    pub fn status(&self) -> pb::GetClusterResponse {
        let state = self.state.lock();
        let membership = &state.membership;
        pb::GetClusterResponse {
            workers: membership.statuses(&self.metrics),
            requests_in_flight: state.requests.len() as u32,
            requests_limit: membership.requests_limit().map_or(0, |limit| limit as u32),
            build: VERSION.to_owned(),
            started_us: self.started_us,
            now_us: recent::unix_us(),
            draining: membership.draining,
            model: membership.served.names.first().cloned().unwrap_or_default(),
            replays: self.metrics.replays(),
            groups: membership.group_statuses(),
        }
    }

    /// Updates readiness and its metrics. Called whenever a worker has joined, left or changed its phase.
    pub(super) fn refresh_health(&self, state: &mut State) {
        let membership = &mut state.membership;
        membership.lower_request_limit();
        if let Some(model) = &membership.model {
            state.prefixes.bound(membership.kv_pages(), &model.description);
        }
        for role in GroupRole::ALL {
            self.metrics.groups_ready(role.label(), membership.workers.ready_for(role).count());
        }
        self.metrics.ready(membership.workers.loaded().count(), membership.expected());
        membership.note_start();
        let ready = if membership.is_serving() {
            HealthState::Ok
        } else {
            HealthState::Not(membership.why_not_ready())
        };
        self.health.set_ready(ready);
    }
}

impl Membership {
    /// The status of every present worker and of every spawned worker that is missing, in order of rank.
    fn statuses(&self, metrics: &ConductorMetrics) -> Vec<pb::WorkerStatus> {
        let present = self.workers.iter().map(|(_, worker)| {
            let status = self.status_of(worker.rank);
            let detail = match status.detail.as_str() {
                "" => worker.record.describe(self.workers.now()),
                detail => detail.to_owned(),
            };
            pb::WorkerStatus {
                phase: worker.phase.into(),
                load: Some(worker.load.aged(worker.silent)),
                pid: worker.pid,
                device: worker.device.clone(),
                silent_ms: Some(u32::try_from(worker.silent.as_millis()).unwrap_or(u32::MAX)),
                detail,
                resident_bytes: worker.resident_bytes,
                ..status
            }
        });
        let missing = (0..self.spawned_workers()).map(Rank).filter(|r| self.workers.by_rank(*r).is_none());
        let missing = missing.map(|rank| {
            let status = self.status_of(rank);
            let phase = match status.detail.as_str() {
                _ if self.is_drained(rank) => pb::WorkerPhase::Drained,
                "" => pb::WorkerPhase::Starting,
                _ => pb::WorkerPhase::Gone,
            };
            pb::WorkerStatus { phase: phase.into(), ..status }
        });
        let counted = |status: pb::WorkerStatus| pb::WorkerStatus {
            restarts: metrics.restarts(Rank(status.worker)),
            ..status
        };
        let mut workers: Vec<_> = present.chain(missing).map(counted).collect();
        workers.sort_by_key(|worker| worker.worker);
        workers
    }

    /// The groups of the topology, each with the number of its ranks that have a worker.
    fn group_statuses(&self) -> Vec<pb::GroupStatus> {
        let mut first_rank = 0;
        let status = |group: &GroupSpec| {
            let ranks = first_rank..first_rank + group.ranks();
            let status = pb::GroupStatus {
                name: group.name.clone(),
                first_rank,
                ranks: group.ranks(),
                joined: self.workers.iter().filter(|(_, worker)| ranks.contains(&worker.rank.0)).count()
                    as u32,
                spawned: group.spawned,
            };
            first_rank = ranks.end;
            status
        };
        self.limits.topology.groups().iter().map(status).collect()
    }

    /// The part of a worker's status that depends on the worker's rank alone.
    fn status_of(&self, rank: Rank) -> pb::WorkerStatus {
        let role = self.workers.duties(rank).main();
        pb::WorkerStatus {
            worker: rank.0,
            detail: self.ranks.detail(rank),
            group: self.limits.topology.group_name_of(rank).to_owned(),
            role: role.map_or(pb::WorkerRole::Unspecified, pb::WorkerRole::from).into(),
            ..Default::default()
        }
    }

    /// Sets the request limit of the served model to the smallest limit of all ready workers. Warns of a limit below
    /// the model's context whenever it changes.
    fn lower_request_limit(&mut self) {
        let pools = self.workers.ready().filter_map(|(_, w)| w.model.as_ref()).map(|m| m.max_request_tokens);
        let (Some(smallest), Some(model)) = (pools.min(), &mut self.model) else { return };
        if model.description.max_request_tokens != smallest {
            Arc::make_mut(&mut model.description).max_request_tokens = smallest;
        }
        let context = model.description.max_context_tokens;
        if smallest < context && model.warned_limit.replace(smallest) != Some(smallest) {
            tracing::warn!(
                max_model_len = smallest,
                context,
                "the planes of a worker hold fewer tokens than the model's context: requests have at most as many \
                 (kv_cache_memory)"
            );
        }
    }

    /// Number of spawned workers that no operator has drained.
    fn expected(&self) -> usize {
        (0..self.spawned_workers()).filter(|rank| !self.is_drained(Rank(*rank))).count()
    }

    /// Number of KV pages of all ready workers.
    fn kv_pages(&self) -> u64 {
        self.workers.ready().map(|(_, worker)| u64::from(worker.load.kv_pages_total)).sum()
    }

    /// Sets `started` if all spawned workers have the model loaded at the same time.
    fn note_start(&mut self) {
        let spawned = self.spawned_workers();
        let loaded = self.workers.loaded().filter(|(_, worker)| worker.rank.0 < spawned).count();
        self.started |= loaded >= spawned as usize;
    }

    /// True if the cluster is ready for requests.
    fn is_serving(&self) -> bool {
        // A crash-looping worker does not count, because it may end at any moment.
        let reliable = |role| {
            let mut ready = self.workers.ready_for(role);
            ready.any(|(_, worker)| !self.ranks.get(worker.rank).is_some_and(RankRecord::is_crash_looping))
        };
        let disaggregated = || reliable(GroupRole::Prefill) && reliable(GroupRole::Decode);
        self.started && !self.draining && (reliable(GroupRole::Whole) || disaggregated())
    }

    /// The reason why the cluster is not ready, for operators.
    pub fn why_not_ready(&self) -> String {
        if self.draining {
            return "draining".into();
        }
        let troubles = self.ranks.details();
        let loaded = self.workers.loaded().count();
        let mut summary = format!("{loaded} of {} workers have loaded the model", self.spawned_workers());
        for role in [GroupRole::Prefill, GroupRole::Decode, GroupRole::Encode] {
            if self.workers.has_role(role) && self.workers.ready_for(role).next().is_none() {
                summary.push_str(&format!(", none of them {} {} group", role.article(), role.label()));
            }
        }
        if troubles.is_empty() { summary } else { format!("{summary}; {}", troubles.join("; ")) }
    }
}
