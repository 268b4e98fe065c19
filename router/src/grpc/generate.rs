//! Writes a generation as a stream of `tutti.v1.GenerateResponse`.

use std::sync::Arc;

use futures_util::stream::{self, BoxStream, StreamExt};
use tonic::Status;
use tutti_proto::{cluster::v1 as cluster, v1 as pb};
use tutti_runtime::Error;

use super::request::{self, PromptKind};
use crate::{
    generation::{Delta, Finish, Generation, GenerationInfo, Generator, Reason},
    served::ServedModel,
};

/// Streams the generation's messages. The last message has the usage.
pub fn respond(
    generator: Arc<Generator>,
    generation: Generation,
    kind: PromptKind,
) -> BoxStream<'static, Result<pb::GenerateResponse, Status>> {
    let id = format!("gen-{:032x}", fastrand::u128(..));
    let choices = generation.info.choice_count();
    let start = (generation, Some(choices));
    let readers = generator.readers().clone();
    let messages = stream::unfold(start, move |(mut generation, running)| {
        let (id, generator) = (id.clone(), generator.clone());
        async move {
            let running = running?;
            let delta = match generation.next().await? {
                Ok(delta) => delta,
                Err(error) => {
                    let log = generation.name().log;
                    log.in_scope(|| tracing::debug!(%error, "a stream ends with an error"));
                    return Some((Err(request::respell(error, kind).into()), (generation, None)));
                }
            };
            let running = running - usize::from(delta.finish.is_some());
            let mut message = match write(&generator, &generation.info, id, delta).await {
                Ok(message) => message,
                Err(error) => return Some((Err(error.into()), (generation, None))),
            };
            if running == 0 {
                let usage = generation.usage();
                message.usage = Some(pb::Usage {
                    prompt_tokens: usage.prompt_tokens,
                    completion_tokens: usage.completion_tokens,
                    cached_tokens: usage.cached_tokens,
                });
            }
            Some((Ok(message), (generation, Some(running))))
        }
    });
    let lost = || Err(Status::cancelled("the reader takes nothing"));
    readers.watch(messages.boxed(), |_| MESSAGE_BYTES, lost).boxed()
}

/// Size in bytes that every message is assumed to have when a reader's rate is measured.
const MESSAGE_BYTES: usize = 64;
/// Size in bytes above which a message is built in the text pool.
const LARGE_BYTES: usize = 64 << 10;

/// Builds the message of a delta. A large message is built in the text pool, any other on the async thread.
async fn write(
    generator: &Generator,
    info: &Arc<GenerationInfo>,
    id: String,
    delta: Delta,
) -> Result<pb::GenerateResponse, Error> {
    let estimate = info.estimate(&delta);
    if estimate <= LARGE_BYTES {
        return Ok(message(info, id, delta));
    }
    // The room is released once the message is built. From then on, the connection's flow-control window limits the
    // unread bytes.
    let _room = generator.readers().room(estimate).await?;
    let (info, work) = (info.clone(), info.writing(estimate));
    generator.on_text(work, move || message(&info, id, delta)).await
}

fn message(info: &GenerationInfo, id: String, delta: Delta) -> pb::GenerateResponse {
    let GenerationInfo { model, output, .. } = info;
    let prompt = info.prompt_of(delta.choice);
    let echoes = output.echo && delta.first;
    let mut message = pb::GenerateResponse { id, index: delta.choice, ..Default::default() };
    let prompt_logprobs = || {
        let logprobs = [None].into_iter().chain(delta.prompt_logprobs().iter().map(Some));
        prompt.ids.iter().zip(logprobs).map(|(&id, logprob)| token_logprob(model, id, logprob))
    };
    if delta.first && output.prompt_logprobs.is_some() {
        message.prompt_logprobs = prompt_logprobs().collect();
    }
    if echoes {
        message.text.push_str(&prompt.text);
        message.token_ids.extend(prompt.ids.iter());
        if output.logprobs.is_some() {
            message.logprobs.extend(prompt_logprobs());
        }
    }
    message.text.push_str(&delta.text);
    message.token_ids.extend(delta.tokens.iter().map(|token| token.id));
    if output.logprobs.is_some() {
        let logprobs = delta.tokens.iter().map(|t| token_logprob(model, t.id, t.logprob.as_ref()));
        message.logprobs.extend(logprobs);
    }
    message.finish = delta.finish.map(finish);
    message
}

fn token_logprob(model: &ServedModel, id: u32, logprob: Option<&cluster::TokenLogprob>) -> pb::TokenLogprob {
    let top = |top: &cluster::TopLogprob| pb::TopLogprob {
        token_id: top.token_id,
        logprob: top.logprob,
        token: model.token_string(top.token_id),
    };
    pb::TokenLogprob {
        token_id: id,
        logprob: logprob.map(|l| l.logprob),
        rank: logprob.map_or(0, |l| l.rank),
        token: model.token_string(id),
        top: logprob.map(|l| l.top.iter().map(top).collect()).unwrap_or_default(),
    }
}

fn finish(finish: Finish) -> pb::Finish {
    use pb::finish::{Matched, Reason as Wire};
    let (reason, matched) = match finish.reason {
        // A call alone ends no answer here: a chat over gRPC is one text.
        Reason::EndOfSequence | Reason::OnlyCall => (Wire::Stop, None),
        Reason::StopToken(id) => (Wire::Stop, Some(Matched::StopTokenId(id))),
        Reason::StopString(text) => (Wire::Stop, Some(Matched::Stop(text))),
        Reason::Length => (Wire::Length, None),
    };
    pb::Finish { reason: reason.into(), matched }
}
