//! What the cluster says of itself: what it serves, whether it is ready, who its workers are.

use std::sync::Arc;

use tutti_proto::{Rank, cluster::v1 as pb, declaration::ModelDeclaration};
use tutti_runtime::{Error, health::State as HealthState};

use super::{Cluster, State, ranks::RankRecord, roles::GroupRole};

impl Cluster {
    /// What is served, once a worker has said so, and whether a request sent now would run.
    pub fn describe(&self) -> Result<pb::DescribeResponse, Error> {
        let model = Some(self.model()?.as_ref().clone());
        Ok(match self.health.ready() {
            HealthState::Ok => pb::DescribeResponse { model, ready: true, reason: String::new() },
            HealthState::Not(reason) => pb::DescribeResponse { model, ready: false, reason },
        })
    }

    fn model(&self) -> Result<Arc<pb::ModelDescription>, Error> {
        Ok(self.model_and_choice()?.0)
    }

    /// What is served, its declaration, and whether it matters to which group a request goes.
    pub(super) fn model_and_choice(
        &self,
    ) -> Result<(Arc<pb::ModelDescription>, Arc<ModelDeclaration>, bool), Error> {
        let state = self.state.lock();
        let model = state.model.as_ref().ok_or_else(|| Error::unavailable(self.why_not_ready(&state)))?;
        Ok((model.description.clone(), model.declaration.clone(), state.workers.have_choice()))
    }

    /// The cluster as it is now.
    pub fn status(&self) -> pb::GetClusterResponse {
        let state = self.state.lock();
        let role = |rank| {
            state.workers.duties(rank).main().map_or(pb::WorkerRole::Unspecified, pb::WorkerRole::from).into()
        };
        let mut workers: Vec<pb::WorkerStatus> = state
            .workers
            .iter()
            .map(|(_, worker)| pb::WorkerStatus {
                worker: worker.rank.0,
                phase: worker.phase.into(),
                load: Some(worker.load),
                pid: worker.pid,
                detail: state.ranks.detail(worker.rank),
                group: self.group_name(worker.rank).to_owned(),
                role: role(worker.rank),
            })
            .collect();
        let missing = (0..self.spawned_workers()).map(Rank).filter(|r| state.workers.by_rank(*r).is_none());
        workers.extend(missing.map(|rank| {
            let detail = state.ranks.detail(rank);
            let drained = state.ranks.get(rank).is_some_and(|record| record.drained);
            let phase = match detail.as_str() {
                _ if drained => pb::WorkerPhase::Drained,
                "" => pb::WorkerPhase::Starting,
                _ => pb::WorkerPhase::Gone,
            };
            let (group, role) = (self.group_name(rank).to_owned(), role(rank));
            pb::WorkerStatus {
                worker: rank.0,
                phase: phase.into(),
                detail,
                group,
                role,
                ..Default::default()
            }
        }));
        workers.sort_by_key(|worker| worker.worker);
        pb::GetClusterResponse { workers, requests_in_flight: state.requests.len() as u32 }
    }

    /// To be called whenever a worker has come or gone.
    pub(super) fn refresh_health(&self, state: &mut State) {
        let pools = state.workers.ready().filter_map(|(_, w)| w.model.as_ref()).map(|m| m.max_request_tokens);
        if let (Some(smallest), Some(model)) = (pools.min(), &mut state.model)
            && model.description.max_request_tokens != smallest
        {
            Arc::make_mut(&mut model.description).max_request_tokens = smallest;
        }
        if let Some(model) = &state.model {
            let pages = state.workers.ready().map(|(_, worker)| u64::from(worker.load.kv_pages_total)).sum();
            state.prefixes.bound(pages, &model.description);
        }
        // One that may be gone any moment is no reason to send requests.
        let reliable = |rank| !state.ranks.get(rank).is_some_and(RankRecord::is_crash_looping);
        let counts = GroupRole::ALL.map(|role| {
            let ready = || state.workers.ready_for(role);
            self.metrics.groups_ready(role.label(), ready().count());
            (role, ready().any(|(_, worker)| reliable(worker.rank)))
        });
        let reliable = |role| counts.contains(&(role, true));
        let reliable =
            reliable(GroupRole::Whole) || (reliable(GroupRole::Prefill) && reliable(GroupRole::Decode));
        let spawned = state.workers.loaded().filter(|(_, w)| w.rank.0 < self.spawned_workers()).count();
        state.started |= spawned >= self.spawned_workers() as usize;
        self.metrics.ready(state.workers.loaded().count());
        let serving = state.started && reliable && !state.draining;
        let ready = if serving { HealthState::Ok } else { HealthState::Not(self.why_not_ready(state)) };
        self.health.set_ready(ready);
    }

    pub(super) fn why_not_ready(&self, state: &State) -> String {
        if state.draining {
            return "draining".into();
        }
        let troubles = state.ranks.details();
        let loaded = state.workers.loaded().count();
        let mut summary = format!("{loaded} of {} workers are loaded", self.spawned_workers());
        for role in [GroupRole::Prefill, GroupRole::Decode, GroupRole::Encode] {
            if state.workers.has_role(role) && state.workers.ready_for(role).next().is_none() {
                summary.push_str(&format!(", none of them {} {} group", role.article(), role.label()));
            }
        }
        if troubles.is_empty() { summary } else { format!("{summary}; {}", troubles.join("; ")) }
    }
}
