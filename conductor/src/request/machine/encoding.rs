//! Encoding: the way of a request's media into its prefill, beside the stages of the request itself.
//!
//! | encoding | event                                                      | next     | what follows                                  |
//! |----------|------------------------------------------------------------|----------|-----------------------------------------------|
//! | Over     | the part that prefills is launched, and there are media    | Due      | its `LaunchGraph` has `receive_media`         |
//! | Due      | `Reserved` by that part's leader, and a place to encode    | Running  | `LaunchGraph` with `send_to`                  |
//! | Due      | `Reserved`, and no place                                   | Over     | Waiting; the next incarnation, which is no replay |
//! | Running  | handed over                                                | Over     | the prefill has what it needs                 |
//! | Running  | finished without handing over                              | Over     | failed: internal                              |
//! | any      | the request ends or starts over, for whatever reason       | Over     | `CancelGraph` where it runs                   |
//!
//! The encoder's graph fails, is refused, is lost with its worker, or cannot hand over as any other graph of the request
//! does, with the same consequences.

use std::time::Instant;

use tutti_proto::{GraphKey, cluster::v1 as pb};

use super::{Effects, GraphRole, Members, Phase, Request, Room, Run, Stage};

/// What room is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoomFor {
    /// Of a prefill, at the decode.
    Planes,
    /// Of media, at the prefill.
    Embeddings,
}

/// See the module.
#[derive(Debug)]
pub(super) enum Encoding {
    /// Nothing is to be encoded, or not any more.
    Over,
    /// Whoever prefills has not said yet that it holds room.
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

/// What each part needs to know: only what encodes media has their data, and it has nothing else.
pub(super) fn spec_for(role: GraphRole, spec: &pb::RequestSpec) -> pb::RequestSpec {
    if role == GraphRole::Encode {
        return pb::RequestSpec { media: spec.media.clone(), priority: spec.priority, ..Default::default() };
    }
    let without_data = |item: &pb::MediaItem| {
        let pb::MediaItem { kind, first, tokens, .. } = *item;
        pb::MediaItem { kind, first, tokens, digest: item.digest.clone(), ..Default::default() }
    };
    let media = spec.media.iter().map(without_data).collect();
    let pb::RequestSpec { prompt, sampling, stopping, .. } = spec;
    pb::RequestSpec {
        prompt: prompt.clone(),
        sampling: sampling.clone(),
        stopping: stopping.clone(),
        logprobs: spec.logprobs,
        prompt_logprobs: spec.prompt_logprobs,
        priority: spec.priority,
        media,
    }
}

impl Request {
    /// Whether anything has to be encoded for it.
    pub fn has_media(&self) -> bool {
        !self.encoders.is_empty()
    }

    /// Blocks that the tokens would take which stand for media.
    pub fn media_blocks(&self) -> u64 {
        let tokens: u64 = self.spec.media.iter().map(|item| u64::from(item.tokens)).sum();
        tokens.div_ceil(self.pieces.block_tokens() as u64)
    }

    /// A part that prefills is about to be launched.
    pub(super) fn await_embeddings(&mut self, message: &mut pb::LaunchGraph) {
        if !self.has_media() {
            return;
        }
        message.receive_media = Some(self.reservation.clone());
        if let Phase::Live { encoding, .. } = &mut self.phase {
            *encoding = Encoding::Due;
        }
    }

    /// Starts to encode there, for whoever prefills, where room is held. `None`, and no change, unless that was asked for.
    pub fn launch_encode(&mut self, at: Members, room: Room, now: Instant) -> Option<pb::LaunchGraph> {
        let Phase::Live { stage, encoding: Encoding::Due, .. } = &self.phase else { return None };
        let send_to = self.destination(stage.prefilling()?.key, room);
        let message = pb::LaunchGraph { send_to: Some(send_to), ..self.message(GraphRole::Encode, now) };
        let run = self.begin(GraphRole::Encode, at);
        if let Phase::Live { encoding, .. } = &mut self.phase {
            *encoding = Encoding::Running(run);
        }
        Some(message)
    }

    /// Whether this is the graph that encodes.
    pub(super) fn encodes(&self, key: GraphKey) -> bool {
        matches!(&self.phase, Phase::Live { encoding, .. } if encoding.run().is_some_and(|run| run.key == key))
    }

    /// Its media are with whoever prefills, which goes on from here.
    pub(super) fn on_encoded(&mut self) -> Effects {
        let Phase::Live { stage, encoding, .. } = &mut self.phase else { return Effects::default() };
        if encoding.run().is_some_and(|run| !run.is_over()) {
            return Effects::default();
        }
        *encoding = Encoding::Over;
        let begun = stage.prefilling().map(Run::holders).unwrap_or_default();
        Effects { begun, ..Effects::default() }
    }

    /// The room that is held for the request is of no use now: nothing is there that could fill it. No try is lost by
    /// this, since nothing was tried.
    pub fn give_room_back(&mut self) -> Effects {
        match &self.phase {
            Phase::Live { stage: Stage::Reserving { .. }, .. }
            | Phase::Live { encoding: Encoding::Due, .. } => self.start_over(),
            _ => Effects::default(),
        }
    }
}
