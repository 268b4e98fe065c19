//! Steps of a model over requests. Each request has its own pages.

use tutti_kernels::{DeviceError, PageId, RowInputs, SampleRow, SamplingParams, SlotId, StepInputs};
use tutti_models::{LogitRequests, LogitResults, Model};

/// Tokens per KV page.
pub const PAGE: usize = 16;

/// A model, and a block table per request.
pub struct Steps {
    model: Box<dyn Model>,
    block_tables: Vec<Vec<PageId>>,
    params: SamplingParams,
}

impl Steps {
    /// Allocates pages for `batch` requests. Prefills `context` tokens of the first request, and copies its pages to
    /// all others. The first request has pages for `long` tokens.
    pub fn new(
        mut model: Box<dyn Model>,
        batch: usize,
        context: usize,
        long: usize,
    ) -> Result<Self, DeviceError> {
        let mut next = 1;
        let mut pages = |tokens: usize| -> Vec<PageId> {
            let first = next;
            next += tokens.div_ceil(PAGE) as u32;
            (first..next).map(PageId).collect()
        };
        let block_tables: Vec<_> =
            (0..batch).map(|request| pages(if request == 0 { long + 1 } else { context + 1 })).collect();
        // One slot per request, for models with state.
        model.allocate_planes(next as usize, 1 + batch)?;
        let params = SamplingParams { seed: 1, ..SamplingParams::GREEDY };
        let mut steps = Self { model, block_tables, params };
        steps.run(1, context, 0, true)?;
        let mut data = Vec::new();
        let context = context / PAGE;
        steps.model.read_pages(&steps.block_tables[0][..context], &mut data)?;
        for request in 1..batch {
            steps.model.write_pages(&steps.block_tables[request][..context], &data)?;
        }
        Ok(steps)
    }

    /// Describes the model and its device.
    pub fn describe(&self) -> String {
        self.model.describe()
    }

    /// Sets the sampling parameters of all requests.
    pub fn sample_with(&mut self, params: SamplingParams) {
        self.params = params;
    }

    /// Returns the maximum number of steps in flight on the device.
    pub fn in_flight(&self) -> usize {
        self.model.limits().steps_in_flight
    }

    /// Runs a step of `batch` requests with `tokens` tokens each, from position `start` on, and waits until the step
    /// has ended.
    pub fn run(
        &mut self,
        batch: usize,
        tokens: usize,
        start: usize,
        sample: bool,
    ) -> Result<(), DeviceError> {
        self.enqueue(batch, tokens, start, sample)?;
        self.collect()
    }

    /// Enqueues the same step as [`run`](Self::run), but does not wait until it has ended.
    pub fn enqueue(
        &mut self,
        batch: usize,
        tokens: usize,
        start: usize,
        sample: bool,
    ) -> Result<(), DeviceError> {
        let vocabulary = self.model.limits().vocab_size as u32;
        let ids: Vec<u32> =
            (0..(batch * tokens) as u32).map(|i| i * 7919 % vocabulary.min(150_000)).collect();
        let positions: Vec<f32> = (0..batch * tokens).map(|i| (start + i % tokens) as f32).collect();
        let row = |request: usize| RowInputs {
            first_token: request * tokens,
            tokens,
            start,
            slot: SlotId(1 + request as u32),
            continues: false,
            block_table: &self.block_tables[request],
        };
        let rows: Vec<_> = (0..batch).map(row).collect();
        let logit_rows: Vec<usize> =
            (0..batch).filter(|_| sample).map(|request| (request + 1) * tokens - 1).collect();
        let inputs = StepInputs {
            token_ids: &ids,
            positions: [&positions[..]; 3],
            rows: &rows,
            copies: &[],
            logit_rows: &logit_rows,
            shape: None,
        };
        self.model.forward(&inputs, &[])?;
        let row = SampleRow {
            params: &self.params,
            prompt: &[],
            output: &[],
            forbidden: &[],
            allowed: None,
            position: (start + tokens) as u64,
            logprobs: None,
        };
        let wanted: Vec<_> = (0..logit_rows.len()).map(|index| (index, row)).collect();
        self.model.enqueue_logits(&LogitRequests { sample: &wanted, score: &[] })
    }

    /// Waits for the oldest step.
    pub fn collect(&mut self) -> Result<(), DeviceError> {
        self.model.collect(None, &mut LogitResults::default()).map(drop)
    }
}
