//! Parameters shared by completions and chat. For clients, `docs/api.md` lists the parameters in a table.

use std::{collections::HashMap, fmt, time::Duration};

use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, Visitor},
};
use tutti_proto::{
    parameters::{BIASES, CACHE_SALT, MIN_TOKENS, N, NUMBERS, PRIORITY, STOP_TOKEN_IDS, STOPS, Scope, TOP_K},
    v1::Sampling,
};
use tutti_runtime::Error;

use super::fields::{self, Fields};
use crate::{generation::Stopping, keys::ClientSalt};

/// Parameters shared by the routes of completions and chat.
pub struct Shared {
    /// The served model's name.
    pub model: Option<String>,
    /// Choices per prompt.
    pub n: Option<u32>,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Conditions that end a choice, without `max_tokens`, whose name differs between the routes.
    pub stopping: Stopping,
    /// Order in the queue: requests with lower values run earlier. 0 is the default.
    pub priority: i32,
    /// Time that the client waits.
    pub timeout: Option<Duration>,
    /// The client's salt of cached prefixes.
    pub cache_salt: Option<ClientSalt>,
    /// True if special tokens are shown in the text.
    pub keep_special_tokens: bool,
    /// True if choices report their token ids.
    pub return_token_ids: bool,
    /// Options of a streamed answer; `None` if the answer is not streamed.
    pub stream: Option<StreamOptions>,
}

/// Maximum number of items of `stop`, `stop_token_ids` and `logit_bias` that are parsed, which bounds their memory. It
/// is above the limits of these parameters, so that their errors can name the number of items.
const MAX_LISTED: usize = 4096;

/// `stream_options`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// True if a last chunk reports the usage.
    pub include_usage: bool,
    /// True if every chunk reports the usage so far. As in vLLM, only with `include_usage`.
    pub continuous_usage_stats: bool,
}

/// Takes the shared parameters.
pub fn take(fields: &mut Fields<'_>) -> Result<Shared, Error> {
    Ok(Shared {
        model: fields.take("model")?,
        n: fields.take(N.name)?,
        sampling: sampling(fields)?,
        stopping: stopping(fields)?,
        priority: fields.take_or_default(PRIORITY.name)?,
        timeout: fields.take::<u32>("timeout_ms")?.map(|ms| Duration::from_millis(ms.into())),
        cache_salt: fields.take::<String>(CACHE_SALT)?.as_deref().map(ClientSalt::new).transpose()?,
        keep_special_tokens: !fields.take("skip_special_tokens")?.unwrap_or(true),
        return_token_ids: fields.take_or_default("return_token_ids")?,
        stream: stream(fields)?,
    })
}

fn sampling(fields: &mut Fields<'_>) -> Result<Sampling, Error> {
    let mut sampling = Sampling {
        top_k: top_k(fields)?,
        logit_bias: fields.take_or_default::<LogitBias>(BIASES.name)?.0,
        seed: fields.take::<Seed>("seed")?.map(|seed| seed.0),
        ..Sampling::default()
    };
    for number in &NUMBERS {
        if let Some(value) = fields.take(number.bounds.name)? {
            (number.ask)(&mut sampling, value);
        }
    }
    Ok(sampling)
}

/// Takes `top_k`. In vLLM, -1 means all tokens, as 0 does.
fn top_k(fields: &mut Fields<'_>) -> Result<Option<u32>, Error> {
    let Some(asked) = fields.take::<i64>(TOP_K.name)? else { return Ok(None) };
    // The conversion always succeeds, because the upper bound of `top_k` is `u32::MAX`.
    Ok(u32::try_from(TOP_K.check(asked)?.max(0)).ok())
}

fn stopping(fields: &mut Fields<'_>) -> Result<Stopping, Error> {
    Ok(Stopping {
        min_tokens: fields.take_or_default(MIN_TOKENS.name)?,
        stop: stop(fields)?,
        include_stop: fields.take_or_default("include_stop_str_in_output")?,
        stop_token_ids: fields.take_list(STOP_TOKEN_IDS.name, MAX_LISTED)?.unwrap_or_default(),
        ignore_eos: fields.take_or_default("ignore_eos")?,
        ..Stopping::default()
    })
}

/// Takes `stop`: a string or a list of strings.
fn stop(fields: &mut Fields<'_>) -> Result<Vec<String>, Error> {
    match fields.take_raw(STOPS.name) {
        None => Ok(Vec::new()),
        Some(value) if value.get().starts_with('"') => Ok(vec![fields::parse(STOPS.name, value)?]),
        Some(value) => fields::list(STOPS.name, value, MAX_LISTED),
    }
}

fn stream(fields: &mut Fields<'_>) -> Result<Option<StreamOptions>, Error> {
    let streams: bool = fields.take_or_default("stream")?;
    let options = fields.take_raw("stream_options");
    if !streams {
        return match options {
            Some(_) => Err(Error::invalid("stream_options", "may only be given with stream = true")),
            None => Ok(None),
        };
    }
    let Some(options) = options else { return Ok(Some(StreamOptions::default())) };
    let mut options = Fields::of_object("stream_options", options, Scope::StreamOptions)?;
    let include_usage = options.take_or_default("include_usage")?;
    let continuous_usage_stats = options.take_or_default("continuous_usage_stats")?;
    options.finish()?;
    Ok(Some(StreamOptions { include_usage, continuous_usage_stats }))
}

/// `logit_bias`: a JSON object that maps token ids, written as strings, to biases, such as `{"1234": -100}`.
#[derive(Default)]
struct LogitBias(HashMap<u32, f32>);

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Biases;
        impl<'de> Visitor<'de> for Biases {
            type Value = LogitBias;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from token ids to biases")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LogitBias, A::Error> {
                let mut biases = HashMap::new();
                while let Some((id, bias)) = map.next_entry::<String, f32>()? {
                    if biases.len() == MAX_LISTED {
                        return Err(de::Error::custom(format!("has more than {MAX_LISTED} tokens")));
                    }
                    let id = id.parse().map_err(|_| {
                        de::Error::custom(format!("{id:?} is not a token id, an integer from 0"))
                    })?;
                    if biases.insert(id, bias).is_some() {
                        return Err(de::Error::custom(format!("names token {id} twice")));
                    }
                }
                Ok(LogitBias(biases))
            }
        }
        deserializer.deserialize_map(Biases)
    }
}

/// A seed: any 64-bit integer. Negative values are accepted, since OpenAI's seeds are signed.
struct Seed(u64);

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Integer;
        impl Visitor<'_> for Integer {
            type Value = Seed;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a 64-bit integer")
            }

            fn visit_u64<E>(self, seed: u64) -> Result<Seed, E> {
                Ok(Seed(seed))
            }

            fn visit_i64<E>(self, seed: i64) -> Result<Seed, E> {
                Ok(Seed(seed.cast_unsigned()))
            }
        }
        deserializer.deserialize_any(Integer)
    }
}
