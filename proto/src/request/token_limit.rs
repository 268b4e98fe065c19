//! The limit of a request's tokens, prompt and output together.

use tutti_parameters::Refused;

/// Maximum number of tokens of a request, prompt and output together, and the reason for this maximum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenLimit {
    /// The maximum number of tokens.
    pub tokens: u32,
    /// The reason for the maximum, such as "what a worker's KV pool can hold".
    pub what: &'static str,
}

impl TokenLimit {
    /// Returns the smaller of the model's context and a worker's KV pool, in tokens.
    pub fn new(context: u32, pool: u32) -> Self {
        if pool < context {
            return Self { tokens: pool, what: "what a worker's KV pool can hold (--kv-cache-memory)" };
        }
        Self { tokens: context, what: "the model's context" }
    }

    /// Returns the number of tokens that a prompt of this length leaves for the output. Refuses a prompt that is too
    /// long.
    pub fn room(&self, prompt: usize) -> Result<u32, Refused> {
        let Self { tokens, what } = self;
        u32::try_from(prompt).ok().and_then(|prompt| tokens.checked_sub(prompt)).ok_or_else(|| {
            let message = format!("has {prompt} tokens, but a request may have at most {tokens}, {what}");
            Refused::new("prompt", message)
        })
    }

    /// Refuses a request if its prompt and its output together have too many tokens.
    pub fn check(&self, prompt: usize, max_tokens: u32) -> Result<(), Refused> {
        if max_tokens <= self.room(prompt)? {
            return Ok(());
        }
        let Self { tokens, what } = self;
        let message = format!(
            "is {max_tokens} and the prompt has {prompt} tokens, but both together may have at most {tokens}, {what}"
        );
        Err(Refused::new("max_tokens", message))
    }
}
