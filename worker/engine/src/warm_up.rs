//! Runs one step before the first request, so that weights are in memory and every code path has run once.

use tutti_kernels::{DeviceError, PageId, RowInputs, SampleRow, SamplingParams, SlotId, StepInputs};
use tutti_models::{LogitRequests, LogitResults, Model};

/// Maximum number of tokens in the warm-up step: enough for the matrix kernels of a prefill, and few enough that a
/// large model on a small CPU is ready in seconds.
const MAX_TOKENS: usize = 32;

/// Encodes one token of each kind of media, runs a small prefill and samples from it. Only the null page is written,
/// and no request reads that page.
pub(crate) fn run(
    model: &mut dyn Model,
    max_step_tokens: usize,
    page_tokens: usize,
) -> Result<(), DeviceError> {
    for input in model.declaration().media().to_vec() {
        match model.encode(input.walk, &[&vec![0; input.bytes_per_token as usize]], &mut Vec::new()) {
            // The model lacks this encoder, because another worker holds the encoder.
            Err(DeviceError::Misuse(_)) => {}
            encoded => encoded?,
        }
    }
    if !model.has_thinker() {
        return Ok(());
    }
    let context = model.limits().max_context_tokens;
    // All tokens fit one page, so that no two of them share a slot of the null page.
    let tokens = MAX_TOKENS.min(max_step_tokens).min(context).min(page_tokens);
    let token_ids = vec![0; tokens];
    let positions: Vec<f32> = (0..tokens).map(|position| position as f32).collect();
    let inputs = StepInputs {
        token_ids: &token_ids,
        positions: [&positions[..]; 3],
        rows: &[RowInputs {
            first_token: 0,
            tokens,
            start: 0,
            slot: SlotId::NULL,
            continues: false,
            block_table: &[PageId::NULL],
        }],
        copies: &[],
        logit_rows: &[tokens - 1],
    };
    model.forward(&inputs, &[])?;
    let params = SamplingParams { temperature: 1.0, ..SamplingParams::GREEDY };
    let row = SampleRow {
        params: &params,
        prompt: &token_ids,
        output: &[],
        forbidden: &[],
        position: tokens as u64,
        logprobs: Some(1),
    };
    let mut results = LogitResults::default();
    model.read_logits(&LogitRequests { sample: &[(0, row)], score: &[] }, &mut results)?;
    results.sampled.pop().map_or(Ok(()), |sampled| sampled.map(drop))
}
