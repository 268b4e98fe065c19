//! A step of Qwen3: all layers over the step's tokens, then logits a tile at a time.

use std::ops::Range;

use tutti_kernels::{Device, DeviceError, KvShape, StepInputs};
use tutti_proto::walks::ModelDeclaration;

use super::{LOGIT_TILE, Qwen3};
use crate::model::{Limits, LogitRequests, LogitResults, Model};

impl<D: Device> Model for Qwen3<D> {
    fn declaration(&self) -> &ModelDeclaration {
        &self.declaration
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn describe(&self) -> String {
        let (config, device) = (&self.config, self.device.describe());
        format!(
            "Qwen3, {} layers of width {}, {} + {} heads of {}, vocabulary {}, {:?} weights, on {device}",
            config.layers,
            config.hidden_size,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.vocab_size,
            self.weight_type,
        )
    }

    fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    fn step_bytes(&self) -> u64 {
        self.device.step_bytes()
    }

    fn page_bytes(&self) -> usize {
        self.kv_shape.page_bytes()
    }

    fn allocate_pages(&mut self, pages: usize) -> Result<(), DeviceError> {
        self.kv = None;
        let shape = KvShape { pages, ..self.kv_shape };
        self.kv = Some(self.device.kv_pool(shape)?);
        self.kv_shape = shape;
        Ok(())
    }

    fn forward(&mut self, inputs: &StepInputs<'_>) -> Result<(), DeviceError> {
        self.logit_rows = 0;
        let (tokens, limit) = (inputs.token_ids.len(), self.limits.max_step_tokens);
        if tokens > limit {
            return Err(DeviceError::Misuse(format!("a step of {tokens} tokens, the limit is {limit}")));
        }
        let Self { device, weights, activations: a, kv, attention, config, .. } = self;
        let Some(kv) = kv else {
            return Err(DeviceError::Misuse("a step before any KV page is allocated".into()));
        };
        let eps = config.rms_norm_eps;

        device.begin_step(inputs)?;
        device.embed(&weights.embedding, &mut a.hidden)?;
        device.rope_angles(&self.rope, &mut a.angles)?;
        for (index, (layer, &shape)) in weights.layers.iter().zip(attention.iter()).enumerate() {
            device.rms_norm(&a.hidden, &layer.input_norm, eps, &mut a.normed)?;
            device.linear(&a.normed, &layer.qkv, layer.qkv_bias.as_ref(), &mut a.qkv)?;
            let norms = Some(layer.head_norms(eps));
            device.rotate_and_store(&mut a.qkv, shape, norms, &a.angles, kv, index)?;
            device.attention(&a.qkv, shape, kv, index, &mut a.attended)?;
            device.linear_add(&a.attended, &layer.o, layer.o_bias.as_ref(), &mut a.hidden)?;

            device.rms_norm(&a.hidden, &layer.post_norm, eps, &mut a.normed)?;
            device.linear(&a.normed, &layer.gate_up, None, &mut a.gate_up)?;
            device.silu_mul(&a.gate_up, &mut a.activated)?;
            device.linear_add(&a.activated, &layer.down, None, &mut a.hidden)?;
        }
        self.logit_rows = inputs.logit_rows.len();
        Ok(())
    }

    fn read_logits(&mut self, wanted: &LogitRequests<'_>, out: &mut LogitResults) -> Result<(), DeviceError> {
        let LogitRequests { mut sample, mut score } = *wanted;
        while let Some(tile) =
            next_tile(first_index(sample).into_iter().chain(first_index(score)), self.logit_rows)?
        {
            self.compute_logits(tile.clone())?;
            let (now, later) = sample.split_at(sample.partition_point(|(row, _)| *row < tile.end));
            if !now.is_empty() {
                self.device.sample(&self.activations.logits, &rebase(now, tile.start), &mut out.sampled)?;
            }
            sample = later;
            let (now, later) = score.split_at(score.partition_point(|(row, _)| *row < tile.end));
            if !now.is_empty() {
                self.device.score(&self.activations.logits, &rebase(now, tile.start), &mut out.scores)?;
            }
            score = later;
        }
        Ok(())
    }
}

impl<D: Device> Qwen3<D> {
    /// Final norm and LM head over some of the step's logit rows. Norm comes after the gather: rows that nobody samples
    /// from are not worth it.
    fn compute_logits(&mut self, tile: Range<usize>) -> Result<(), DeviceError> {
        let Self { device, weights, activations: a, config, .. } = self;
        device.gather_logit_rows(&a.hidden, tile, &mut a.tile)?;
        device.rms_norm(&a.tile, &weights.final_norm, config.rms_norm_eps, &mut a.tile_normed)?;
        device.linear(&a.tile_normed, weights.lm_head(), None, &mut a.logits)
    }
}

fn first_index<T>(rows: &[(usize, T)]) -> Option<usize> {
    rows.first().map(|(row, _)| *row)
}

/// The tile that starts at the lowest row still wanted; `None` when none is.
fn next_tile(
    wanted: impl Iterator<Item = usize>,
    logit_rows: usize,
) -> Result<Option<Range<usize>>, DeviceError> {
    match wanted.min() {
        None => Ok(None),
        Some(start) if start < logit_rows => Ok(Some(start..logit_rows.min(start + LOGIT_TILE))),
        Some(row) => Err(DeviceError::Misuse(format!("logit row {row} of a step that has {logit_rows}"))),
    }
}

/// The same requests, their rows counted from the tile's first.
fn rebase<T: Copy>(rows: &[(usize, T)], start: usize) -> Vec<(usize, T)> {
    rows.iter().map(|&(row, request)| (row - start, request)).collect()
}
