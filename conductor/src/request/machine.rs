//! The state machine of one request.
//!
//! A request runs as one worker graph at one worker (or TP group), or as two: the *prefill* at one, and the *decode* at
//! another, which is launched first so that it holds room for what will be pushed to it. One with media has one graph more,
//! which encodes them for whichever prefills; see `encoding`, whose table goes beside this one.
//!
//! | stage      | event                                                  | next stage | what follows                           |
//! |------------|--------------------------------------------------------|------------|----------------------------------------|
//! | Waiting    | a place for all of it, or for a prefill without decode | Running    | `LaunchGraph` to every rank            |
//! | Waiting    | a place for its decode                                 | Reserving  | `LaunchGraph` with `receive`           |
//! | Waiting    | cancel, deadline, nowhere to run                       | Ended      | the ending                             |
//! | Reserving  | `Reserved` by its leader, and a place for the prefill  | Prefilling | `LaunchGraph` with `send_to`           |
//! | Reserving  | `Reserved`, and no place for the prefill               | Waiting    | the next incarnation, which is no replay; `CancelGraph` |
//! | Prefilling | a row of the prefill                                   | Prefilling | the tokens go to the mailbox           |
//! | Prefilling | a row of the decode that is ahead of the prefill's     | Prefilling | kept until what is before it has come  |
//! | Prefilling | the decode finished                                    | Prefilling | kept; its ranks let go                 |
//! | Prefilling | handed over by the prefill's last rank                 | Running    | what was kept counts now               |
//! | Prefilling | handed over, but tokens are missing                    | Ended      | failed: internal; `CancelGraph`        |
//! | Prefilling | the prefill finished: the first token was the last     | Ended      | finished; `CancelGraph` to the decode  |
//! | Running    | a row whose next token is the expected one             | Running    | the tokens go to the mailbox           |
//! | Running    | a row that leaves a gap                                | Ended      | failed: internal; `CancelGraph`        |
//! | Running    | finished by a rank, others pending                     | Running    | the rank lets go                       |
//! | Running    | finished by the last rank                              | Ended      | finished                               |
//! | Running    | finished, but ranks or token counts disagree           | Ended      | failed: internal; `CancelGraph`        |
//! | R, P, R    | failed or refused by a rank                            | Ended      | failed; `CancelGraph` to the others    |
//! | R, P, R    | a worker is lost or a hand-over fails, tries are left  | Waiting    | replay: the next incarnation; `CancelGraph` to the others |
//! | R, P, R    | a worker is lost or a hand-over fails, none is left    | Ended      | failed: unavailable; `CancelGraph` to the others |
//! | P, R       | a worker is lost, a rank finished, all tokens are here | Ended      | finished; `CancelGraph` to the others  |
//! | R, P, R    | cancel, deadline                                       | Ended      | the ending; `CancelGraph`              |
//! | any        | a row of another try, graph or worker, or seen before  | same       | dropped, counted                       |
//! | any        | any outcome of a run that is over for the client, or its worker's loss | same | the rank lets go             |
//! | any        | a stale, duplicate or unknown completion or `Reserved` | same       | dropped, counted                       |
//!
//! A run that is over for the client may still hold a worker's memory. It is kept among the *leaving* until every rank
//! has let go, and the request counts as in flight for as long. The mailbox's sender lives until the ending consumes it,
//! so there can be only one.
//!
//! A replay starts from the prompt and all tokens that have come so far. They are not sent again: the new incarnation's
//! first token is the one after them, and random numbers, penalties and counts go by positions and by the whole output,
//! so the client's stream goes on as if nothing had happened. Lost workers and failed hand-overs are counted apart: of a
//! worker's death the hand-over to it often tells first, and the next try may still be sent there.

mod blocks;
mod completions;
mod encoding;
mod losses;
mod rows;

use std::{sync::Arc, time::Instant};

use tracing::{Span, field};
use tutti_proto::{GraphKey, Incarnation, RequestId, WorkerId, cluster::v1 as pb, declaration::WalkId};
use tutti_runtime::{Error, prefix_index::PromptPieces};

use self::encoding::Encoding;
pub use self::encoding::RoomFor;
use super::{Deadline, Dropped, Effects, EndingKind, GraphRole, Members, RowOutcome, TextWalks, run::Run};
use crate::mailbox::{self, Ending};

/// One request, from acceptance until no worker holds anything of it.
#[derive(Debug)]
pub struct Request {
    id: RequestId,
    spec: Arc<pb::RequestSpec>,
    deadline: Option<Deadline>,
    walks: TextWalks,
    /// Walks that encode its media; none of a request for text.
    encoders: Vec<WalkId>,
    /// What its planes and embeddings travel under, where they do.
    reservation: pb::PlaneReservation,
    /// Where its prompt is cut, to be found where it has been before.
    pieces: PromptPieces,
    /// Which try this is. Replay makes a new one.
    incarnation: Incarnation,
    max_replays: u32,
    /// Tries that were lost with a worker.
    lost: u32,
    /// Tries whose planes did not get across.
    failed_handovers: u32,
    /// The last try was lost before it brought a token, as one is that brings its worker down.
    in_vain: bool,
    /// Output so far: a replay starts from prompt and this.
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
#[expect(clippy::large_enum_variant, reason = "a request is live for nearly all of its life")]
enum Phase {
    Live { output: mailbox::Sender, stage: Stage, encoding: Encoding },
    Ended,
}

/// What runs where.
#[derive(Debug)]
enum Stage {
    Waiting,
    Reserving {
        decode: Run,
    },
    Prefilling {
        prefill: Run,
        decode: Run,
        /// Rows of the decode ahead of what has come of the prefill: two workers' messages overtake each other. As many
        /// as the decode can run ahead, which ends at the request's last token.
        early: Vec<pb::RowReport>,
    },
    Running {
        run: Run,
    },
}

impl Stage {
    /// What prefills now, or has: where embeddings of the request's media go.
    fn prefilling(&self) -> Option<&Run> {
        match self {
            Self::Prefilling { prefill: run, .. } | Self::Running { run } => Some(run),
            Self::Waiting | Self::Reserving { .. } => None,
        }
    }

    fn runs(&self) -> impl Iterator<Item = &Run> {
        let (first, second) = match self {
            Self::Waiting => (None, None),
            Self::Reserving { decode: run } | Self::Running { run } => (Some(run), None),
            Self::Prefilling { prefill, decode, .. } => (Some(prefill), Some(decode)),
        };
        first.into_iter().chain(second)
    }

    fn runs_mut(&mut self) -> impl Iterator<Item = &mut Run> {
        let (first, second) = match self {
            Self::Waiting => (None, None),
            Self::Reserving { decode: run } | Self::Running { run } => (Some(run), None),
            Self::Prefilling { prefill, decode, .. } => (Some(prefill), Some(decode)),
        };
        first.into_iter().chain(second)
    }

    fn into_runs(self) -> impl Iterator<Item = Run> {
        let (first, second) = match self {
            Self::Waiting => (None, None),
            Self::Reserving { decode: run } | Self::Running { run } => (Some(run), None),
            Self::Prefilling { prefill, decode, .. } => (Some(prefill), Some(decode)),
        };
        first.into_iter().chain(second)
    }
}

impl Request {
    /// A request that has passed the door. When its workers die, it is tried again up to `max_replays` times; where its
    /// planes travel, they do under this reservation, of which each try has its own key.
    pub fn accept(
        id: RequestId,
        spec: pb::RequestSpec,
        deadline: Option<Deadline>,
        walks: TextWalks,
        reservation: pb::PlaneReservation,
        max_replays: u32,
        output: mailbox::Sender,
    ) -> Self {
        let span =
            tracing::info_span!("request", %id, prompt_tokens = spec.prompt.len(), ending = field::Empty);
        Self {
            id,
            span,
            pieces: PromptPieces::uncut(spec.prompt.len(), 1),
            spec: Arc::new(spec),
            deadline,
            walks,
            encoders: Vec::new(),
            reservation,
            incarnation: Incarnation(0),
            max_replays,
            lost: 0,
            failed_handovers: 0,
            in_vain: false,
            generated: Vec::new(),
            next_scored: 1,
            cached_tokens: None,
            phase: Phase::Live { output, stage: Stage::Waiting, encoding: Encoding::Over },
            leaving: Vec::new(),
        }
    }

    /// The same request, behind output that it has had elsewhere.
    #[must_use]
    pub fn behind(self, generated: Vec<u32>) -> Self {
        Self { generated, ..self }
    }

    /// The same request, whose media these walks encode.
    #[must_use]
    pub fn encoded_by(self, encoders: Vec<WalkId>) -> Self {
        Self { encoders, ..self }
    }

    /// What was asked for.
    pub fn spec(&self) -> &pb::RequestSpec {
        &self.spec
    }

    /// The name of a part of the current try.
    pub fn key(&self, role: GraphRole) -> GraphKey {
        GraphKey { request: self.id, incarnation: self.incarnation, graph: role.id() }
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
        matches!(self.phase, Phase::Live { stage: Stage::Waiting, .. })
    }

    /// Whether there may be anything left to decode after the token that a prefill samples.
    pub fn may_decode(&self) -> bool {
        let most = self.spec.stopping.as_ref().map_or(0, |stopping| stopping.max_tokens as usize);
        most > self.generated.len() + 1
    }

    /// Whether it may be what brings its workers down: its last try came to nothing, and it has one left. Two of this
    /// kind on one worker could cost each other that one.
    pub fn is_suspect(&self) -> bool {
        self.in_vain && self.lost == self.max_replays
    }

    /// Starts this part there, with the time that is left of its deadline: all of it, a prefill that nothing follows, or
    /// a decode, which asks for room first. `None`, and no change, unless the request waits for a place.
    pub fn launch(&mut self, role: GraphRole, at: Members, now: Instant) -> Option<pb::LaunchGraph> {
        if !self.is_waiting() {
            return None;
        }
        let mut message = self.message(role, now);
        let run = self.begin(role, at);
        let stage = match role {
            GraphRole::Whole | GraphRole::Prefill => {
                self.await_embeddings(&mut message);
                Stage::Running { run }
            }
            GraphRole::Decode => {
                message.receive = Some(self.reservation.clone());
                Stage::Reserving { decode: run }
            }
            // What it would hand over has nowhere to go yet.
            GraphRole::Encode => return None,
        };
        self.enter(stage);
        Some(message)
    }

    /// What this worker's word that it holds room is to be followed by; why it is dropped, where nobody waits for it.
    pub fn check_reserved(&self, from: WorkerId, key: GraphKey) -> Result<RoomFor, Dropped> {
        let Phase::Live { stage, encoding, .. } = &self.phase else { return Err(self.why_unmatched(key)) };
        let (run, wanted) = match stage {
            Stage::Reserving { decode } => (Some(decode), RoomFor::Planes),
            _ => (stage.prefilling().filter(|_| encoding.is_due()), RoomFor::Embeddings),
        };
        match run {
            Some(run) if run.key == key && run.leader() == Some(from) => Ok(wanted),
            Some(run) if run.key == key => Err(Dropped::Unknown),
            _ if stage.runs().any(|run| run.key == key) => Err(Dropped::Duplicate),
            _ => Err(self.why_unmatched(key)),
        }
    }

    /// Starts the prefill there, which goes to where room is held. `None`, and no change, unless room was asked for.
    pub fn launch_prefill(&mut self, at: Members, room: Room, now: Instant) -> Option<pb::LaunchGraph> {
        let Phase::Live { stage: Stage::Reserving { decode }, .. } = &self.phase else { return None };
        let send_to = self.destination(decode.key, room);
        let mut message = pb::LaunchGraph { send_to: Some(send_to), ..self.message(GraphRole::Prefill, now) };
        self.await_embeddings(&mut message);
        let prefill = self.begin(GraphRole::Prefill, at);
        if let Phase::Live { stage, .. } = &mut self.phase {
            *stage = match std::mem::replace(stage, Stage::Waiting) {
                Stage::Reserving { decode } => Stage::Prefilling { prefill, decode, early: Vec::new() },
                other => other,
            };
        }
        Some(message)
    }

    fn destination(&self, to: GraphKey, room: Room) -> pb::PlaneDestination {
        let pb::PlaneReservation { secret, lease_ms } = self.reservation.clone();
        pb::PlaneDestination {
            key: Some(to.into()),
            address: room.address,
            secret,
            lease_ms,
            layout_hash: room.layout_hash,
            shared_memory: room.shared_memory,
            known_pages: room.known_pages,
        }
    }

    fn message(&self, role: GraphRole, now: Instant) -> pb::LaunchGraph {
        pb::LaunchGraph {
            key: Some(self.key(role).into()),
            walks: role.walks(self.walks, &self.encoders),
            spec: Some(encoding::spec_for(role, &self.spec)),
            generated: if role == GraphRole::Encode { Vec::new() } else { self.generated.clone() },
            timeout_ms: self.deadline.map(|deadline| deadline.left_ms(now)),
            ..Default::default()
        }
    }

    fn begin(&self, role: GraphRole, at: Members) -> Run {
        let key = self.key(role);
        self.span.in_scope(|| tracing::debug!(%key, ?role, ranks = ?at.keys(), "launched"));
        Run::new(key, at, self.generated.len())
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

    /// Of a graph that does not run: over, or never launched.
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

    /// Ends the request for its client now; workers that run it are told to let go. No-op once it has ended.
    pub fn end_early(&mut self, ending: Ending) -> Effects {
        let Phase::Live { output, stage, encoding } = std::mem::replace(&mut self.phase, Phase::Ended) else {
            return Effects::default();
        };
        self.span.record("ending", field::debug(&ending));
        self.span.in_scope(|| tracing::debug!(tokens = self.generated.len(), ?ending, "ended"));
        let ended = Some(conclude(output, ending));
        Effects { ended, cancel: self.leave(stage, encoding), ..Effects::default() }
    }

    /// What runs is over for the client. Gives those that are to be told so.
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

/// Where room is for planes or embeddings: what its worker said, with the address as others reach it.
#[derive(Clone, Debug)]
pub struct Room {
    /// As ip:port.
    pub address: String,
    /// Of what it is for.
    pub layout_hash: u64,
    /// For senders on the same machine; empty for none.
    pub shared_memory: String,
    /// Pages that need not be sent.
    pub known_pages: u32,
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
