//! From a launch message to a checked sequence: the last line of defence before the model.
//!
//! The front door checks all of this already. A value that gets past it (another build, a bug, a hand-made message)
//! must fail its own request and nobody else's.

use std::time::Duration;

use tutti_kernels::SamplingParams;
use tutti_models::Limits;
use tutti_proto::{
    GraphKey, MAX_PRIORITY,
    cluster::v1 as pb,
    declaration::{ModelDeclaration, WalkId},
};
use tutti_runtime::{Error, ErrorKind};
use tutti_scheduler::{Content, GraphLaunch, GraphRole, Segment, Stopping};

use crate::{
    media::{self, Media},
    sequence::Sequence,
};

/// The most alternatives beside a token.
pub(crate) const MAX_LOGPROBS: u32 = 20;

/// Of what opens a request's pages to another worker.
const SECRET_BYTES: usize = 16;

/// Whose launch it is.
pub(crate) fn key(message: &pb::LaunchGraph) -> Option<GraphKey> {
    if message.key.is_none() {
        tracing::error!("a launch without a key is dropped: there is nobody to tell");
    }
    message.key.map(GraphKey::from)
}

/// What is known of the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Served<'a> {
    pub limits: &'a Limits,
    pub declaration: &'a ModelDeclaration,
}

/// What the scheduler and the engine each need of a launch that comes `now`, by the scheduler's clock.
pub(crate) fn parse(
    key: GraphKey,
    message: pb::LaunchGraph,
    model: Served<'_>,
    now: Duration,
) -> Result<(GraphLaunch, Sequence), Error> {
    if message.walks.iter().any(|walk| model.declaration.encodes(WalkId(*walk))) {
        return encoding(key, message, model.declaration, now);
    }
    let limits = model.limits;
    let Parts { role, prefill, decode } = parts(&message)?;
    let spec = message.spec.ok_or_else(|| Error::invalid("spec", "is missing"))?;
    let sampling = spec.sampling.ok_or_else(|| Error::invalid("sampling", "is missing"))?;
    let stopping = spec.stopping.ok_or_else(|| Error::invalid("stopping", "is missing"))?;
    if spec.prompt.is_empty() {
        return Err(Error::invalid("prompt", "is empty"));
    }
    token_ids("prompt", &spec.prompt, limits)?;
    token_ids("generated", &message.generated, limits)?;
    let (media, marks) = media::placed(&spec.media, &spec.prompt, model.declaration)?;
    let awaits_media = message.receive_media.is_some();
    if awaits_media == (media.spans.is_empty() || role == GraphRole::Decode) {
        return Err(Error::invalid("receive_media", "is not as the request's media and part have it"));
    }
    let tokens = [&*spec.prompt, &message.generated].concat();
    // A replay that has output has sent all its prompt's logprobs before the first token of it, and so has whoever
    // prefills for another worker.
    let prompt_logprobs =
        spec.prompt_logprobs.filter(|_| message.generated.is_empty() && role != GraphRole::Decode);
    let launch = GraphLaunch {
        key,
        role,
        prefill: vec![Segment { walk: prefill, tokens: tokens.len() }],
        decode,
        generated: message.generated.len() as u32,
        stopping: self::stopping(&stopping, limits)?,
        // Logprobs need the hidden states of every position, not only its keys and values.
        content: Some(Content { tokens, media: marks, may_reuse: prompt_logprobs.is_none() }),
        priority: priority(spec.priority)?,
        awaits_media,
        deadline: message.timeout_ms.map(|left| now + Duration::from_millis(left.into())),
    };
    let known_elsewhere = message.send_to.as_ref().map_or(0, |send_to| send_to.known_pages as usize);
    let sequence = Sequence {
        known_elsewhere,
        prompt: spec.prompt,
        output: message.generated,
        sampling: self::sampling(sampling, limits)?,
        logprobs: alternatives("logprobs", spec.logprobs)?,
        prompt_logprobs: alternatives("prompt_logprobs", prompt_logprobs)?,
        told: 0,
        media,
        encodings: Vec::new(),
    };
    Ok((launch, sequence))
}

/// A graph of encoders alone: an item is a segment, and nothing is sampled.
fn encoding(
    key: GraphKey,
    message: pb::LaunchGraph,
    model: &ModelDeclaration,
    now: Duration,
) -> Result<(GraphLaunch, Sequence), Error> {
    let send_to = message.send_to.as_ref();
    let send_to =
        send_to.ok_or_else(|| Error::invalid("send_to", "is missing: nothing is encoded for nobody"))?;
    secret("send_to", &send_to.secret)?;
    let spec = message.spec.ok_or_else(|| Error::invalid("spec", "is missing"))?;
    let encodings = media::encodings(spec.media, &message.walks, model)?;
    let segment = |item: &media::Encoding| Segment { walk: item.walk, tokens: item.rows.len() };
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
        known_elsewhere: 0,
        prompt: Vec::new(),
        output: Vec::new(),
        sampling: NO_SAMPLING,
        logprobs: None,
        prompt_logprobs: None,
        told: 0,
        media: Media::default(),
        encodings,
    };
    Ok((launch, sequence))
}

/// Of a graph that samples nothing.
const NO_SAMPLING: SamplingParams = SamplingParams {
    temperature: 0.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    logit_bias: Vec::new(),
    seed: 0,
};

/// Whoever shows it may write to a request's room.
fn secret(field: &str, secret: &[u8]) -> Result<(), Error> {
    match secret.len() {
        SECRET_BYTES => Ok(()),
        bytes => Err(Error::invalid(field, format!("a secret of {bytes} bytes, must be {SECRET_BYTES}"))),
    }
}

/// What of a request runs here, under which walks.
struct Parts {
    role: GraphRole,
    prefill: WalkId,
    decode: Option<WalkId>,
}

fn parts(message: &pb::LaunchGraph) -> Result<Parts, Error> {
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
    Ok(Parts { role, prefill, decode })
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

/// A request's priority is its class: both count downwards, and 0 is the ordinary one.
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
        // NaN fits nowhere.
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
        // Beyond this a logit could overflow, which would fail the whole step.
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
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits { vocab_size: 8, max_context_tokens: 64, eos_token_ids: vec![7], max_step_tokens: 16 }
    }

    fn key() -> GraphKey {
        pb::GraphKey::default().into()
    }

    fn message() -> pb::LaunchGraph {
        pb::LaunchGraph {
            key: None,
            walks: vec![0, 1],
            spec: Some(pb::RequestSpec {
                prompt: vec![1, 2, 3],
                sampling: Some(pb::Sampling {
                    temperature: 1.0,
                    top_p: 1.0,
                    repetition_penalty: 1.0,
                    ..Default::default()
                }),
                stopping: Some(pb::Stopping { max_tokens: 4, ..Default::default() }),
                logprobs: None,
                prompt_logprobs: None,
                priority: -3,
                media: vec![],
            }),
            generated: vec![],
            timeout_ms: Some(40),
            ..Default::default()
        }
    }

    /// The field that is at fault once the message is changed.
    fn fault(change: impl FnOnce(&mut pb::RequestSpec)) -> String {
        let mut message = message();
        change(message.spec.as_mut().unwrap());
        let (limits, declaration) = (limits(), ModelDeclaration::new(vec![], vec![], vec![]).unwrap());
        let model = Served { limits: &limits, declaration: &declaration };
        let error = parse(key(), message, model, Duration::ZERO).unwrap_err();
        error.field().unwrap().to_owned()
    }

    #[test]
    fn a_sound_message_passes() {
        let (limits, declaration) = (limits(), ModelDeclaration::new(vec![], vec![], vec![]).unwrap());
        let model = Served { limits: &limits, declaration: &declaration };
        let (launch, sequence) = parse(key(), message(), model, Duration::from_secs(1)).unwrap();
        assert_eq!((launch.prefill_tokens(), launch.priority), (3, -3));
        assert_eq!(launch.deadline, Some(Duration::from_millis(1040)));
        assert_eq!(sequence.prompt, [1, 2, 3]);
    }

    #[test]
    fn each_bad_value_names_its_field() {
        fn sampling(spec: &mut pb::RequestSpec) -> &mut pb::Sampling {
            spec.sampling.as_mut().unwrap()
        }
        assert_eq!(fault(|spec| spec.prompt.clear()), "prompt");
        assert_eq!(fault(|spec| spec.prompt.push(8)), "prompt");
        assert_eq!(fault(|spec| spec.sampling = None), "sampling");
        assert_eq!(fault(|spec| spec.stopping = None), "stopping");
        assert_eq!(fault(|spec| sampling(spec).temperature = f32::NAN), "temperature");
        assert_eq!(fault(|spec| sampling(spec).temperature = -0.1), "temperature");
        assert_eq!(fault(|spec| sampling(spec).top_p = 0.0), "top_p");
        assert_eq!(fault(|spec| sampling(spec).top_p = f32::NAN), "top_p");
        assert_eq!(fault(|spec| sampling(spec).min_p = 1.1), "min_p");
        assert_eq!(fault(|spec| sampling(spec).repetition_penalty = 0.0), "repetition_penalty");
        assert_eq!(fault(|spec| sampling(spec).repetition_penalty = 1e-40), "repetition_penalty");
        assert_eq!(fault(|spec| sampling(spec).presence_penalty = 2.1), "presence_penalty");
        assert_eq!(fault(|spec| sampling(spec).frequency_penalty = f32::INFINITY), "frequency_penalty");
        let bias = |token_id, bias| vec![pb::LogitBias { token_id, bias }];
        assert_eq!(fault(|spec| sampling(spec).logit_bias = bias(8, 0.0)), "logit_bias");
        assert_eq!(fault(|spec| sampling(spec).logit_bias = bias(1, -101.0)), "logit_bias");
        assert_eq!(
            fault(|spec| sampling(spec).logit_bias = [bias(1, 0.0), bias(1, 0.0)].concat()),
            "logit_bias"
        );
        assert_eq!(fault(|spec| spec.logprobs = Some(21)), "logprobs");
        assert_eq!(fault(|spec| spec.prompt_logprobs = Some(21)), "prompt_logprobs");
        assert_eq!(fault(|spec| spec.priority = -9), "priority");
        assert_eq!(fault(|spec| spec.stopping.as_mut().unwrap().stop_token_ids = vec![9]), "stop_token_ids");
        assert_eq!(fault(|spec| spec.stopping.as_mut().unwrap().min_tokens = 5), "min_tokens");
    }
}
