//! Runs the largest step that requests can ask for, before the pool of pages is sized.
//!
//! A device with memory of its own allocates scratch and staging memory as steps need it. Once the largest step has run
//! on such a device, all memory that is still free can be used for pages, and later steps allocate no scratch memory.
//! If pages took too much, a step could fail for want of memory, which would end the worker.

use tutti_kernels::{
    DeviceError, PageId, RowInputs, SampleRow, SamplingParams, ScoreRow, SlotId, StepInputs, StepShape,
    TokenMask, collective::GroupRank,
};
use tutti_models::{LogitRequests, LogitResults, Model};
use tutti_proto::MAX_LOGPROBS;
use tutti_runtime::Error;

use crate::EngineSettings;

/// Number of pages, and of slots, during the profile: the null one and one more.
const PLANES: usize = 2;
/// Number of entries of each row's logit bias.
const BIASES: u32 = 16;

/// Runs the largest step, if the model's device has memory of its own. Runs it as many times as the device holds steps
/// in flight. All ranks of a TP group call this function at the same time. Replaces the model's planes.
pub fn profile(model: &mut dyn Model, settings: &EngineSettings, rank: GroupRank) -> Result<(), Error> {
    if model.free_bytes().is_none() || !model.has_thinker() {
        return Ok(());
    }
    run(model, settings, rank).map_err(|error| match error {
        DeviceError::OutOfMemory { .. } | DeviceError::Lost(_) => {
            Error::invalid("max_step_tokens", format!("the device cannot run the largest step: {error}"))
        }
        error => Error::internal(format!("the largest step: {error}")),
    })
}

fn run(model: &mut dyn Model, settings: &EngineSettings, rank: GroupRank) -> Result<(), DeviceError> {
    model.allocate_planes(PLANES, PLANES)?;
    let limits = model.limits().clone();
    let page_tokens = model.declaration().page_tokens().map_or(1, |tokens| tokens as usize);
    let step = Largest::of(&limits, settings, page_tokens);
    let mut results = LogitResults::default();
    for _ in 0..limits.steps_in_flight {
        step.enqueue(model, rank)?;
    }
    for _ in 0..limits.steps_in_flight {
        model.collect(None, &mut results)?;
    }
    results.sampled.drain(..).find_map(Result::err).map_or(Ok(()), Err)
}

/// The largest step: the maximum number of rows and tokens, with block tables of the longest context. Every row is
/// sampled with a mask, with penalties over a whole context and with the maximum number of logprobs, and all other
/// tokens are scored. The pages of all rows are the null page. Every row begins at position 0, because longer contexts
/// would only take time: the scratch memory of attention has a fixed size.
struct Largest {
    ids: Vec<u32>,
    positions: Vec<f32>,
    logit_rows: Vec<usize>,
    /// Number of tokens of each row.
    rows: Vec<usize>,
    block_table: Vec<PageId>,
    /// The greatest fixed shape; `None` if shapes are not set.
    shape: Option<StepShape>,
    history: Vec<u32>,
    /// A mask of its own for each row.
    masks: Vec<TokenMask>,
    params: SamplingParams,
}

impl Largest {
    fn of(limits: &tutti_models::Limits, settings: &EngineSettings, page_tokens: usize) -> Self {
        let context = limits.max_context_tokens.max(1);
        let most = settings.max_step_tokens.min(limits.max_step_tokens).max(1);
        let count = settings.running_limit().clamp(1, most);
        let rows: Vec<_> =
            (0..count).map(|row| (most / count + usize::from(row < most % count)).min(context)).collect();
        let positions: Vec<f32> =
            rows.iter().flat_map(|&tokens| (0..tokens).map(|position| position as f32)).collect();
        let vocabulary = limits.vocab_size.max(1) as u32;
        let mask = || TokenMask::new(vec![u32::MAX; TokenMask::words_of(limits.vocab_size)]);
        let masks = rows.iter().map(|_| mask()).collect();
        Self {
            ids: vec![0; positions.len()],
            logit_rows: (0..positions.len()).collect(),
            positions,
            rows,
            shape: settings.chunk_shapes.as_ref().map(|shapes| {
                let rows = shapes.greatest();
                StepShape { tokens: rows, logit_rows: rows }
            }),
            block_table: vec![PageId::NULL; context.div_ceil(page_tokens)],
            masks,
            history: (0..context as u32).map(|token| token % vocabulary).collect(),
            params: SamplingParams {
                temperature: 1.0,
                top_p: 0.9,
                repetition_penalty: 1.1,
                presence_penalty: 0.1,
                frequency_penalty: 0.1,
                logit_bias: (0..BIASES.min(vocabulary)).map(|token| (token, 0.0).into()).collect(),
                ..SamplingParams::GREEDY
            },
        }
    }

    fn enqueue(&self, model: &mut dyn Model, rank: GroupRank) -> Result<(), DeviceError> {
        let mut first_token = 0;
        let rows: Vec<RowInputs<'_>> = self
            .rows
            .iter()
            .map(|&tokens| {
                let first = first_token;
                first_token += tokens;
                RowInputs {
                    first_token: first,
                    tokens,
                    start: 0,
                    slot: SlotId::NULL,
                    continues: false,
                    block_table: &self.block_table,
                }
            })
            .collect();
        let ends: Vec<usize> = rows.iter().map(|row| row.first_token + row.tokens - 1).collect();
        let sampled = SampleRow {
            params: &self.params,
            prompt: &self.history,
            output: &[],
            forbidden: &[],
            allowed: None,
            position: 0,
            logprobs: Some(MAX_LOGPROBS),
        };
        let row = |(&end, mask)| (end, SampleRow { allowed: Some(mask), ..sampled });
        let sample: Vec<_> = ends.iter().zip(&self.masks).map(row).collect();
        let others = self.logit_rows.iter().filter(|row| ends.binary_search(row).is_err());
        let score: Vec<_> = others.map(|&row| (row, ScoreRow { token: 0, top: MAX_LOGPROBS })).collect();
        let inputs = StepInputs {
            token_ids: &self.ids,
            positions: [&self.positions[..]; 3],
            rows: &rows,
            copies: &[],
            logit_rows: &self.logit_rows,
            shape: self.shape,
        };
        model.forward(&inputs, &[])?;
        let wanted = LogitRequests { sample: &sample, score: &score };
        if rank.is_leader() {
            model.enqueue_logits(&wanted)
        } else {
            model.follow_logits(&wanted.rows_of_group())
        }
    }
}

#[cfg(test)]
mod tests;
