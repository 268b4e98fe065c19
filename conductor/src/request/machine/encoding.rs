//! Encoding of a request's media for its prefill. The states of the encoding are separate from the stages of the
//! request.
//!
//! docs/request-states.md has the table of these states. An encoder's graph that fails, is refused, is lost with its
//! worker or cannot hand over has the same consequences as any other graph of the request.

use std::time::Instant;

use tutti_proto::{GraphKey, RequestParts, cluster::v1 as pb};

use super::{Effects, GraphRole, Members, Phase, Request, ReservedRoom, Run, Stage};

/// The purpose of a worker's reserved room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoomFor {
    /// A prefill's planes, at the worker of the decode.
    Planes,
    /// Embeddings of media, at the worker of the prefill.
    Embeddings,
}

/// State of a request's encoding.
#[derive(Debug)]
pub(super) enum Encoding {
    /// Nothing is left to encode.
    Over,
    /// The graph that prefills has not yet reserved room for the embeddings.
    Due,
    Running(Run),
}

impl Encoding {
    pub fn is_due(&self) -> bool {
        matches!(self, Self::Due)
    }

    pub fn run(&self) -> Option<&Run> {
        match self {
            Self::Running(run) => Some(run),
            Self::Over | Self::Due => None,
        }
    }

    pub fn run_mut(&mut self) -> Option<&mut Run> {
        match self {
            Self::Running(run) => Some(run),
            Self::Over | Self::Due => None,
        }
    }

    pub fn into_run(self) -> Option<Run> {
        match self {
            Self::Running(run) => Some(run),
            Self::Over | Self::Due => None,
        }
    }
}

/// Returns the specification that a graph receives. Only the encoder gets the media's bytes, and the encoder gets no
/// prompt and no sampling.
pub(super) fn spec_for(role: GraphRole, spec: &RequestParts) -> pb::RequestSpec {
    if role == GraphRole::Encode {
        return pb::RequestSpec {
            media: spec.media.clone(),
            priority: spec.priority,
            // Callers that share no prefixes share no embeddings.
            cache_salt: spec.cache_salt.to_message(),
            ..Default::default()
        };
    }
    let without_data = |item: &pb::MediaItem| {
        let pb::MediaItem { kind, format: _, data: _, digest, runs, grid, seconds_per_grid } = item;
        pb::MediaItem {
            kind: *kind,
            digest: digest.clone(),
            runs: runs.clone(),
            grid: *grid,
            seconds_per_grid: *seconds_per_grid,
            ..Default::default()
        }
    };
    let media = spec.media.iter().map(without_data).collect();
    // The media's data may be large, so the parts are copied one by one.
    pb::RequestSpec {
        prompt: spec.prompt.clone(),
        sampling: Some(spec.sampling.clone()),
        stopping: Some(spec.stopping.clone()),
        logprobs: spec.logprobs,
        prompt_logprobs: spec.prompt_logprobs,
        priority: spec.priority,
        media,
        cache_salt: spec.cache_salt.to_message(),
        constraint: spec.constraint.clone(),
        thinking: spec.thinking,
    }
}

impl Request {
    /// True if the request has media.
    pub fn has_media(&self) -> bool {
        !self.encoders.is_empty()
    }

    /// Number of blocks that the placeholder tokens of the request's media take.
    pub fn media_blocks(&self) -> u64 {
        let tokens: u64 = self.spec.media.iter().map(|item| item.tokens() as u64).sum();
        tokens.div_ceil(self.pieces.block_tokens() as u64)
    }

    /// Makes the launch message ask for room for embeddings, if the request has media.
    pub(super) fn await_embeddings(&mut self, message: &mut pb::LaunchGraph) {
        if !self.has_media() {
            return;
        }
        message.receive_media = Some(self.reservation.clone());
        if let Phase::Live { encoding, .. } = &mut self.phase {
            *encoding = Encoding::Due;
        }
    }

    /// Launches the encoder on `members`. The encoder sends the embeddings to `room`, which the prefill's worker has
    /// reserved. Returns `None` and changes nothing unless the encoding is `Due`.
    pub fn launch_encode(
        &mut self,
        members: Members,
        room: ReservedRoom,
        now: Instant,
    ) -> Option<pb::LaunchGraph> {
        let Phase::Live { stage, encoding: Encoding::Due, .. } = &self.phase else { return None };
        let send_to = self.destination(stage.prefilling()?.key, room, &members);
        let message = pb::LaunchGraph { send_to: Some(send_to), ..self.message(GraphRole::Encode, now) };
        let run = self.begin(GraphRole::Encode, members);
        if let Phase::Live { encoding, .. } = &mut self.phase {
            *encoding = Encoding::Running(run);
        }
        Some(message)
    }

    /// True if `key` names the encoder's graph.
    pub(super) fn encodes(&self, key: GraphKey) -> bool {
        matches!(&self.phase, Phase::Live { encoding, .. } if encoding.run().is_some_and(|run| run.key == key))
    }

    /// Handles the hand-over of all embeddings: the graph that prefills begins.
    pub(super) fn on_encoded(&mut self) -> Effects {
        let Phase::Live { stage, encoding, .. } = &mut self.phase else { return Effects::default() };
        if encoding.run().is_some_and(|run| !run.is_over()) {
            return Effects::default();
        }
        *encoding = Encoding::Over;
        self.spans.handed_over("embeddings");
        let begun = stage.prefilling().map(Run::holders).unwrap_or_default();
        Effects { begun, ..Effects::default() }
    }

    /// Starts the request over, because no ready worker can fill the reserved room. The room is given up, and the try
    /// does not count as lost.
    pub fn give_room_back(&mut self) -> Effects {
        match &self.phase {
            Phase::Live { stage: Stage::Reserving { .. }, .. }
            | Phase::Live { encoding: Encoding::Due, .. } => self.start_over(),
            _ => Effects::default(),
        }
    }
}
