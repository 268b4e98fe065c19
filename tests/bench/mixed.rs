//! The mixed workload: four requests decode, and one with a long prompt arrives.

use tutti_load::client::Target;
use tutti_measure::statistics::Summary;

use crate::stream::{Ended, Stream, prompts};

const DECODING: usize = 4;
const DECODING_PROMPT: usize = 128;
/// Tokens that each of them has before the newcomer comes.
const BEFORE: usize = 48;
const NEWCOMER_PROMPT: usize = 4096;
const NEWCOMER_TOKENS: u32 = 16;
/// What a request takes at most.
pub const CONTEXT: usize = NEWCOMER_PROMPT + NEWCOMER_TOKENS as usize;
pub const REQUESTS: usize = DECODING + 1;

pub struct Mixed {
    /// Of the newcomer, from sending it.
    pub ttft_ms: f64,
    /// Of the four, until it is sent.
    pub itl_ms_before: Summary,
    /// Of the four, from then until its first token.
    pub itl_ms_during: Summary,
    /// Prompt tokens of the newcomer and tokens of the four in that time, a second.
    pub tokens_per_s_during: f64,
}

impl Mixed {
    /// On a server that serves nothing else. `steps` is a bound on the steps that the newcomer's prefill is cut into: the
    /// four generate so many tokens that they outlast it.
    pub async fn measure(target: &Target, steps: u32, seed: u64) -> Result<Self, String> {
        let max_tokens = BEFORE as u32 + steps + 2 * NEWCOMER_TOKENS;
        let newcomer = prompts(1, NEWCOMER_PROMPT, seed + 1).remove(0);
        let four = prompts(DECODING, DECODING_PROMPT, seed);
        let mut four: Vec<Stream> =
            four.into_iter().map(|prompt| Stream::start(target, prompt, max_tokens)).collect();
        for stream in &mut four {
            stream.tokens(BEFORE).await?;
        }
        let newcomer = Stream::start(target, newcomer, NEWCOMER_TOKENS).end().await?;
        let mut ended = Vec::new();
        for stream in four {
            ended.push(stream.end().await?);
        }
        Self::of(&ended, &newcomer)
    }

    fn of(four: &[Ended], newcomer: &Ended) -> Result<Self, String> {
        let (sent, first) = (newcomer.began, newcomer.first_token());
        if four.iter().any(|stream| stream.last_token() <= first) {
            return Err("a request stopped decoding before the newcomer had its first token".into());
        }
        let began = four.iter().map(Ended::first_token).max().unwrap_or(sent);
        let gaps = |from, until| Summary::of(four.iter().flat_map(|s| s.gaps_ms(from, until)).collect());
        let decoded: u32 = four.iter().map(|s| s.tokens_after(sent) - s.tokens_after(first)).sum();
        let tokens = NEWCOMER_PROMPT as f64 + f64::from(decoded);
        Ok(Self {
            ttft_ms: newcomer.ttft_ms(),
            itl_ms_before: gaps(began, sent),
            itl_ms_during: gaps(sent, first),
            tokens_per_s_during: tokens / (first - sent).as_secs_f64(),
        })
    }
}
