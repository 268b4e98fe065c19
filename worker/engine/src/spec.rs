//! Validates launch messages: the last check before the model.
//!
//! The router and the conductor have already checked the parameters in the same way. A bad value may still arrive from
//! another build, through a bug, or in a hand-made message. It must fail its own request and no other.

use std::{sync::Arc, time::Duration};

use tutti_constraints::Constraint;
use tutti_kernels::SamplingParams;
use tutti_models::Limits;
use tutti_proto::{
    CacheSalt, GraphKey, RequestLimits, TokenLimit,
    cluster::v1 as pb,
    declaration::{ModelDeclaration, WalkId, WalkKind},
    parameters::PRIORITY,
};
use tutti_runtime::{Error, ErrorKind};
use tutti_scheduler::{Content, GraphLaunch, GraphRole, Segment, Stopping, Tokens};

use crate::{
    masks::{Guide, Guided},
    media::{self, Media},
    positions::Positions,
    sequence::Sequence,
    transfer::Elsewhere,
};

/// Length in bytes of the secret that allows another worker to fill a request's pages.
const SECRET_BYTES: usize = 16;

/// Returns the key of a launch. Logs a missing key.
pub(crate) fn key(message: &pb::LaunchGraph) -> Option<GraphKey> {
    if message.key.is_none() {
        tracing::error!("dropped a launch without a key");
    }
    message.key.map(GraphKey::from)
}

/// Facts about the model that a launch is checked against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServedModel<'a> {
    pub limits: &'a Limits,
    pub declaration: &'a ModelDeclaration,
}

/// Checks a launch, and splits it into the scheduler's part and the engine's part. `now` is the launch's arrival time
/// on the scheduler's clock.
pub(crate) fn parse(
    key: GraphKey,
    message: pb::LaunchGraph,
    model: ServedModel<'_>,
    now: Duration,
) -> Result<(GraphLaunch, Sequence), Error> {
    if message.walks.iter().any(|walk| model.declaration.encodes(WalkId(*walk))) {
        return encoding(key, message, model.declaration, now);
    }
    let limits = model.limits;
    let GraphWalks { role, prefill, decode } = graph_walks(&message)?;
    let spec = message.spec.ok_or_else(|| Error::invalid("spec", "is missing"))?;
    let request = spec.check(&message.generated, &request_limits(limits))?.into_parts();
    let constraint = request.constraint.map(|message| {
        Constraint::from_message(message, request.thinking.as_ref())
            .map_err(|error| Error::invalid("constraint", error.to_string()))
    });
    let guide = Guide::of(Guided {
        key,
        constraint: constraint.transpose()?,
        thinking: request.thinking.as_ref(),
        generated: &message.generated,
        stop_tokens: &request.stopping.stop_token_ids,
        vocabulary: limits.vocab_size,
    });
    let (media, marks) = media::locate(&request.media, &request.prompt, model.declaration)?;
    let awaits_media = message.receive_media.is_some();
    if awaits_media == (media.items.is_empty() || role == GraphRole::Decode) {
        return Err(Error::invalid("receive_media", "does not match the request's media and role"));
    }
    let prompt: Arc<[u32]> = request.prompt.into();
    let prompt_tokens = prompt.len();
    let tokens = Tokens::new(Arc::clone(&prompt), message.generated.clone());
    // Prompt logprobs are sent once. A replayed request with output sent its prompt logprobs before its first token. In
    // a divided request, the prefilling worker sends the prompt logprobs.
    let prompt_logprobs =
        request.prompt_logprobs.filter(|_| message.generated.is_empty() && role != GraphRole::Decode);
    let launch = GraphLaunch {
        key,
        role,
        prefill: vec![Segment { walk: prefill, tokens: tokens.len() }],
        decode,
        generated: message.generated.len() as u32,
        stopping: stopping(&request.stopping, limits),
        // Prompt logprobs need the hidden states of every position, but the prefix cache holds only keys and values.
        content: Some(Content {
            tokens,
            media: marks,
            salt: request.cache_salt,
            may_reuse: prompt_logprobs.is_none(),
        }),
        priority: request.priority,
        share: message.share,
        awaits_media,
        prefill_is_whole: false,
        is_masked: guide.is_some(),
        awaits_mask: guide.as_ref().is_some_and(|guide| guide.constraint().is_some()),
        deadline: message.timeout_ms.map(|left| now + Duration::from_millis(left.into())),
    };
    whole_in_one_step(&launch, model)?;
    let elsewhere =
        |to: &pb::PlaneDestination| Elsewhere { known: to.known_pages as usize, ranks: to.ranks.len() + 1 };
    let elsewhere = message.send_to.as_ref().map(elsewhere).unwrap_or_default();
    let sequence = Sequence {
        elsewhere,
        prompt,
        output: message.generated,
        sampling: request.sampling,
        logprobs: request.logprobs,
        prompt_logprobs,
        scores_reported: 0,
        positions: media.positions(prompt_tokens),
        media,
        guide,
        encodings: Vec::new(),
    };
    Ok((launch, sequence))
}

/// Refuses a request whose tokens must be computed in one step that the model's buffers are too small for. After a
/// preemption or a replay, these tokens are the prompt and the output.
fn whole_in_one_step(launch: &GraphLaunch, model: ServedModel<'_>) -> Result<(), Error> {
    let is_atomic = |segment: &Segment| {
        let walk = model.declaration.walk(segment.walk);
        walk.is_some_and(|walk| matches!(walk.kind, WalkKind::Atomic { .. }))
    };
    let (tokens, limit) = (launch.max_total_tokens(), model.limits.max_step_tokens);
    if tokens <= limit || !launch.prefill.iter().any(is_atomic) {
        return Ok(());
    }
    let message = format!(
        "prompt and max_tokens are {tokens} tokens, which one step must compute, but a step has at most {limit}"
    );
    Err(Error::invalid("prompt", message))
}

/// Reads a graph that runs only encoders: each call of an encoder becomes a [`Segment`], which is never
/// cut, and nothing is sampled.
fn encoding(
    key: GraphKey,
    message: pb::LaunchGraph,
    model: &ModelDeclaration,
    now: Duration,
) -> Result<(GraphLaunch, Sequence), Error> {
    let send_to = message.send_to.as_ref();
    let send_to = send_to
        .ok_or_else(|| Error::invalid("send_to", "is missing: an encoder's graph needs a receiver"))?;
    secret("send_to", &send_to.secret)?;
    let spec = message.spec.ok_or_else(|| Error::invalid("spec", "is missing"))?;
    let salt = CacheSalt::from_message(&spec.cache_salt)?;
    let encodings = media::encodings(spec.media, salt, &message.walks, model)?;
    let segment = |call: &media::Encoding| Segment { walk: call.walk, tokens: call.rows.len() };
    let launch = GraphLaunch {
        key,
        role: GraphRole::Encode,
        prefill: encodings.iter().map(segment).collect(),
        decode: None,
        generated: 0,
        stopping: Stopping::new(0, 0, &[], &[]),
        content: None,
        priority: PRIORITY.check(spec.priority)?,
        share: message.share,
        awaits_media: false,
        prefill_is_whole: false,
        is_masked: false,
        awaits_mask: false,
        deadline: message.timeout_ms.map(|left| now + Duration::from_millis(left.into())),
    };
    let sequence = Sequence {
        elsewhere: Elsewhere::default(),
        prompt: Arc::default(),
        output: Vec::new(),
        sampling: SamplingParams::GREEDY,
        logprobs: None,
        prompt_logprobs: None,
        scores_reported: 0,
        media: Media::default(),
        positions: Positions::default(),
        guide: None,
        encodings,
    };
    Ok((launch, sequence))
}

/// Checks the secret that allows a sender to write to a request's reserved pages.
fn secret(field: &str, secret: &[u8]) -> Result<(), Error> {
    match secret.len() {
        SECRET_BYTES => Ok(()),
        bytes => Err(Error::invalid(field, format!("has a secret of {bytes} bytes, must be {SECRET_BYTES}"))),
    }
}

/// Role of a graph in its request, and the walks that the graph runs.
struct GraphWalks {
    role: GraphRole,
    prefill: WalkId,
    decode: Option<WalkId>,
}

fn graph_walks(message: &pb::LaunchGraph) -> Result<GraphWalks, Error> {
    let pb::LaunchGraph { receive, receive_media, send_to, walks, .. } = message;
    if let Some(receive_media) = receive_media {
        secret("receive_media", &receive_media.secret)?;
    }
    if let Some(receive) = receive {
        secret("receive", &receive.secret)?;
    }
    if let Some(send_to) = send_to {
        secret("send_to", &send_to.secret)?;
    }
    let (role, wanted) = match (receive, send_to) {
        (None, None) => (GraphRole::Whole, "one prefill and one decode walk"),
        (None, Some(_)) => (GraphRole::Prefill, "one prefill walk, where the decode runs elsewhere"),
        (Some(_), None) => (GraphRole::Decode, "one decode walk, where the prefill runs elsewhere"),
        (Some(_), Some(_)) => {
            let message = "a graph that receives planes and sends them on".to_owned();
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
    };
    let (prefill, decode) = match (role, &walks[..]) {
        (GraphRole::Whole | GraphRole::Prefill, &[prefill]) => (WalkId(prefill), None),
        (GraphRole::Whole, &[prefill, decode]) => (WalkId(prefill), Some(WalkId(decode))),
        (GraphRole::Decode, &[decode]) => (WalkId(decode), Some(WalkId(decode))),
        _ => {
            let message = format!("a graph of {} walks, this engine runs {wanted}", walks.len());
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
    };
    Ok(GraphWalks { role, prefill, decode })
}

/// Returns the limits of requests. The size of the KV pool is not among them, because the scheduler checks it.
fn request_limits(limits: &Limits) -> RequestLimits<'_> {
    RequestLimits {
        vocab_size: limits.vocab_size as u32,
        eos_token_ids: &limits.eos_token_ids,
        tokens: TokenLimit::new(u32::try_from(limits.max_context_tokens).unwrap_or(u32::MAX), u32::MAX),
    }
}

fn stopping(checked: &pb::Stopping, limits: &Limits) -> Stopping {
    let eos: &[u32] = if checked.ignore_eos { &[] } else { &limits.eos_token_ids };
    Stopping::new(checked.max_tokens, checked.min_tokens, eos, &checked.stop_token_ids)
}

#[cfg(test)]
mod tests;
