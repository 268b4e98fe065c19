//! Converts clients' requests into requests to a conductor, for fuzzers. No conductor is needed.

use tutti_proto::cluster::v1 as pb;
use tutti_runtime::Error;
use tutti_settings::{ChatSpecialTokens, RouterSettings};

use super::{
    decode, generator,
    prompts::{self, Echo},
    reading,
    request::{GenerationRequest, Prompt},
    validate,
};
use crate::served::ServedModel;

pub use super::choice::{Choice, ChoiceSettings};

/// Validates and encodes a request in the order of `Generator::start`. Returns the requests that conductors would get.
pub fn specs(
    mut request: GenerationRequest,
    model: &ServedModel,
    max_choices: u32,
    max_prompt_logprobs: usize,
) -> Result<Vec<pb::RequestSpec>, Error> {
    decode::check(&request.media, model, &RouterSettings::default())?;
    if !request.media.is_empty() && request.prompts.len() != 1 {
        return Err(Error::invalid("media", "cannot be used with several prompts"));
    }
    reading::constrain(&mut request, model)?;
    let common = validate::check(&request, model)?;
    let n = request.n.unwrap_or(1);
    let ids = |prompt: &Prompt| if let Prompt::Tokens(ids) = prompt { ids.len() } else { 0 };
    validate::prompt_logprobs(request.prompts.iter().map(ids), &request.output, n, max_prompt_logprobs)?;
    if request.prompts.len() as u64 * u64::from(n) > u64::from(max_choices) {
        return Err(Error::invalid("n", "has too many choices"));
    }
    let echo =
        request.output.echo.then_some(Echo { keep_special_tokens: request.output.keep_special_tokens });
    let (prompts, media) = (std::mem::take(&mut request.prompts), std::mem::take(&mut request.media));
    let media = decode::decode_now(media, model, n)?;
    let prompts = prompts::encode(prompts, media.items, model, echo, ChatSpecialTokens::Text)?;
    let lengths = prompts.iter().map(|prompt| prompt.ids.len());
    validate::prompt_logprobs(lengths, &request.output, n, max_prompt_logprobs)?;
    let mut specs = Vec::new();
    for prompt in &prompts {
        if echo.is_some() {
            assert_eq!(prompt.offsets.len(), prompt.ids.len());
            assert!(prompt.offsets.is_sorted(), "the offsets of an echo go back: {:?}", prompt.offsets);
        }
        let of_prompt = generator::of_prompt(&request, &common, prompt, model)?;
        for choice in 0..n {
            let spec = generator::of_choice(&of_prompt, choice);
            specs.push(pb::RequestSpec { prompt: prompt.ids.to_vec(), ..spec });
        }
    }
    Ok(specs)
}
