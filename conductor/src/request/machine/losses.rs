//! Losses: the end of a try, and the start of the next one.

use tutti_proto::{GraphKey, WorkerId, cluster::v1 as pb};
use tutti_runtime::Error;

use super::{Effects, Encoding, MAX_MOVES, Phase, Request, Stage};
use crate::mailbox::Ending;

/// Where a request waits for its first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The worker that runs the step.
    pub leader: WorkerId,
    /// The graph at that worker.
    pub key: GraphKey,
    /// The worker that has reserved room for the decode, if the step is the prefill of another worker.
    pub decode: Option<WorkerId>,
}

impl Request {
    /// Handles the loss of a worker. A request that ran on the lost worker is tried again. After its last try the
    /// request fails with `why`.
    pub fn on_worker_lost(&mut self, worker: WorkerId, why: &str) -> Effects {
        let mut released = Vec::new();
        for run in &mut self.leaving {
            if run.lose(worker) {
                released.push((worker, run.key));
            }
        }
        self.leaving.retain(|run| !run.is_over());
        let mut needed = false;
        if let Phase::Live { stage, encoding, .. } = &mut self.phase {
            for run in stage.runs_mut().chain(encoding.run_mut()) {
                if run.lose(worker) {
                    released.push((worker, run.key));
                    needed = true;
                }
            }
        }
        let effects = if needed { self.on_try_lost(why) } else { Effects::default() };
        Effects { released, ..effects }
    }

    /// Starts the next try after a loss, or ends the request.
    fn on_try_lost(&mut self, why: &str) -> Effects {
        let Phase::Live { stage, .. } = &self.phase else { return Effects::default() };
        let all_here = |finished: &pb::Finished| finished.generated as usize == self.generated.len();
        let ended = |finished: &pb::Finished| finished.reason() != pb::FinishReason::Unspecified;
        let finished = stage.runs().filter_map(|run| run.finished).find(|f| all_here(f) && ended(f));
        let in_vain = stage.runs().all(|run| run.tokens_before == self.generated.len());
        if let Some(finished) = finished {
            // All tokens have arrived, so the request ends: another try would have nothing to generate.
            return self.end_early(Ending::Finished(self.as_first_computed(finished)));
        }
        self.lost += 1;
        if self.lost > self.max_replays {
            let times = if self.lost == 1 { "once".to_owned() } else { format!("{} times", self.lost) };
            let message = format!("the request was tried {times} and lost its worker each time: {why}");
            return self.end_early(Ending::Failed(Error::unavailable(message)));
        }
        self.in_vain = in_vain;
        self.replay(why)
    }

    /// Where the request waits for its first step. `None` if it does not wait or may not go elsewhere. Requests with
    /// media stay, because a worker may have encoded the media already.
    pub fn waiting(&self) -> Option<Waiting> {
        let Phase::Live { stage, .. } = &self.phase else { return None };
        let (run, decode) = match stage {
            Stage::Running { run } | Stage::Reserving { decode: run } => (run, None),
            // A decode that generates already has the planes of the prefill, whose report is late.
            Stage::Prefilling { prefill, decode, early } if early.is_empty() => (prefill, decode.leader()),
            Stage::Prefilling { .. } => return None,
            Stage::Waiting => return None,
        };
        let may_move = self.moves < MAX_MOVES && self.encoders.is_empty();
        let is_new = run.tokens_before == self.generated.len() && run.finished.is_none() && !run.is_over();
        let leader = run.leader().filter(|_| may_move && is_new)?;
        Some(Waiting { leader, key: run.key, decode })
    }

    /// Starts the request over because another worker can begin it sooner. The try does not count as lost.
    pub fn move_on(&mut self) -> Effects {
        if self.waiting().is_none() {
            return Effects::default();
        }
        self.moves += 1;
        self.spans.in_scope(|| tracing::debug!("moves before it begins"));
        self.start_over()
    }

    /// Handles a failed transfer of planes or embeddings.
    pub(super) fn on_handover_failed(&mut self, why: &Error) -> Effects {
        self.failed_handovers += 1;
        if self.failed_handovers > self.max_replays {
            let times = self.failed_handovers;
            let message = format!("the request could not be handed over, {times} times in all: {why}");
            return self.end_early(Ending::Failed(Error::unavailable(message)));
        }
        self.replay(&format!("it could not be handed over: {why}"))
    }

    fn replay(&mut self, why: &str) -> Effects {
        let effects = self.start_over();
        self.spans.in_scope(|| {
            tracing::info!(incarnation = %self.incarnation, tokens = self.generated.len(), why, "starts over");
        });
        Effects { replayed: true, ..effects }
    }

    pub(super) fn start_over(&mut self) -> Effects {
        let Phase::Live { stage, encoding, .. } = &mut self.phase else { return Effects::default() };
        let stage = std::mem::replace(stage, Stage::Waiting);
        let encoding = std::mem::replace(encoding, Encoding::Over);
        let cancel = self.leave(stage, encoding);
        self.incarnation = self.incarnation.next();
        self.spans.waits();
        Effects { needs_placement: true, cancel, ..Effects::default() }
    }
}
