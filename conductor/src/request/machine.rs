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
mod losses;
mod rows;

use std::{sync::Arc, time::Instant};

use tutti_proto::{
    CheckedRequest, GraphKey, Incarnation, RequestId, WorkerId, cluster::v1 as pb, declaration::WalkId,
};
use tutti_runtime::{Error, prefix_index::PromptPieces, request_id::XRequestId, trace::TraceContext};

use self::encoding::Encoding;
pub use self::{encoding::RoomFor, losses::Waiting};
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

/// The launched graphs of the current try, except the encoder's.
#[derive(Debug)]
enum Stage {
    Waiting,
    Reserving {
        decode: Run,
    },
    Prefilling {
        prefill: Run,
        decode: Run,
        /// Rows of the decode that arrived before the prefill's last row, because messages of two workers may overtake
        /// each other. These rows have at most the request's `max_tokens` tokens.
        early: Vec<pb::RowReport>,
    },
    Running {
        run: Run,
    },
}

/// Iterates over the runs of a stage. The items are `Run`, `&Run` or `&mut Run`, as the stage is passed by value, by
/// reference or by mutable reference.
macro_rules! runs_of {
    ($stage:expr) => {{
        let (first, second) = match $stage {
            Stage::Waiting => (None, None),
            Stage::Reserving { decode: run } | Stage::Running { run } => (Some(run), None),
            Stage::Prefilling { prefill, decode, .. } => (Some(prefill), Some(decode)),
        };
        first.into_iter().chain(second)
    }};
}

impl Stage {
    /// The run that receives the media's embeddings: the run of the prefill, or the run of the whole request.
    fn prefilling(&self) -> Option<&Run> {
        match self {
            Self::Prefilling { prefill: run, .. } | Self::Running { run } => Some(run),
            Self::Waiting | Self::Reserving { .. } => None,
        }
    }

    fn runs(&self) -> impl Iterator<Item = &Run> {
        runs_of!(self)
    }

    fn runs_mut(&mut self) -> impl Iterator<Item = &mut Run> {
        runs_of!(self)
    }

    fn into_runs(self) -> impl Iterator<Item = Run> {
        runs_of!(self)
    }
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

    /// Launches the request's first graph on `members`: the whole request, a prefill without a decode, or a decode,
    /// which reserves room first. The returned message carries the time that is left until the deadline. Returns `None`
    /// and changes nothing unless the request waits for a placement.
    pub fn launch(&mut self, role: GraphRole, members: Members, now: Instant) -> Option<pb::LaunchGraph> {
        if !self.is_waiting() {
            return None;
        }
        self.spans.placed();
        let mut message = self.message(role, now);
        let run = self.begin(role, members);
        let stage = match role {
            GraphRole::Whole | GraphRole::Prefill => {
                self.await_embeddings(&mut message);
                Stage::Running { run }
            }
            GraphRole::Decode => {
                message.receive = Some(self.reservation.clone());
                Stage::Reserving { decode: run }
            }
            // An encoder is never the first graph, because the graph that receives the embeddings must be launched
            // first.
            GraphRole::Encode => return None,
        };
        self.enter(stage);
        Some(message)
    }

    /// Returns the purpose of the room that a worker's `Reserved` message announces, or why the message is dropped.
    pub fn check_reserved(&self, from: WorkerId, key: GraphKey) -> Result<RoomFor, Dropped> {
        let Phase::Live { stage, encoding, .. } = &self.phase else { return Err(self.why_unmatched(key)) };
        let (run, purpose) = match stage {
            Stage::Reserving { decode } => (Some(decode), RoomFor::Planes),
            _ => (stage.prefilling().filter(|_| encoding.is_due()), RoomFor::Embeddings),
        };
        match run {
            Some(run) if run.key == key && run.leader() == Some(from) => Ok(purpose),
            Some(run) if run.key == key => Err(Dropped::Unknown),
            _ if stage.runs().any(|run| run.key == key) => Err(Dropped::Duplicate),
            _ => Err(self.why_unmatched(key)),
        }
    }

    /// Launches the prefill on `members`. The prefill pushes its planes to `room`, which the decode's worker has
    /// reserved. Returns `None` and changes nothing unless the request is `Reserving`.
    pub fn launch_prefill(
        &mut self,
        members: Members,
        room: ReservedRoom,
        now: Instant,
    ) -> Option<pb::LaunchGraph> {
        let Phase::Live { stage: Stage::Reserving { decode }, .. } = &self.phase else { return None };
        let send_to = self.destination(decode.key, room, &members);
        let mut message = pb::LaunchGraph { send_to: Some(send_to), ..self.message(GraphRole::Prefill, now) };
        self.await_embeddings(&mut message);
        let prefill = self.begin(GraphRole::Prefill, members);
        if let Phase::Live { stage, .. } = &mut self.phase {
            *stage = match std::mem::replace(stage, Stage::Waiting) {
                Stage::Reserving { decode } => Stage::Prefilling { prefill, decode, early: Vec::new() },
                other => other,
            };
        }
        Some(message)
    }

    /// The destination of what `members`, the leader first, send to a graph.
    fn destination(&self, to: GraphKey, room: ReservedRoom, members: &Members) -> pb::PlaneDestination {
        let pb::PlaneReservation { secret, lease_ms } = self.reservation.clone();
        pb::PlaneDestination {
            key: Some(to.into()),
            address: room.address,
            secret,
            lease_ms,
            layout_hash: room.layout_hash,
            shared_memory: room.shared_memory,
            known_pages: room.known_pages,
            ranks: room.ranks,
            sender: members.keys().next().map_or(0, |leader| leader.0),
        }
    }

    fn message(&self, role: GraphRole, now: Instant) -> pb::LaunchGraph {
        pb::LaunchGraph {
            key: Some(self.key(role).into()),
            walks: role.walks(self.walks, &self.encoders),
            spec: Some(encoding::spec_for(role, &self.spec)),
            generated: if role == GraphRole::Encode { Vec::new() } else { self.generated.clone() },
            timeout_ms: self.deadline.map(|deadline| deadline.left_ms(now)),
            trace: self.spans.to_message(),
            share: self.share,
            request_id: self.spans.request_id().to_owned(),
            ..Default::default()
        }
    }

    fn begin(&self, role: GraphRole, members: Members) -> Run {
        let key = self.key(role);
        self.spans.in_scope(|| tracing::debug!(%key, ?role, ranks = ?members.keys(), "launched"));
        self.spans.launched(key, role, &members);
        Run::new(key, members, self.generated.len())
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

/// Room for planes or embeddings at a worker, as its `Reserved` message describes it.
#[derive(Clone, Debug)]
pub struct ReservedRoom {
    /// `ip:port` at which other workers reach the worker.
    pub address: String,
    /// Layout of the planes or embeddings. Sender and receiver must agree on the layout.
    pub layout_hash: u64,
    /// Path of the shared memory that senders on the same machine write to; empty if there is none.
    pub shared_memory: String,
    /// Number of leading pages that the receiver already has and that are not sent.
    pub known_pages: u32,
    /// Rooms at the other ranks of the receiving TP group, from rank 1 on, for those ranks' shares of the planes.
    pub ranks: Vec<pb::RankDestination>,
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
