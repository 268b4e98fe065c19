//! Runs one step before the first request, so that weights are in memory and every code path has run once. With fixed
//! shapes, one step runs per shape, and both its tokens and its logit rows are padded to the shape. So a device that
//! compiles or records a shape at its first use does this before the first request. Encoders run once per shape of
//! theirs.

use tutti_kernels::{
    DeviceError, PageId, RowInputs, SampleRow, SamplingParams, SlotId, StepInputs, StepShape,
};
use tutti_models::{EncoderItem, LogitRequests, LogitResults, Model};
use tutti_proto::{
    cluster::v1::MediaGrid,
    declaration::{MediaForm, MediaInput},
};

use crate::batch::BatchLimits;

/// Maximum number of tokens in the warm-up step: enough for the matrix kernels of a prefill, and few enough that a
/// large model on a small CPU is ready in seconds.
const MAX_TOKENS: usize = 32;

/// Encodes one token of each kind of media, then runs small prefills and samples from each. Writes only the null page,
/// which no request reads.
pub(crate) fn run(model: &mut dyn Model, limits: &BatchLimits) -> Result<(), DeviceError> {
    let shapes = limits.encoder_shapes.as_ref().map(|shapes| shapes.iter().map(Some).collect());
    let shapes: Vec<Option<usize>> = shapes.unwrap_or_else(|| vec![None]);
    for input in model.declaration().media().to_vec() {
        let (data, grid) = smallest(&input);
        for shape in &shapes {
            match model.encode(input.walk, &[EncoderItem { data: &data, grid }], *shape, &mut Vec::new()) {
                // Another worker holds this encoder.
                Err(DeviceError::Misuse(_)) => {}
                encoded => encoded?,
            }
        }
    }
    if !model.has_thinker() {
        return Ok(());
    }
    match &limits.shapes {
        None => step(model, limits, None),
        Some(shapes) => shapes
            .iter()
            .try_for_each(|rows| step(model, limits, Some(StepShape { tokens: rows, logit_rows: rows }))),
    }
}

/// Returns the data and the grid of an item of a few tokens.
fn smallest(input: &MediaInput) -> (Vec<u8>, Option<MediaGrid>) {
    match input.form {
        MediaForm::Bytes { per_token } => (vec![0; per_token as usize], None),
        MediaForm::Clips(clips) => {
            let samples = clips.shortest.max(clips.hop) as usize;
            (vec![0; samples * size_of::<f32>()], None)
        }
        MediaForm::Pixels(pixels) => {
            let grid = MediaGrid { frames: 1, height: pixels.merge, width: pixels.merge };
            let side = pixels.patch as usize * pixels.merge as usize;
            (vec![0; 3 * side * side], Some(grid))
        }
    }
}

/// Runs a prefill and samples from its last token.
fn step(model: &mut dyn Model, limits: &BatchLimits, shape: Option<StepShape>) -> Result<(), DeviceError> {
    let context = model.limits().max_context_tokens;
    // All tokens fit into one page, so that no two of them write to the same position of the null page.
    let fitting = limits.max_tokens.min(shape.map_or(MAX_TOKENS, |shape| shape.tokens));
    let tokens = MAX_TOKENS.min(fitting).min(context).min(limits.page_tokens);
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
        shape,
    };
    model.forward(&inputs, &[])?;
    let params = SamplingParams { temperature: 1.0, ..SamplingParams::GREEDY };
    let row = SampleRow {
        params: &params,
        prompt: &token_ids,
        output: &[],
        forbidden: &[],
        allowed: None,
        position: tokens as u64,
        logprobs: Some(1),
    };
    let mut results = LogitResults::default();
    model.read_logits(&LogitRequests { sample: &[(0, row)], score: &[] }, &mut results)?;
    results.sampled.pop().map_or(Ok(()), |sampled| sampled.map(drop))
}
