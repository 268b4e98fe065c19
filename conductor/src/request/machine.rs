//! The state machine of one request.
//!
//! A request runs as one worker graph at one worker (or TP group), or as two graphs: the *prefill* at one worker and
//! the *decode* at another worker. The decode is launched first, so that its worker reserves room for the planes (state
//! of the request, such as its KV cache) that the prefill will push. A request with media has one more graph, which
//! encodes the media for the graph that prefills; see `encoding`.
//!
//! docs/request-states.md has the table of stages, events and consequences. `tests/states.rs` produces the table by
//! driving this machine, and fails if the page differs.
//!
//! A *run* is a worker graph that has been launched. A worker may still hold memory for a run that the request no
//! longer needs. The request keeps such a run among the *leaving* runs until every rank has reported its completion,
//! and counts as in flight until then. A request has exactly one ending, because the ending consumes the mailbox's
//! sender.
//!
//! A replay starts from the prompt and all tokens that have arrived so far. Those tokens are not sent to the client
//! again: the new incarnation's first token is the next one. Random numbers, penalties and counts depend on positions
//! and on the whole output, so the client's stream continues unchanged. Lost workers and failed hand-overs are counted
//! separately, because one death can cause one of each: it often shows first as a failed hand-over to the worker, and
//! the replay may be placed on the same worker and be lost with it.

mod blocks;
mod completions;
mod encoding;
mod launches;
mod losses;
mod rows;
mod stage;

use std::sync::Arc;

use tutti_proto::{
    CheckedRequest, GraphKey, Incarnation, RequestId, WorkerId, cluster::v1 as pb, declaration::WalkId,
};
use tutti_runtime::{Error, prefix_index::PromptPieces, request_id::XRequestId, trace::TraceContext};

use self::{encoding::Encoding, stage::Stage};
pub use self::{encoding::RoomFor, launches::ReservedRoom, losses::Waiting};
use super::{
    Deadline, Dropped, Effects, EndingKind, GraphRole, Members, RowOutcome, TextWalks, run::Run,
    trace::RequestTrace,
};
use crate::mailbox::{self, Ending};

/// Number of times that a request moves to another worker before it begins.
pub const MAX_MOVES: u32 = 2;

/// One request, from its acceptance until no worker holds data of the request.
#[derive(Debug)]
pub struct Request {
    id: RequestId,
    spec: Arc<CheckedRequest>,
    deadline: Option<Deadline>,
    /// Id of the caller's share; see [`Origin::share`].
    share: u64,
    walks: TextWalks,
    /// Walks that encode the request's media; empty for text.
    encoders: Vec<WalkId>,
    /// Secret and lease of the room that workers reserve for the request's planes and embeddings.
    reservation: pb::PlaneReservation,
    /// The prompt cut into pieces. The prefix index uses the pieces' hashes to find workers that have received the same
    /// prefix.
    pieces: PromptPieces,
    /// Number of the current try. Each further try increments the number.
    incarnation: Incarnation,
    max_replays: u32,
    /// Number of tries that were lost with a worker.
    lost: u32,
    /// Number of tries that failed because planes or embeddings could not be transferred.
    failed_handovers: u32,
    /// Number of times that the request has moved to another worker before it began.
    moves: u32,
    /// True if the latest try that was lost with a worker had produced no token. This request may then be the cause of
    /// its workers' crashes.
    in_vain: bool,
    /// Output so far. A replay starts from the prompt and these tokens.
    generated: Vec<u32>,
    /// Index of the prompt token whose logprob comes next. Token 0 has no logprob.
    next_scored: u32,
    /// Number of prompt tokens that the first complete prefill found in the prefix cache.
    cached_tokens: Option<u32>,
    phase: Phase,
    /// Runs that the request no longer needs and that some worker still holds.
    leaving: Vec<Run>,
    spans: RequestTrace,
}

/// The inputs of [`Request::accept`].
#[derive(Debug)]
pub struct NewRequest {
    /// The id that this conductor has given to the request.
    pub id: RequestId,
    /// The client's specification, checked. [`super::media`] has checked its media.
    pub spec: CheckedRequest,
    /// The request's deadline; `None` for a request without one.
    pub deadline: Option<Deadline>,
    /// The walks of the served model that prefill and decode text.
    pub walks: TextWalks,
    /// Walks that encode the request's media; empty for text.
    pub encoders: Vec<WalkId>,
    /// Secret and lease of the room that workers reserve for the request's planes and embeddings. All tries use the
    /// same secret, but each try has graph keys of its own.
    pub reservation: pb::PlaneReservation,
    /// The prompt cut into pieces, by which placement finds cached prefixes.
    pub pieces: PromptPieces,
    /// Output tokens that another conductor generated, after which this request continues; empty for a new request.
    pub generated: Vec<u32>,
    /// Maximum number of replays after lost workers. Replays after failed hand-overs have a separate count with the
    /// same maximum.
    pub max_replays: u32,
    /// Receives the request's tokens and its ending.
    pub output: mailbox::Sender,
    /// The router's facts about the request.
    pub origin: Origin,
}

/// A router's facts about a request, besides the request itself.
#[derive(Debug, Default)]
pub struct Origin {
    /// The router's span of the attempt, if the request's trace is sampled.
    pub trace: Option<TraceContext>,
    /// Id of the caller's share. Workers divide memory and steps among these shares. 0 for a caller without an API key.
    pub share: u64,
    /// The id by which the client and all logs name the request.
    pub request_id: Option<XRequestId>,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "a request is live for nearly all of its life")]
enum Phase {
    Live { output: mailbox::Sender, stage: Stage, encoding: Encoding },
    Ended,
}

impl Request {
    /// Creates a request, already validated, that waits for its first placement.
    pub fn accept(new: NewRequest) -> Self {
        let NewRequest { id, spec, deadline, walks, encoders, reservation, pieces, generated, .. } = new;
        let share = new.origin.share;
        let spans = RequestTrace::begin(id, spec.prompt.len(), new.origin);
        Self {
            id,
            spans,
            pieces,
            spec: Arc::new(spec),
            deadline,
            share,
            walks,
            encoders,
            reservation,
            incarnation: Incarnation(0),
            max_replays: new.max_replays,
            lost: 0,
            failed_handovers: 0,
            moves: 0,
            in_vain: false,
            generated,
            next_scored: 1,
            cached_tokens: None,
            phase: Phase::Live { output: new.output, stage: Stage::Waiting, encoding: Encoding::Over },
            leaving: Vec::new(),
        }
    }

    /// The id by which the client and all logs name the request; empty if there is none.
    pub fn request_id(&self) -> &str {
        self.spans.request_id()
    }

    /// The client's specification.
    pub fn spec(&self) -> &CheckedRequest {
        &self.spec
    }

    /// The key of the graph that has this role in the current try.
    pub fn key(&self, role: GraphRole) -> GraphKey {
        GraphKey { request: self.id, incarnation: self.incarnation, graph: role.id() }
    }

    /// True once the request has ended and no worker holds data of the request.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Ended) && self.leaving.is_empty()
    }

    /// True until the client has received an ending.
    pub fn is_live(&self) -> bool {
        !matches!(self.phase, Phase::Ended)
    }

    /// True while the request waits for a placement.
    pub fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Live { stage: Stage::Waiting, .. })
    }

    /// True if a token may follow the token that a prefill samples.
    pub fn may_decode(&self) -> bool {
        self.spec.stopping.max_tokens as usize > self.generated.len() + 1
    }

    /// True if the request may be the cause of its workers' crashes: the latest lost try produced no token, and only
    /// one try is left. Two suspects must not share a worker, since a crash caused by one suspect would use up the last
    /// try of both.
    pub fn is_suspect(&self) -> bool {
        self.in_vain && self.lost == self.max_replays
    }

    fn enter(&mut self, next: Stage) {
        if let Phase::Live { stage, .. } = &mut self.phase {
            *stage = next;
        }
    }

    fn run_mut(&mut self, key: GraphKey) -> Option<&mut Run> {
        match &mut self.phase {
            Phase::Live { stage, encoding, .. } => {
                stage.runs_mut().chain(encoding.run_mut()).find(|run| run.key == key)
            }
            Phase::Ended => None,
        }
    }

    /// Returns why a message is dropped if its graph does not run: the graph is over, or was never launched.
    fn why_unmatched(&self, key: GraphKey) -> Dropped {
        if self.leaving.iter().any(|run| run.key == key) || key.incarnation < self.incarnation {
            return Dropped::Stale;
        }
        match &self.phase {
            Phase::Ended if key.incarnation == self.incarnation => Dropped::Stale,
            Phase::Live { encoding: Encoding::Over, .. }
                if !self.encoders.is_empty() && key == self.key(GraphRole::Encode) =>
            {
                Dropped::Stale
            }
            Phase::Live { stage: Stage::Running { run }, .. }
                if key.incarnation == self.incarnation && key.graph < run.key.graph =>
            {
                Dropped::Stale
            }
            _ => Dropped::Unknown,
        }
    }

    /// Ends the request for its client now and cancels the request's graphs. Does nothing once the request has ended.
    pub fn end_early(&mut self, ending: Ending) -> Effects {
        let Phase::Live { output, stage, encoding } = std::mem::replace(&mut self.phase, Phase::Ended) else {
            return Effects::default();
        };
        self.spans.in_scope(|| tracing::debug!(tokens = self.generated.len(), ?ending, "ended"));
        // A request that has finished was given its embeddings, although the encoder's message is not here yet.
        if matches!(ending, Ending::Finished(_)) && encoding.run().is_some() {
            self.spans.handed_over("embeddings");
        }
        self.spans.ended(&ending);
        let cause = match &ending {
            Ending::Failed(error) | Ending::Refused(error) => error.to_string(),
            Ending::Finished(_) | Ending::Cancelled => String::new(),
        };
        let ended = Some(conclude(output, ending));
        Effects { ended, cause, cancel: self.leave(stage, encoding), ..Effects::default() }
    }

    /// Moves all current runs that are not over to the leaving runs. Returns the graphs to cancel, each with the worker
    /// that holds it.
    fn leave(&mut self, stage: Stage, encoding: Encoding) -> Vec<(WorkerId, GraphKey)> {
        let mut holders = Vec::new();
        for run in stage.into_runs().chain(encoding.into_run()).filter(|run| !run.is_over()) {
            holders.extend(run.holders());
            self.leaving.push(run);
        }
        holders
    }

    fn break_off(&mut self, why: &str) -> Effects {
        self.end_early(Ending::Failed(Error::internal(format!("request {}: {why}", self.id))))
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
mod tests;
