//! Validates launch messages: the last check before the model.
//!
//! The router has already made the same checks. A bad value that gets past the router (another build, a bug, a
//! hand-made message) must fail its own request and no other.

use std::{sync::Arc, time::Duration};

use tutti_kernels::SamplingParams;
use tutti_models::Limits;
use tutti_proto::{
    GraphKey, MAX_LOGPROBS, MAX_PRIORITY,
    cluster::v1 as pb,
    declaration::{ModelDeclaration, WalkId, WalkKind},
};
use tutti_runtime::{Error, ErrorKind};
use tutti_scheduler::{Content, GraphLaunch, GraphRole, Segment, Stopping, Tokens};

use crate::{
    media::{self, Media},
    sequence::Sequence,
    transfer::Elsewhere,
};

/// Bytes of the secret that allows another worker to fill a request's pages.
const SECRET_BYTES: usize = 16;

/// Key of a launch. A missing key is logged.
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
    let sampling = spec.sampling.ok_or_else(|| Error::invalid("sampling", "is missing"))?;
    let stopping = spec.stopping.ok_or_else(|| Error::invalid("stopping", "is missing"))?;
    if spec.prompt.is_empty() {
        return Err(Error::invalid("prompt", "is empty"));
    }
    token_ids("prompt", &spec.prompt, limits)?;
    token_ids("generated", &message.generated, limits)?;
    let (media, marks) = media::locate(&spec.media, &spec.prompt, model.declaration)?;
    let awaits_media = message.receive_media.is_some();
    if awaits_media == (media.ranges.is_empty() || role == GraphRole::Decode) {
        return Err(Error::invalid("receive_media", "does not match the request's media and role"));
    }
    let prompt: Arc<[u32]> = spec.prompt.into();
    let tokens = Tokens::new(Arc::clone(&prompt), message.generated.clone());
    // Prompt logprobs are sent once. A replayed request that has output sent all of them before its first token, so it
    // sends none again. In a divided request, the prefilling worker sends them.
    let prompt_logprobs =
        spec.prompt_logprobs.filter(|_| message.generated.is_empty() && role != GraphRole::Decode);
    let launch = GraphLaunch {
        key,
        role,
        prefill: vec![Segment { walk: prefill, tokens: tokens.len() }],
        decode,
        generated: message.generated.len() as u32,
        stopping: self::stopping(&stopping, limits)?,
        // The prefix cache holds only keys and values, but prompt logprobs need the hidden states of every position.
        content: Some(Content { tokens, media: marks, may_reuse: prompt_logprobs.is_none() }),
        priority: priority(spec.priority)?,
        awaits_media,
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
        sampling: self::sampling(sampling, limits)?,
        logprobs: alternatives("logprobs", spec.logprobs)?,
        prompt_logprobs: alternatives("prompt_logprobs", prompt_logprobs)?,
        scores_reported: 0,
        media,
        encodings: Vec::new(),
    };
    Ok((launch, sequence))
}

/// Refuses a request whose tokens one step must compute, if the model's buffers are too small for them. After a
/// preemption or a replay these are the prompt and the output.
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
    let encodings = media::encodings(spec.media, &message.walks, model)?;
    let segment = |call: &media::Encoding| Segment { walk: call.walk, tokens: call.rows.len() };
    let launch = GraphLaunch {
        key,
        role: GraphRole::Encode,
        prefill: encodings.iter().map(segment).collect(),
        decode: None,
        generated: 0,
        stopping: Stopping::new(0, 0, &[], &[]),
        content: None,
        priority: priority(spec.priority)?,
        awaits_media: false,
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

fn token_ids(field: &str, ids: &[u32], limits: &Limits) -> Result<(), Error> {
    let vocab_size = limits.vocab_size;
    match ids.iter().find(|&&id| id as usize >= vocab_size) {
        Some(id) => {
            Err(Error::invalid(field, format!("token id {id} is not below the vocabulary's {vocab_size}")))
        }
        None => Ok(()),
    }
}

fn alternatives(field: &str, asked: Option<u32>) -> Result<Option<u32>, Error> {
    match asked {
        Some(count) if count > MAX_LOGPROBS => {
            Err(Error::invalid(field, format!("is {count}, the limit is {MAX_LOGPROBS}")))
        }
        _ => Ok(asked),
    }
}

/// Checks that a priority is at most [`MAX_PRIORITY`] above or below 0, the default. The scheduler serves a lower
/// number first.
fn priority(asked: i32) -> Result<i32, Error> {
    if (-MAX_PRIORITY..=MAX_PRIORITY).contains(&asked) {
        return Ok(asked);
    }
    Err(Error::invalid("priority", format!("is {asked}, must be between -{MAX_PRIORITY} and {MAX_PRIORITY}")))
}

fn stopping(message: &pb::Stopping, limits: &Limits) -> Result<Stopping, Error> {
    token_ids("stop_token_ids", &message.stop_token_ids, limits)?;
    if message.min_tokens > message.max_tokens {
        let (min, max) = (message.min_tokens, message.max_tokens);
        return Err(Error::invalid("min_tokens", format!("is {min}, but max_tokens is {max}")));
    }
    let eos: &[u32] = if message.ignore_eos { &[] } else { &limits.eos_token_ids };
    let mut ends: Vec<u32> = eos.iter().chain(&message.stop_token_ids).copied().collect();
    ends.sort_unstable();
    ends.dedup();
    if message.min_tokens > 0 && ends.len() >= limits.vocab_size {
        return Err(Error::invalid("min_tokens", "every token of the vocabulary is a stop token"));
    }
    Ok(Stopping::new(message.max_tokens, message.min_tokens, eos, &message.stop_token_ids))
}

fn sampling(message: pb::Sampling, limits: &Limits) -> Result<SamplingParams, Error> {
    let within = |field: &str, value: f32, fits: bool, range: &str| {
        // NaN is refused as well, since no range contains it.
        if fits { Ok(value) } else { Err(Error::invalid(field, format!("is {value}, must be {range}"))) }
    };
    let penalty =
        |field: &str, value: f32| within(field, value, (-2.0..=2.0).contains(&value), "between -2 and 2");
    let (temperature, top_p, min_p) = (message.temperature, message.top_p, message.min_p);
    let repetition = message.repetition_penalty;
    let bias: Vec<(u32, f32)> = message.logit_bias.iter().map(|b| (b.token_id, b.bias)).collect();
    token_ids("logit_bias", &bias.iter().map(|b| b.0).collect::<Vec<_>>(), limits)?;
    for &(_, value) in &bias {
        within("logit_bias", value, (-100.0..=100.0).contains(&value), "between -100 and 100")?;
    }
    if !bias.is_sorted_by(|a, b| a.0 < b.0) {
        return Err(Error::invalid("logit_bias", "token ids are not in ascending order"));
    }
    Ok(SamplingParams {
        temperature: within(
            "temperature",
            temperature,
            temperature.is_finite() && temperature >= 0.0,
            "0 or more",
        )?,
        top_k: message.top_k,
        top_p: within("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1")?,
        min_p: within("min_p", min_p, (0.0..=1.0).contains(&min_p), "between 0 and 1")?,
        // Outside of this range a logit could overflow, which would fail the whole step.
        repetition_penalty: within(
            "repetition_penalty",
            repetition,
            (0.01..=100.0).contains(&repetition),
            "between 0.01 and 100",
        )?,
        presence_penalty: penalty("presence_penalty", message.presence_penalty)?,
        frequency_penalty: penalty("frequency_penalty", message.frequency_penalty)?,
        logit_bias: bias,
        seed: message.seed,
    })
}

#[cfg(test)]
mod tests;
