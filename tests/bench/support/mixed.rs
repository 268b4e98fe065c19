//! The mixed workload: four requests decode, and a long prompt arrives.

use tutti_load::client::Target;
use tutti_measure::statistics::Summary;

use super::stream::{Ended, Stream, prompts};

const DECODING: usize = 4;
const DECODING_PROMPT: usize = 128;
/// Number of tokens that each of the four decoding requests has received when the long prompt is sent.
const BEFORE: usize = 48;
const LONG_PROMPT: usize = 4096;
const LONG_TOKENS: u32 = 16;
/// Maximum number of tokens of a request.
pub const CONTEXT: usize = LONG_PROMPT + LONG_TOKENS as usize;
pub const REQUESTS: usize = DECODING + 1;

pub struct Mixed {
    /// Milliseconds from sending the long prompt to its first token.
    pub ttft_ms: f64,
    /// Milliseconds between tokens of the four decoding requests, until the long prompt is sent.
    pub itl_ms_before: Summary,
    /// Milliseconds between tokens of the four decoding requests, from sending the long prompt to its first token.
    pub itl_ms_during: Summary,
    /// Tokens per second from sending the long prompt to its first token: those of the long prompt, and those that the
    /// four decoding requests generate.
    pub tokens_per_s_during: f64,
}

impl Mixed {
    /// Runs the workload on an idle server. `steps` is the maximum number of steps of the long prompt's prefill. The
    /// four decoding requests generate enough tokens to outlast this prefill.
    pub async fn measure(target: &Target, steps: u32, seed: u64) -> Result<Self, String> {
        let max_tokens = BEFORE as u32 + steps + 2 * LONG_TOKENS;
        let long_prompt = prompts(1, LONG_PROMPT, seed + 1).remove(0);
        let four = prompts(DECODING, DECODING_PROMPT, seed);
        let mut four: Vec<Stream> =
            four.into_iter().map(|prompt| Stream::start(target, prompt, max_tokens)).collect();
        for stream in &mut four {
            stream.tokens(BEFORE).await?;
        }
        let long_prompt = Stream::start(target, long_prompt, LONG_TOKENS).end().await?;
        let mut ended = Vec::new();
        for stream in four {
            ended.push(stream.end().await?);
        }
        Self::of(&ended, &long_prompt)
    }

    fn of(four: &[Ended], long_prompt: &Ended) -> Result<Self, String> {
        let (sent, first) = (long_prompt.began, long_prompt.first_token());
        if four.iter().any(|stream| stream.last_token() <= first) {
            return Err("a request stopped decoding before the long prompt had its first token".into());
        }
        let began = four.iter().map(Ended::first_token).max().unwrap_or(sent);
        let gaps = |from, until| Summary::of(four.iter().flat_map(|s| s.gaps_ms(from, until)).collect());
        let decoded: u32 = four.iter().map(|s| s.tokens_after(sent) - s.tokens_after(first)).sum();
        let tokens = LONG_PROMPT as f64 + f64::from(decoded);
        Ok(Self {
            ttft_ms: long_prompt.ttft_ms(),
            itl_ms_before: gaps(began, sent),
            itl_ms_during: gaps(sent, first),
            tokens_per_s_during: tokens / (first - sent).as_secs_f64(),
        })
    }
}
