//! The state machine of one request.
//!
//! | phase     | event                                                | next phase | what follows                         |
//! |-----------|------------------------------------------------------|------------|--------------------------------------|
//! | Waiting   | a place for its next graph                           | Running    | `LaunchGraph` to every rank          |
//! | Waiting   | cancel, deadline, nowhere to run                     | Ended      | the ending                           |
//! | Running   | a row whose next token is the expected one           | Running    | the tokens go to the mailbox         |
//! | Running   | a row of another try or graph, or tokens seen before | Running    | dropped, counted                     |
//! | Running   | a row that leaves a gap                              | Releasing  | failed: internal; `CancelGraph`      |
//! | Running   | finished by a rank, others pending                   | Running    | the rank leaves the set              |
//! | Running   | finished by the last rank, with a reason             | Ended      | finished                             |
//! | Running   | finished by the last rank, no reason, graphs to go   | Waiting    | the caller finds the next place      |
//! | Running   | finished, but ranks or token counts disagree         | Releasing¹ | failed: internal                     |
//! | Running   | failed or refused by a rank                          | Releasing¹ | failed; `CancelGraph` to the others  |
//! | Running   | a worker of the group is lost                        | Releasing¹ | failed; `CancelGraph` to the others  |
//! | Running   | cancel, deadline                                     | Releasing  | the ending; `CancelGraph`            |
//! | Releasing | any outcome of a pending rank, or its worker's loss  | Releasing¹ | the rank leaves the set              |
//! | any       | a stale, duplicate or unknown completion             | same       | dropped, counted                     |
//!
//! ¹ Ended, where no rank is pending any more.
//!
//! *Releasing* is a request that has ended for its client while a worker may still hold memory for it: it counts as in
//! flight until every rank has let go. The mailbox's sender lives in Waiting and Running and is consumed by the ending,
//! so there can be only one.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use tracing::{Span, field};
use tutti_proto::{Epoch, GraphId, GraphKey, Incarnation, Rank, RequestId, WorkerId, cluster::v1 as pb};
use tutti_runtime::{Error, ErrorKind};

use super::{Deadline, GraphPlan};
use crate::mailbox::{self, Ending};

/// The ranks that run a worker graph, each on its worker. The lowest rank leads: its rows carry the tokens.
pub type Placement = BTreeMap<Rank, WorkerId>;

/// Why a message was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dropped {
    /// Of an earlier try, graph or pass.
    Stale,
    /// Said before.
    Duplicate,
    /// Of nothing that this worker was ever given.
    Unknown,
}

/// What became of a row.
#[derive(Debug, Default, PartialEq)]
pub struct RowOutcome {
    /// Tokens that were new.
    pub taken: usize,
    /// Tokens that were not, and are gone.
    pub dropped: usize,
    /// What the row led to where it broke the request.
    pub effects: Effects,
}

/// An ending without its contents, for counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndingKind {
    /// Ran to its end.
    Finished,
    /// Taken back by its client.
    Cancelled,
    /// Failed, and how.
    Failed(ErrorKind),
    /// Turned away at a worker's door, and why.
    Refused(ErrorKind),
}

/// What the caller has to do after an event.
#[derive(Debug, Default, PartialEq)]
pub struct Effects {
    /// Tell these workers to let go of the current graph.
    pub cancel: Vec<WorkerId>,
    /// These workers hold nothing of the current graph any more.
    pub released: Vec<WorkerId>,
    /// Find a place for the next graph.
    pub place: bool,
    /// The client has been told this ending.
    pub ended: Option<EndingKind>,
    /// The message was dropped.
    pub dropped: Option<Dropped>,
}

/// One request, from acceptance until no worker holds anything of it.
#[derive(Debug)]
pub struct Request {
    id: RequestId,
    spec: Arc<pb::RequestSpec>,
    deadline: Option<Deadline>,
    graphs: Vec<GraphPlan>,
    /// Which try this is. Replay makes a new one.
    incarnation: Incarnation,
    /// Which of `graphs` is running, or is to run next.
    graph: usize,
    /// Output so far: a later graph or a replay starts from prompt and this.
    generated: Vec<u32>,
    phase: Phase,
    /// From acceptance until no worker holds anything of it.
    span: Span,
}

#[derive(Debug)]
enum Phase {
    Waiting { output: mailbox::Sender },
    Running { output: mailbox::Sender, run: Run },
    Releasing { run: Run },
    Ended,
}

/// One worker graph at its workers.
#[derive(Debug)]
struct Run {
    members: Placement,
    pending: Placement,
    /// The pass after the last one that a row was seen of.
    next_epoch: Epoch,
    /// What the first rank to finish said; the others must say the same.
    finished: Option<pb::Finished>,
}

impl Run {
    fn new(members: Placement) -> Self {
        Self { pending: members.clone(), members, next_epoch: Epoch(0), finished: None }
    }

    fn leader(&self) -> Option<WorkerId> {
        self.members.values().next().copied()
    }

    fn pending_workers(&self) -> Vec<WorkerId> {
        self.pending.values().copied().collect()
    }
}

impl Request {
    /// A request that has passed the door. `graphs` has at least one.
    pub fn accept(
        id: RequestId,
        spec: pb::RequestSpec,
        deadline: Option<Deadline>,
        graphs: Vec<GraphPlan>,
        output: mailbox::Sender,
    ) -> Self {
        let span =
            tracing::info_span!("request", %id, prompt_tokens = spec.prompt.len(), ending = field::Empty);
        Self {
            id,
            span,
            spec: Arc::new(spec),
            deadline,
            graphs,
            incarnation: Incarnation(0),
            graph: 0,
            generated: Vec::new(),
            phase: Phase::Waiting { output },
        }
    }

    /// What was asked for.
    pub fn spec(&self) -> &pb::RequestSpec {
        &self.spec
    }

    /// The name of the graph that runs, or is to run next.
    pub fn key(&self) -> GraphKey {
        GraphKey { request: self.id, incarnation: self.incarnation, graph: GraphId(self.graph as u32) }
    }

    /// Whether nothing is left of it anywhere.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Ended)
    }

    /// Whether its client still waits for an ending.
    pub fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Waiting { .. } | Phase::Running { .. })
    }

    /// Starts the next graph there, with the time that is left of its deadline. `None`, and no change, unless the request
    /// waits for a place.
    pub fn launch(&mut self, placement: Placement, now: Instant) -> Option<pb::LaunchGraph> {
        let graph = self.graphs.get(self.graph)?;
        let message = pb::LaunchGraph {
            key: Some(self.key().into()),
            walks: graph.walks.iter().map(|walk| walk.0).collect(),
            spec: Some(self.spec.as_ref().clone()),
            generated: self.generated.clone(),
            timeout_ms: self.deadline.map(|deadline| deadline.left_ms(now)),
        };
        match std::mem::replace(&mut self.phase, Phase::Ended) {
            Phase::Waiting { output } => {
                self.span
                    .in_scope(|| tracing::debug!(key = %self.key(), ranks = ?placement.keys(), "launched"));
                self.phase = Phase::Running { output, run: Run::new(placement) };
                Some(message)
            }
            other => {
                self.phase = other;
                None
            }
        }
    }

    /// Takes a row's tokens, in order and each once.
    pub fn on_row(&mut self, from: WorkerId, row: pb::RowReport) -> RowOutcome {
        let arrived = row.tokens.len();
        let lost = RowOutcome { dropped: arrived, ..RowOutcome::default() };
        if row.key.map(GraphKey::from) != Some(self.key()) {
            return lost;
        }
        let Phase::Running { output, run } = &mut self.phase else { return lost };
        if run.leader() != Some(from) {
            return lost;
        }
        let next = self.generated.len();
        let seen = row.tokens.iter().take_while(|token| (token.index as usize) < next).count();
        let mut fresh = row.tokens;
        fresh.drain(..seen);
        if let Some(gap) =
            fresh.iter().zip(next..).find(|(token, expected)| token.index as usize != *expected)
        {
            let message = format!("token {} arrived where token {} was due", gap.0.index, gap.1);
            return RowOutcome {
                dropped: arrived,
                effects: self.end_early(Ending::Failed(Error::internal(message))),
                ..RowOutcome::default()
            };
        }
        // A row said twice brings its prompt logprobs twice; its epoch tells.
        let again = row.epoch < run.next_epoch.0;
        run.next_epoch = run.next_epoch.max(Epoch(row.epoch).next());
        let prompt_logprobs = row.prompt_logprobs.filter(|_| !again);
        self.generated.extend(fresh.iter().map(|token| token.token_id));
        let taken = fresh.len();
        if taken > 0 || prompt_logprobs.is_some() {
            output.push(fresh, prompt_logprobs);
        }
        RowOutcome { taken, dropped: arrived - taken, effects: Effects::default() }
    }

    /// Takes one rank's word that its part of the current graph is over.
    pub fn on_completion(&mut self, from: WorkerId, completion: pb::Completion) -> Effects {
        let drop = |why| Effects { dropped: Some(why), ..Effects::default() };
        let current = self.key();
        match completion.key.map(GraphKey::from) {
            Some(key) if key == current => {}
            Some(key) if key < current => return drop(Dropped::Stale),
            _ => return drop(Dropped::Unknown),
        }
        let (Phase::Running { run, .. } | Phase::Releasing { run }) = &mut self.phase else {
            return drop(Dropped::Unknown);
        };
        let rank = Rank(completion.rank);
        if run.members.get(&rank) != Some(&from) {
            return drop(Dropped::Unknown);
        }
        if !run.pending.contains_key(&rank) {
            return drop(Dropped::Duplicate);
        }
        let finished = matches!(completion.outcome, Some(pb::completion::Outcome::Finished(_)));
        if finished && Epoch(completion.epoch) < run.next_epoch {
            return drop(Dropped::Stale);
        }
        run.pending.remove(&rank);
        let mut effects = self.on_outcome(completion.outcome);
        effects.released.push(from);
        effects
    }

    /// Ends the request for its client now; workers that run it are told to let go. No-op once it has ended.
    pub fn end_early(&mut self, ending: Ending) -> Effects {
        let mut effects = Effects::default();
        if self.is_live() {
            self.span.record("ending", field::debug(&ending));
            self.span.in_scope(|| tracing::debug!(tokens = self.generated.len(), ?ending, "ended"));
        }
        self.phase = match std::mem::replace(&mut self.phase, Phase::Ended) {
            Phase::Waiting { output } => {
                effects.ended = Some(conclude(output, ending));
                Phase::Ended
            }
            Phase::Running { output, run } => {
                effects.ended = Some(conclude(output, ending));
                effects.cancel = run.pending_workers();
                if run.pending.is_empty() { Phase::Ended } else { Phase::Releasing { run } }
            }
            other => other,
        };
        effects
    }

    /// A worker is gone with all it held.
    pub fn on_worker_lost(&mut self, worker: WorkerId, why: &str) -> Effects {
        let (Phase::Running { run, .. } | Phase::Releasing { run }) = &mut self.phase else {
            return Effects::default();
        };
        let before = run.pending.len();
        run.pending.retain(|_, holder| *holder != worker);
        let held = run.pending.len() < before;
        if !held {
            return Effects::default();
        }
        let mut effects = match &self.phase {
            Phase::Running { .. } => self.end_early(Ending::Failed(Error::unavailable(why))),
            _ => Effects::default(),
        };
        self.settle();
        effects.released.push(worker);
        effects
    }

    fn on_outcome(&mut self, outcome: Option<pb::completion::Outcome>) -> Effects {
        use pb::completion::Outcome;
        let Phase::Running { run, .. } = &mut self.phase else {
            self.settle();
            return Effects::default();
        };
        let finished = match outcome {
            Some(Outcome::Finished(finished)) => finished,
            Some(Outcome::Failed(fault)) => return self.end_early(Ending::Failed(fault.into())),
            Some(Outcome::Refused(fault)) => return self.end_early(Ending::Refused(fault.into())),
            Some(Outcome::Cancelled(_)) => return self.break_off("a worker cancelled it unasked".into()),
            None => return self.break_off("a completion came without an outcome".into()),
        };
        if let Some(first) = run.finished.replace(finished)
            && first != finished
        {
            return self.break_off(format!("ranks disagree about its end: {first:?} and {finished:?}"));
        }
        if !run.pending.is_empty() {
            return Effects::default();
        }
        if finished.generated as usize != self.generated.len() {
            return self.break_off(format!(
                "its worker counts {} tokens where {} arrived",
                finished.generated,
                self.generated.len()
            ));
        }
        if finished.reason() != pb::FinishReason::Unspecified {
            return self.end_early(Ending::Finished(finished));
        }
        if self.graph + 1 == self.graphs.len() {
            return self.break_off("its last worker graph ended without a reason".into());
        }
        self.graph += 1;
        if let Phase::Running { output, .. } = std::mem::replace(&mut self.phase, Phase::Ended) {
            self.phase = Phase::Waiting { output };
        }
        Effects { place: true, ..Effects::default() }
    }

    fn break_off(&mut self, why: String) -> Effects {
        self.end_early(Ending::Failed(Error::internal(format!("request {}: {why}", self.id))))
    }

    /// Ends a release that nobody is pending in.
    fn settle(&mut self) {
        if matches!(&self.phase, Phase::Releasing { run } if run.pending.is_empty()) {
            self.phase = Phase::Ended;
        }
    }
}

fn conclude(output: mailbox::Sender, ending: Ending) -> EndingKind {
    let kind = match &ending {
        Ending::Finished(_) => EndingKind::Finished,
        Ending::Cancelled => EndingKind::Cancelled,
        Ending::Failed(error) => EndingKind::Failed(error.kind()),
        Ending::Refused(error) => EndingKind::Refused(error.kind()),
    };
    output.end(ending);
    kind
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
