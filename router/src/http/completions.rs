//! `/v1/completions`.

use std::collections::HashMap;

use axum::{
    extract::{Request, State},
    response::Response,
};
use serde::Serialize;
use serde_json::value::RawValue;
use tutti_proto::parameters::{DEFAULT_MAX_TOKENS, LOGPROBS, PROMPT_LOGPROBS, Scope};
use tutti_runtime::Error;

use super::{
    Api, answer,
    choices::{self, StopReason},
    error::ApiError,
    fields::{self, Fields},
    logprobs::{CompletionLogprobs, PromptLogprobs, Rendered},
    parameters::{self, StreamOptions},
    response_id,
    sse::{self, Frame},
    unix_seconds,
    usage::{StreamUsage, Usage},
};
use crate::generation::{self, Arrival, Delta, GenerationInfo, GenerationRequest, Output, Prompt, Stopping};

/// A parsed request, with the options of its answer.
pub(super) struct Completion {
    pub(super) request: GenerationRequest,
    return_token_ids: bool,
    stream: Option<StreamOptions>,
}

/// Answers a completion request.
pub async fn create(State(api): State<Api>, request: Request) -> Result<Response, ApiError> {
    let arrival = Arrival::of(request.headers(), request.extensions());
    let max_prompts = api.generator.max_choices() as usize;
    let parse = move |body: &[u8]| parse(body, max_prompts);
    let Completion { request, return_token_ids, stream } = api.parse(request, parse).await?;
    let mut generation = api.generator.start(request, arrival).await?;
    let mut render = Renderer::new(&generation.info, return_token_ids, stream);
    if stream.is_some() {
        return Ok(sse::respond(api.generator.clone(), generation, render));
    }
    let whole = choices::collect(&mut generation).await?;
    let (info, usage) = (generation.info.clone(), generation.usage());
    let work = info.writing(whole.iter().map(|delta| info.estimate(delta)).sum());
    let write = move || {
        let choices = whole.into_iter().map(|delta| render.choice(&info, delta)).collect();
        answer::json(&render.body(choices, Some(Some(usage.into()))))
    };
    Ok(answer::send(&api, work, write).await?)
}

/// Parses a request with at most `max_prompts` prompts.
pub(super) fn parse(body: &[u8], max_prompts: usize) -> Result<Completion, Error> {
    let mut fields = Fields::of_body(body, Scope::Completions)?;
    let shared = parameters::take(&mut fields)?;
    let add_special_tokens = fields.take("add_special_tokens")?.unwrap_or(true);
    let Some(prompt) = fields.take_raw("prompt") else {
        return Err(Error::invalid("prompt", "is required"));
    };
    let prompts = prompts(prompt, add_special_tokens, max_prompts)?;
    let output = Output {
        logprobs: fields.take(LOGPROBS.name)?,
        prompt_logprobs: fields.take(PROMPT_LOGPROBS.name)?,
        echo: fields.take_or_default("echo")?,
        keep_special_tokens: shared.keep_special_tokens,
    };
    let max_tokens = fields.take("max_tokens")?;
    if let Some(best_of) = fields.take::<u32>("best_of")?
        && best_of != shared.n.unwrap_or(1)
    {
        let message = format!("is {best_of}, but must equal n: all choices are returned, none is picked");
        return Err(Error::invalid("best_of", message));
    }
    fields.finish()?;
    let stopping = Stopping { max_tokens, default_max_tokens: Some(DEFAULT_MAX_TOKENS), ..shared.stopping };
    let request = GenerationRequest {
        media: Vec::new(),
        model: shared.model,
        prompts,
        n: shared.n,
        sampling: shared.sampling,
        stopping,
        output,
        priority: shared.priority,
        timeout: shared.timeout,
        cache_salt: shared.cache_salt,
        constraint: None,
        reading: None,
    };
    Ok(Completion { request, return_token_ids: shared.return_token_ids, stream: shared.stream })
}

/// Parses the prompt: a text, a list of token ids, a list of texts, or a list of lists of token ids.
fn prompts(value: &RawValue, add_special_tokens: bool, max: usize) -> Result<Vec<Prompt>, Error> {
    let text = |text| Prompt::Text { text, add_special_tokens };
    let json = value.get();
    if json.starts_with('"') {
        return Ok(vec![text(fields::parse("prompt", value)?)]);
    }
    let Some(inside) = json.strip_prefix('[') else {
        let message = "must be a text, a list of token ids, or a list of either";
        return Err(Error::invalid("prompt", message));
    };
    match inside.trim_start().as_bytes().first() {
        Some(b'"') => Ok(fields::list("prompt", value, max)?.into_iter().map(text).collect()),
        Some(b'[') => {
            let lists: Vec<Vec<u32>> = fields::list("prompt", value, max)?;
            Ok(lists.into_iter().map(Prompt::Tokens).collect())
        }
        _ => Ok(vec![Prompt::Tokens(fields::parse("prompt", value)?)]),
    }
}

#[derive(Serialize)]
struct Body<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Choice>,
    /// In a stream: absent unless the client requested usage. If requested, null in all chunks except the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
}

#[derive(Serialize)]
struct Choice {
    index: u32,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<Rendered>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// Writes the answer to one request, whole or streamed.
struct Renderer {
    id: String,
    created: u64,
    model: String,
    return_token_ids: bool,
    usage: StreamUsage,
    /// The JSON of the logprobs of each prompt that has several choices, by the prompt's index from 0.
    prompt_logprobs: HashMap<u32, Rendered>,
}

impl Renderer {
    fn new(info: &GenerationInfo, return_token_ids: bool, stream: Option<StreamOptions>) -> Self {
        Self {
            id: response_id("cmpl"),
            created: unix_seconds(),
            model: info.model.description.served_name.clone(),
            return_token_ids,
            usage: StreamUsage::new(stream, info.choice_count()),
            prompt_logprobs: HashMap::new(),
        }
    }

    fn body(&self, choices: Vec<Choice>, usage: Option<Option<Usage>>) -> Body<'_> {
        let Self { id, created, model, .. } = self;
        Body { id, object: "text_completion", created: *created, model, choices, usage }
    }

    /// The logprobs of the delta's prompt, written once for all choices of the prompt.
    fn prompt_logprobs(&mut self, info: &GenerationInfo, delta: &Delta) -> Rendered {
        let write = || {
            let prompt = info.prompt_of(delta.choice);
            Rendered::new(&PromptLogprobs::new(&info.model, prompt, delta.prompt_logprobs()))
        };
        if info.n == 1 {
            return write();
        }
        self.prompt_logprobs.entry(delta.choice / info.n).or_insert_with(write).clone()
    }

    /// Writes a whole choice or, in a stream, one delta of a choice.
    fn choice(&mut self, info: &GenerationInfo, delta: Delta) -> Choice {
        let GenerationInfo { model, output, .. } = info;
        let prompt = info.prompt_of(delta.choice);
        let echoes = output.echo && delta.first;
        let logprobs = output.logprobs.map(|_| {
            let mut logprobs = CompletionLogprobs::default();
            if echoes {
                logprobs.push_prompt(model, prompt, delta.prompt_logprobs());
            }
            logprobs.push_output(model, &delta.tokens, prompt.chars);
            logprobs
        });
        let of_prompt = delta.first && output.prompt_logprobs.is_some();
        let prompt_logprobs = of_prompt.then(|| self.prompt_logprobs(info, &delta));
        Choice {
            index: delta.choice,
            logprobs,
            finish_reason: choices::finish_reason(delta.finish.as_ref()),
            stop_reason: choices::stop_reason(delta.finish.as_ref()),
            prompt_logprobs,
            prompt_token_ids: (self.return_token_ids && delta.first).then(|| prompt.ids.to_vec()),
            token_ids: choices::token_ids(self.return_token_ids, &delta.tokens),
            text: if echoes { [&*prompt.text, &delta.text].concat() } else { delta.text },
        }
    }
}

impl sse::Render for Renderer {
    fn delta(&mut self, info: &GenerationInfo, delta: Delta) -> Option<Frame> {
        let usage = self.usage.of_chunk(info, &delta);
        let shows_tokens = self.return_token_ids || info.output.logprobs.is_some();
        if delta.text.is_empty() && delta.finish.is_none() && !delta.first && !shows_tokens {
            return None;
        }
        let choice = self.choice(info, delta);
        Some(Frame::json(&self.body(vec![choice], usage)))
    }

    fn closing(&mut self, usage: generation::Usage) -> Vec<Frame> {
        if !self.usage.at_the_end() {
            return Vec::new();
        }
        vec![Frame::json(&self.body(Vec::new(), Some(Some(usage.into()))))]
    }
}

#[cfg(test)]
mod tests;
