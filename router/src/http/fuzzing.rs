//! Parses the request bodies of each route, for fuzzers.

use tutti_proto::{parameters::Scope, v1::Constraint};
use tutti_runtime::Error;
use tutti_settings::ChatSpecialTokens;

use super::{chat, completions, constraints, fields::Fields, tokenize};
use crate::{
    generation::{GenerationRequest, Length, to_tokens},
    served::ServedModel,
};

/// A route that takes a body.
#[derive(Clone, Copy, Debug)]
pub enum Route {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
    /// `/tokenize`.
    Tokenize,
    /// `/detokenize`.
    Detokenize,
}

impl Route {
    /// Parses a body. Returns the generation request, or `None` for `/tokenize` and `/detokenize`.
    pub fn parse(
        self,
        body: &[u8],
        max_prompts: usize,
        model: &ServedModel,
    ) -> Result<Option<GenerationRequest>, Error> {
        match self {
            Self::Completions => Ok(Some(completions::parse(body, max_prompts)?.request)),
            Self::Chat => Ok(Some(chat::parse(body)?.request)),
            Self::Tokenize => {
                let request = tokenize::parse_tokenize(body)?;
                let (ids, text) =
                    to_tokens(request.prompt, &[], model, Length::Any, ChatSpecialTokens::Text)?;
                if let (Some(text), Some(tokenizer)) = (text, &model.text.tokenizer) {
                    assert!(ids.len() <= text.len() + 8, "{} tokens of {} bytes", ids.len(), text.len());
                    assert_eq!(tokenizer.spellings(&ids).len(), ids.len());
                }
                Ok(None)
            }
            Self::Detokenize => {
                let (_, tokens) = tokenize::parse_detokenize(body)?;
                tokenize::decode(model, &tokens)?;
                Ok(None)
            }
        }
    }
}

/// The constraint in the body of a request; `None` if the body is refused, or asks for no constraint.
pub fn constraint_of(body: &str) -> Option<Constraint> {
    let mut fields = Fields::of_body(body.as_bytes(), Scope::Completions).ok()?;
    constraints::take(&mut fields).ok()?.constraint
}
