//! The state machine of one request.
//!
//! | phase   | event                                                    | next phase | what follows                          |
//! |---------|----------------------------------------------------------|------------|---------------------------------------|
//! | Waiting | a place for its next graph                               | Running    | `LaunchGraph` to every rank           |
//! | Waiting | cancel, deadline, nowhere to run                         | Ended      | the ending                            |
//! | Running | a row whose next token is the expected one               | Running    | the tokens go to the mailbox          |
//! | Running | a row of another try or graph, or tokens seen before     | Running    | dropped, counted                      |
//! | Running | a row that leaves a gap                                  | Ended      | failed: internal; `CancelGraph`       |
//! | Running | finished by a rank, others pending                       | Running    | the rank lets go                      |
//! | Running | finished by the last rank, with a reason                 | Ended      | finished                              |
//! | Running | finished by the last rank, no reason, graphs to go       | Waiting    | the caller finds the next place       |
//! | Running | finished, but ranks or token counts disagree             | Ended      | failed: internal; `CancelGraph`       |
//! | Running | failed or refused by a rank                              | Ended      | failed; `CancelGraph` to the others   |
//! | Running | a worker of the group is lost, replays are left          | Waiting    | replay: the next incarnation, from its first graph; `CancelGraph` to the others |
//! | Running | a worker of the group is lost, no replay is left         | Ended      | failed: unavailable; `CancelGraph` to the others |
//! | Running | a worker of the group is lost, a rank finished, and all tokens are here | Ended | finished; `CancelGraph` to the others |
//! | Running | cancel, deadline                                         | Ended      | the ending; `CancelGraph`             |
//! | any     | any outcome of a run that is over for the client, or its worker's loss | same | the rank lets go            |
//! | any     | a stale, duplicate or unknown completion                 | same       | dropped, counted                      |
//!
//! A run that is over for the client may still hold a worker's memory. It is kept among the *leaving* until every rank
//! has let go, and the request counts as in flight for as long. The mailbox's sender lives in Waiting and Running and is
//! consumed by the ending, so there can be only one.
//!
//! A replay starts from the prompt and all tokens that have come so far. They are not sent again: the new incarnation's
//! first token is the one after them, and random numbers, penalties and counts go by positions and by the whole output,
//! so the client's stream goes on as if nothing had happened.

use std::{sync::Arc, time::Instant};

use tracing::{Span, field};
use tutti_proto::{Epoch, GraphId, GraphKey, Incarnation, RequestId, WorkerId, cluster::v1 as pb};
use tutti_runtime::Error;

use super::{Deadline, Dropped, Effects, EndingKind, GraphPlan, Placement, RowOutcome, run::Run};
use crate::mailbox::{self, Ending};

/// One request, from acceptance until no worker holds anything of it.
#[derive(Debug)]
pub struct Request {
    id: RequestId,
    spec: Arc<pb::RequestSpec>,
    deadline: Option<Deadline>,
    graphs: Vec<GraphPlan>,
    /// Which try this is. Replay makes a new one.
    incarnation: Incarnation,
    max_replays: u32,
    /// The last try was lost before it brought a token, as one is that brings its worker down.
    in_vain: bool,
    /// Which of `graphs` is running, or is to run next.
    graph: usize,
    /// Output so far: a later graph or a replay starts from prompt and this.
    generated: Vec<u32>,
    /// The prompt token whose logprob comes next. Token 0 has none.
    next_scored: u32,
    /// Prompt tokens that the try which computed the whole prompt first did not have to compute.
    cached_tokens: Option<u32>,
    phase: Phase,
    /// Runs that are over for the client.
    leaving: Vec<Run>,
    /// From acceptance until no worker holds anything of it.
    span: Span,
}

#[derive(Debug)]
enum Phase {
    Waiting { output: mailbox::Sender },
    Running { output: mailbox::Sender, run: Run },
    Ended,
}

impl Request {
    /// A request that has passed the door. `graphs` has at least one. When its workers die, it is tried again up to
    /// `max_replays` times.
    pub fn accept(
        id: RequestId,
        spec: pb::RequestSpec,
        deadline: Option<Deadline>,
        graphs: Vec<GraphPlan>,
        max_replays: u32,
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
            max_replays,
            in_vain: false,
            graph: 0,
            generated: Vec::new(),
            next_scored: 1,
            cached_tokens: None,
            phase: Phase::Waiting { output },
            leaving: Vec::new(),
        }
    }

    /// The same request, behind output that it has had elsewhere.
    #[must_use]
    pub fn behind(self, generated: Vec<u32>) -> Self {
        Self { generated, ..self }
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
        matches!(self.phase, Phase::Ended) && self.leaving.is_empty()
    }

    /// Whether its client still waits for an ending.
    pub fn is_live(&self) -> bool {
        !matches!(self.phase, Phase::Ended)
    }

    /// Whether it waits for a place.
    pub fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Waiting { .. })
    }

    /// Whether it may be what brings its workers down: its last try came to nothing, and it has one left. Two of this
    /// kind on one worker could cost each other that one.
    pub fn is_suspect(&self) -> bool {
        self.in_vain && self.incarnation.0 == self.max_replays
    }

    /// Starts the next graph there, with the time that is left of its deadline. `None`, and no change, unless the request
    /// waits for a place.
    pub fn launch(&mut self, placement: Placement, now: Instant) -> Option<pb::LaunchGraph> {
        let graph = self.graphs.get(self.graph)?;
        let key = self.key();
        let message = || pb::LaunchGraph {
            key: Some(key.into()),
            walks: graph.walks.iter().map(|walk| walk.0).collect(),
            spec: Some(self.spec.as_ref().clone()),
            generated: self.generated.clone(),
            timeout_ms: self.deadline.map(|deadline| deadline.left_ms(now)),
        };
        match std::mem::replace(&mut self.phase, Phase::Ended) {
            Phase::Waiting { output } => {
                self.span.in_scope(|| tracing::debug!(%key, ranks = ?placement.keys(), "launched"));
                let message = message();
                self.phase = Phase::Running { output, run: Run::new(key, placement, self.generated.len()) };
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
        let current = self.key();
        let Phase::Running { output, run } = &mut self.phase else { return lost };
        if row.key.map(GraphKey::from) != Some(current) || run.leader() != Some(from) {
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
            return RowOutcome { dropped: arrived, ..self.break_row(message) };
        }
        let prompt_logprobs = match unscored(row.prompt_logprobs, self.next_scored) {
            Ok(piece) => piece,
            Err(message) => return RowOutcome { dropped: arrived, ..self.break_row(message) },
        };
        if let Some(piece) = &prompt_logprobs {
            self.next_scored = piece.first + piece.tokens.len() as u32;
        }
        run.next_epoch = run.next_epoch.max(Epoch(row.epoch).next());
        // The client's prompt was computed once as far as the client can tell, and it is that time which counts.
        if next == 0 && !fresh.is_empty() {
            self.cached_tokens = row.cached_tokens;
        }
        self.generated.extend(fresh.iter().map(|token| token.token_id));
        let taken = fresh.len();
        if taken > 0 || prompt_logprobs.is_some() {
            output.push(fresh, prompt_logprobs);
        }
        RowOutcome { taken, dropped: arrived - taken, effects: Effects::default() }
    }

    /// Takes one rank's word that its part of a graph is over.
    pub fn on_completion(&mut self, from: WorkerId, completion: pb::Completion) -> Effects {
        let drop = |why| Effects { dropped: Some(why), ..Effects::default() };
        let current = self.key();
        let Some(key) = completion.key.map(GraphKey::from) else { return drop(Dropped::Unknown) };
        if let Some(place) = self.leaving.iter().position(|run| run.key == key) {
            let run = &mut self.leaving[place];
            if let Err(why) = run.let_go(from, &completion) {
                return drop(why);
            }
            if run.is_over() {
                self.leaving.swap_remove(place);
            }
            return Effects { released: vec![(from, key)], ..Effects::default() };
        }
        match &mut self.phase {
            Phase::Running { run, .. } if key == current => {
                if let Err(why) = run.let_go(from, &completion) {
                    return drop(why);
                }
                let mut effects = self.on_outcome(completion.outcome);
                effects.released.push((from, key));
                effects
            }
            _ if key < current => drop(Dropped::Stale),
            Phase::Ended if key == current => drop(Dropped::Stale),
            _ => drop(Dropped::Unknown),
        }
    }

    /// Ends the request for its client now; workers that run it are told to let go. No-op once it has ended.
    pub fn end_early(&mut self, ending: Ending) -> Effects {
        let mut effects = Effects::default();
        if self.is_live() {
            self.span.record("ending", field::debug(&ending));
            self.span.in_scope(|| tracing::debug!(tokens = self.generated.len(), ?ending, "ended"));
        }
        match std::mem::replace(&mut self.phase, Phase::Ended) {
            Phase::Waiting { output } => effects.ended = Some(conclude(output, ending)),
            Phase::Running { output, run } => {
                effects.ended = Some(conclude(output, ending));
                effects.cancel = self.leave(run);
            }
            Phase::Ended => {}
        }
        effects
    }

    /// A worker is gone with all it held. What ran there is tried again, or fails with `why` where that was the last try.
    pub fn on_worker_lost(&mut self, worker: WorkerId, why: &str) -> Effects {
        let mut released = Vec::new();
        for run in &mut self.leaving {
            if run.lose(worker) {
                released.push((worker, run.key));
            }
        }
        self.leaving.retain(|run| !run.is_over());
        let mut effects = Effects::default();
        if let Phase::Running { run, .. } = &mut self.phase
            && run.lose(worker)
        {
            released.push((worker, run.key));
            effects = self.on_run_lost(why);
        }
        effects.released = released;
        effects
    }

    /// The run cannot go on without what was lost.
    fn on_run_lost(&mut self, why: &str) -> Effects {
        let Phase::Running { run, .. } = &self.phase else { return Effects::default() };
        let all_here = |finished: &pb::Finished| finished.generated as usize == self.generated.len();
        if let Some(finished) =
            run.finished.filter(|f| all_here(f) && f.reason() != pb::FinishReason::Unspecified)
        {
            // Another try would go on behind the end.
            return self.end_early(Ending::Finished(self.as_first_computed(finished)));
        }
        let tries = self.incarnation.0 + 1;
        if tries > self.max_replays {
            let times = if tries == 1 { "once".to_owned() } else { format!("{tries} times") };
            let message = format!("the request was tried {times} and lost its worker each time: {why}");
            return self.end_early(Ending::Failed(Error::unavailable(message)));
        }
        self.in_vain = run.had == self.generated.len();
        let mut effects = Effects { place: true, replayed: true, ..Effects::default() };
        if let Phase::Running { output, run } = std::mem::replace(&mut self.phase, Phase::Ended) {
            effects.cancel = self.leave(run);
            self.phase = Phase::Waiting { output };
        }
        self.incarnation = self.incarnation.next();
        self.graph = 0;
        self.span.in_scope(|| {
            tracing::info!(key = %self.key(), tokens = self.generated.len(), why, "starts over");
        });
        effects
    }

    /// The run is over for the client. Gives those that are to be told so.
    fn leave(&mut self, run: Run) -> Vec<(WorkerId, GraphKey)> {
        let holders = run.holders();
        if !run.is_over() {
            self.leaving.push(run);
        }
        holders
    }

    fn on_outcome(&mut self, outcome: Option<pb::completion::Outcome>) -> Effects {
        use pb::completion::Outcome;
        let Phase::Running { run, .. } = &mut self.phase else { return Effects::default() };
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
        if !run.is_over() {
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
            return self.end_early(Ending::Finished(self.as_first_computed(finished)));
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

    fn as_first_computed(&self, finished: pb::Finished) -> pb::Finished {
        pb::Finished { cached_tokens: self.cached_tokens.unwrap_or(finished.cached_tokens), ..finished }
    }

    fn break_off(&mut self, why: String) -> Effects {
        self.end_early(Ending::Failed(Error::internal(format!("request {}: {why}", self.id))))
    }

    fn break_row(&mut self, why: String) -> RowOutcome {
        RowOutcome { effects: self.break_off(why), ..RowOutcome::default() }
    }
}

/// What of a piece is behind those that have been sent; a try that starts over computes all of them again.
fn unscored(piece: Option<pb::PromptLogprobs>, next: u32) -> Result<Option<pb::PromptLogprobs>, String> {
    let Some(mut piece) = piece else { return Ok(None) };
    let Some(seen) = next.checked_sub(piece.first) else {
        return Err(format!(
            "the logprob of prompt token {} arrived where that of {next} was due",
            piece.first
        ));
    };
    piece.tokens.drain(..piece.tokens.len().min(seen as usize));
    piece.first = next;
    Ok(Some(piece).filter(|piece| !piece.tokens.is_empty()))
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

#[cfg(test)]
#[path = "replay_tests.rs"]
mod replay_tests;

#[cfg(test)]
#[path = "death_properties.rs"]
mod death_properties;
