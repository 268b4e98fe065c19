//! Fields of a choice that completions and chat completions share, streamed or not.

use serde::Serialize;
use tutti_runtime::Error;

use crate::generation::{Delta, Finish, Generation, OutputToken, Reason};

/// vLLM's `stop_reason`: the stop string or the stop token's id that ended a choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    /// A stop string.
    Text(String),
    /// A stop token's id.
    Token(u32),
}

/// OpenAI's `finish_reason`.
pub fn finish_reason(finish: Option<&Finish>) -> Option<&'static str> {
    finish.map(Finish::word)
}

/// vLLM's `stop_reason`; `None` if neither a stop string nor a stop token ended the choice.
pub fn stop_reason(finish: Option<&Finish>) -> Option<StopReason> {
    match &finish?.reason {
        Reason::StopString(text) => Some(StopReason::Text(text.clone())),
        Reason::StopToken(id) => Some(StopReason::Token(*id)),
        Reason::EndOfSequence | Reason::Length | Reason::OnlyCall => None,
    }
}

/// Ids of the tokens, if requested.
pub fn token_ids(wanted: bool, tokens: &[OutputToken]) -> Option<Vec<u32>> {
    wanted.then(|| tokens.iter().map(|token| token.id).collect())
}

/// Runs a generation to its end. Returns one delta per choice, in order.
pub async fn collect(generation: &mut Generation) -> Result<Vec<Delta>, Error> {
    let mut whole: Vec<Delta> = (0..generation.info.choice_count() as u32)
        .map(|choice| Delta { choice, first: true, ..Delta::default() })
        .collect();
    generation.keep_deltas();
    while let Some(delta) = generation.next().await {
        let delta = delta?;
        let choice = &mut whole[delta.choice as usize];
        choice.text.push_str(&delta.text);
        delta.parts.into_iter().for_each(|part| choice.add_part(part));
        choice.tokens.extend(delta.tokens);
        choice.finish = delta.finish;
        if delta.first {
            choice.prompt_logprobs = delta.prompt_logprobs;
        }
    }
    Ok(whole)
}
