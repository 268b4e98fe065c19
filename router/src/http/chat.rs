//! `/v1/chat/completions`.

use axum::{
    extract::{Request, State},
    response::Response,
};
use serde::Serialize;
use tutti_proto::parameters::{Scope, TOP_LOGPROBS};
use tutti_runtime::Error;

use super::{
    Api, answer,
    choices::{self, StopReason},
    constraints::{self, ConstraintName},
    error::ApiError,
    fields::Fields,
    logprobs::ChatLogprobs,
    messages,
    parameters::{self, StreamOptions},
    response_id,
    said::{Message, Piece, Said, ShownReasoning},
    sse::{self, Frame},
    tools, unix_seconds,
    usage::{StreamUsage, Usage},
};
use crate::generation::{
    self, Arrival, Delta, Finish, GenerationInfo, GenerationRequest, Output, OutputToken, Reading, Stopping,
};

/// A parsed request, with the options of its answer.
pub(super) struct Chat {
    pub(super) request: GenerationRequest,
    return_token_ids: bool,
    stream: Option<StreamOptions>,
    /// The name by which the client set the limit of output tokens: `max_completion_tokens` or `max_tokens`. Errors
    /// about the limit use this name.
    max_tokens_name: &'static str,
    constraint_name: ConstraintName,
    reasoning: ShownReasoning,
}

/// Answers a chat request.
pub async fn create(State(api): State<Api>, request: Request) -> Result<Response, ApiError> {
    let mut arrival = Arrival::of(request.headers(), request.extensions());
    let (parsed, upload) = api.parse_held(request, parse).await?;
    let Chat { request, return_token_ids, stream, max_tokens_name, constraint_name, reasoning } = parsed;
    let respell = |error| constraint_name.respell(respell(error, max_tokens_name));
    // Files have the memory of the body until they have memory of their own.
    arrival.upload = (!request.media.is_empty()).then_some(upload);
    let mut generation = api.generator.start(request, arrival).await.map_err(respell)?;
    let render = Renderer::new(&generation.info, return_token_ids, stream, reasoning);
    if stream.is_some() {
        return Ok(sse::respond(api.generator.clone(), generation, render));
    }
    let whole = choices::collect(&mut generation).await.map_err(respell)?;
    let (info, usage) = (generation.info.clone(), generation.usage());
    let work = info.writing(whole.iter().map(|delta| info.estimate(delta)).sum());
    let write = move || {
        let choices = whole.into_iter().map(|delta| render.message(&info, delta)).collect();
        let prompt_token_ids = render.prompt_token_ids(&info);
        answer::json(&render.body("chat.completion", choices, Some(Some(usage.into())), prompt_token_ids))
    };
    Ok(answer::send(&api, work, write).await?)
}

/// Renames the field of an error from the core's name to the chat API's name.
fn respell(error: Error, max_tokens_name: &'static str) -> Error {
    match error.field() {
        Some("prompt") => error.with_field("messages"),
        Some("max_tokens") => error.with_field(max_tokens_name),
        Some("logprobs") => error.with_field(TOP_LOGPROBS.name),
        _ => error,
    }
}

/// Parses a request.
pub(super) fn parse(body: &[u8]) -> Result<Chat, Error> {
    let mut fields = Fields::of_body(body, Scope::Chat)?;
    let shared = parameters::take(&mut fields)?;
    let messages::Given { prompt, media, tools, tool_bytes, earlier_calls } = messages::take(&mut fields)?;
    let reading = Reading {
        choice: tools::choice(&mut fields, &tools)?,
        limit: tools::limit(&mut fields)?,
        tools,
        tool_bytes,
        earlier_calls,
        max_thinking_tokens: fields.take("thinking_token_budget")?,
    };
    let reasoning = match fields.take("include_reasoning")?.unwrap_or(true) {
        true => ShownReasoning::Included,
        false => ShownReasoning::Excluded,
    };
    let (max_tokens, max_tokens_name) = max_tokens(&mut fields)?;
    let output = Output {
        logprobs: logprobs(&mut fields)?,
        keep_special_tokens: shared.keep_special_tokens,
        ..Output::default()
    };
    let asked = constraints::take(&mut fields)?;
    fields.finish()?;
    let request = GenerationRequest {
        model: shared.model,
        prompts: vec![prompt],
        media,
        n: shared.n,
        sampling: shared.sampling,
        stopping: Stopping { max_tokens, ..shared.stopping },
        output,
        priority: shared.priority,
        timeout: shared.timeout,
        cache_salt: shared.cache_salt,
        constraint: asked.constraint,
        reading: Some(reading),
    };
    let (return_token_ids, stream) = (shared.return_token_ids, shared.stream);
    let constraint_name = match request.constraint {
        Some(_) => asked.name,
        None => ConstraintName::TOOLS,
    };
    Ok(Chat { request, return_token_ids, stream, max_tokens_name, constraint_name, reasoning })
}

/// Takes `max_completion_tokens`, or its older name `max_tokens`.
fn max_tokens(fields: &mut Fields<'_>) -> Result<(Option<u32>, &'static str), Error> {
    let (old, new): (Option<u32>, Option<u32>) =
        (fields.take("max_tokens")?, fields.take("max_completion_tokens")?);
    match (old, new) {
        (Some(old), Some(new)) if old != new => {
            let message = format!("is {old}, but max_completion_tokens, its other name, is {new}");
            Err(Error::invalid("max_tokens", message))
        }
        (Some(old), _) => Ok((Some(old), "max_tokens")),
        (None, new) => Ok((new, "max_completion_tokens")),
    }
}

fn logprobs(fields: &mut Fields<'_>) -> Result<Option<u32>, Error> {
    let wanted: bool = fields.take_or_default("logprobs")?;
    let top: Option<u32> = fields.take(TOP_LOGPROBS.name)?;
    match (wanted, top) {
        (false, Some(top)) if top > 0 => {
            Err(Error::invalid(TOP_LOGPROBS.name, "may only be given with logprobs = true"))
        }
        (false, _) => Ok(None),
        (true, top) => Ok(Some(top.unwrap_or(0))),
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
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
struct Choice {
    index: u32,
    #[serde(flatten)]
    said: Said,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// Writes the answer to one request, whole or streamed.
struct Renderer {
    id: String,
    created: u64,
    model: String,
    return_token_ids: bool,
    reasoning: ShownReasoning,
    usage: StreamUsage,
    /// For each choice, true if its first chunk is sent.
    opened: Vec<bool>,
}

impl Renderer {
    fn new(
        info: &GenerationInfo,
        return_token_ids: bool,
        stream: Option<StreamOptions>,
        reasoning: ShownReasoning,
    ) -> Self {
        Self {
            id: response_id("chatcmpl"),
            created: unix_seconds(),
            model: info.model.description.served_name.clone(),
            return_token_ids,
            reasoning,
            usage: StreamUsage::new(stream, info.choice_count()),
            opened: vec![false; info.choice_count()],
        }
    }

    fn body(
        &self,
        object: &'static str,
        choices: Vec<Choice>,
        usage: Option<Option<Usage>>,
        prompt_token_ids: Option<Vec<u32>>,
    ) -> Body<'_> {
        let Self { id, created, model, .. } = self;
        Body { id, object, created: *created, model, choices, usage, prompt_token_ids }
    }

    fn chunk(
        &self,
        choice: Choice,
        usage: Option<Option<Usage>>,
        prompt_token_ids: Option<Vec<u32>>,
    ) -> Frame {
        Frame::json(&self.body("chat.completion.chunk", vec![choice], usage, prompt_token_ids))
    }

    /// The first chunk of a choice, which has the role. It leaves with the choice's first token, so that clients that
    /// measure the time to the first chunk measure the time to the first token. `None` if it is sent already.
    fn opening(&mut self, info: &GenerationInfo, index: u32) -> Option<Frame> {
        let is_first = !self.opened.contains(&true);
        if std::mem::replace(self.opened.get_mut(index as usize)?, true) {
            return None;
        }
        let chunk = Chunk { choice: index, piece: Piece::opening(), ..Chunk::default() };
        let choice = Choice { token_ids: None, ..self.choice(info, chunk) };
        let prompt_token_ids = is_first.then(|| self.prompt_token_ids(info)).flatten();
        let usage = self.usage.of_chunk(info, &Delta { choice: index, ..Delta::default() });
        Some(self.chunk(choice, usage, prompt_token_ids))
    }

    /// The prompt's token ids, if requested. All choices of a chat share one prompt.
    fn prompt_token_ids(&self, info: &GenerationInfo) -> Option<Vec<u32>> {
        self.return_token_ids.then(|| info.prompt_of(0).ids.to_vec())
    }

    /// Writes a whole choice.
    fn message(&self, info: &GenerationInfo, mut delta: Delta) -> Choice {
        let message = Message::of(delta.take_parts(), self.reasoning);
        let logprobs = info.output.logprobs.map(|_| ChatLogprobs::new(&info.model, &delta.tokens));
        Choice {
            index: delta.choice,
            said: Said::Message(message),
            logprobs,
            finish_reason: choices::finish_reason(delta.finish.as_ref()),
            stop_reason: choices::stop_reason(delta.finish.as_ref()),
            token_ids: choices::token_ids(self.return_token_ids, &delta.tokens),
        }
    }

    /// Writes a chunk of a choice.
    fn choice(&self, info: &GenerationInfo, chunk: Chunk) -> Choice {
        let asked = info.output.logprobs.filter(|_| !chunk.tokens.is_empty());
        let token_ids = choices::token_ids(self.return_token_ids, &chunk.tokens);
        Choice {
            index: chunk.choice,
            logprobs: asked.map(|_| ChatLogprobs::new(&info.model, &chunk.tokens)),
            finish_reason: choices::finish_reason(chunk.finish.as_ref()),
            stop_reason: choices::stop_reason(chunk.finish.as_ref()),
            token_ids,
            said: Said::Delta(chunk.piece),
        }
    }
}

/// The content of one chunk.
#[derive(Default)]
struct Chunk {
    choice: u32,
    piece: Piece,
    tokens: Vec<OutputToken>,
    finish: Option<Finish>,
}

impl sse::Render for Renderer {
    /// Writes one chunk per part. The last one has the tokens of all, and the finish.
    fn delta(&mut self, info: &GenerationInfo, mut delta: Delta) -> Option<Frame> {
        let mut frame = self.opening(info, delta.choice);
        let usage = self.usage.of_chunk(info, &delta);
        let shows_tokens = self.return_token_ids || info.output.logprobs.is_some();
        let parts = delta.take_parts().into_iter().filter_map(|part| Piece::of(part, self.reasoning));
        let mut pieces: Vec<Piece> = parts.collect();
        if pieces.is_empty() && (delta.finish.is_some() || shows_tokens) {
            pieces.push(Piece::default());
        }
        let last = pieces.len().saturating_sub(1);
        for (index, piece) in pieces.into_iter().enumerate() {
            let mut chunk = Chunk { choice: delta.choice, piece, ..Chunk::default() };
            if index == last {
                (chunk.tokens, chunk.finish) = (std::mem::take(&mut delta.tokens), delta.finish.take());
            }
            let next = self.chunk(self.choice(info, chunk), usage, None);
            frame = Some(match frame {
                Some(frame) => frame.then(next),
                None => next,
            });
        }
        frame
    }

    fn closing(&mut self, usage: generation::Usage) -> Vec<Frame> {
        if !self.usage.at_the_end() {
            return Vec::new();
        }
        let usage = Some(Some(usage.into()));
        vec![Frame::json(&self.body("chat.completion.chunk", Vec::new(), usage, None))]
    }
}
