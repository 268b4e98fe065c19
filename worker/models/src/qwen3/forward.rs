//! One step of Qwen3: all layers over the step's tokens, then logits one tile at a time.

use std::{mem, ops::Range, slice, time::Instant};

use tutti_kernels::{
    Device, DeviceError, KvShape, Norm, PageId, Quantize, SampleRow, ScoreRow, StepInputs,
    collective::GroupRank,
};
use tutti_proto::declaration::ModelDeclaration;

use super::{LOGIT_TILE, Qwen3};
use crate::{
    PageLayout, PausedPages, PlaneLayout, PlanePlace, Section, StepHook,
    model::{EmbeddedRows, Limits, LogitRequests, LogitResults, Model},
    thinker::KV_PLANE,
    weights::share,
};

impl<D: Device> Model for Qwen3<D> {
    fn declaration(&self) -> &ModelDeclaration {
        &self.declaration
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn describe(&self) -> String {
        let (config, device) = (&self.config, self.device.describe());
        let GroupRank { rank, world_size: size } = self.group_rank;
        let rank = if size == 1 { String::new() } else { format!(", rank {rank} of {size}") };
        let quantized = match self.quantize {
            Quantize::None => "",
            Quantize::Int8 => " in int8",
        };
        format!(
            "Qwen3, {} layers of width {}, {} + {} heads of {}, vocabulary {}, {:?} weights{quantized}{rank}, on {device}",
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

    fn allocate_planes(&mut self, pages: usize, _: usize) -> Result<(), DeviceError> {
        self.kv = None;
        let shape = KvShape { pages, ..self.kv_shape };
        self.kv = Some(self.device.kv_pool(shape)?);
        self.kv_shape = shape;
        Ok(())
    }

    fn page_layout(&self) -> PageLayout {
        let KvShape { layers, head_dim, page_tokens, dtype, .. } = self.kv_shape;
        let section =
            Section { units: self.config.kv_heads, unit_bytes: 2 * page_tokens * head_dim * dtype.bytes() };
        PageLayout {
            page_tokens,
            planes: vec![PlaneLayout {
                name: KV_PLANE.into(),
                place: PlanePlace::Pages { ratio: 1 },
                sections: vec![section; layers],
                format: format!("{dtype:?} heads of {head_dim}, {}", self.device.kv_format()),
            }],
        }
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        let kv = self.kv.as_ref().ok_or_else(no_pages)?;
        self.device.read_pages(kv, pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        let kv = self.kv.as_mut().ok_or_else(no_pages)?;
        self.device.write_pages(kv, pages, data)
    }

    fn set_step_hook(&mut self, hook: Box<dyn StepHook>) {
        self.step_hook = Some(hook).filter(|_| self.group_rank.is_alone());
    }

    fn forward(
        &mut self,
        inputs: &StepInputs<'_>,
        embeddings: &[EmbeddedRows<'_>],
    ) -> Result<(), DeviceError> {
        if self.in_flight.is_some() {
            return Err(DeviceError::Misuse("the step before is not collected yet".into()));
        }
        let (tokens, limit) = (inputs.token_ids.len(), self.limits.max_step_tokens);
        if tokens > limit {
            return Err(DeviceError::Misuse(format!("a step of {tokens} tokens, the limit is {limit}")));
        }
        let Self { device, group_rank, weights, activations: a, kv, attention, config, step_hook, .. } = self;
        let kv = kv.as_mut().ok_or_else(no_pages)?;
        let eps = config.rms_norm_eps;

        device.begin_step(inputs)?;
        if group_rank.is_alone() {
            device.embed(&weights.embedding, &mut a.hidden)?;
        } else {
            let first = share(config.vocab_size, *group_rank).start;
            device.embed_shard(&weights.embedding, first, config.vocab_size, &mut a.hidden)?;
            device.all_reduce(&mut a.hidden)?;
        }
        for rows in embeddings {
            device.overwrite_rows(&mut a.hidden, rows.first_token, rows.values)?;
        }
        device.rope_angles(&self.rope, &mut a.angles)?;
        let layers = weights.layers.len();
        for (index, (layer, &shape)) in weights.layers.iter().zip(attention.iter()).enumerate() {
            let norm = Norm { weight: &layer.input_norm, eps };
            device.norm_linear(&a.hidden, norm, &layer.qkv, layer.qkv_bias.as_ref(), &mut a.qkv)?;
            let norms = Some(layer.head_norms(eps));
            device.rotate_and_store(&mut a.qkv, shape, norms, &a.angles, kv, index)?;
            let last = index + 1 == layers;
            if last && inputs.logit_rows.is_empty() {
                break;
            }
            device.attention(&a.qkv, shape, kv, index, &mut a.attended)?;
            if last {
                // After the last attention no token's result depends on another token, so only the tokens of
                // `logit_rows` are computed further.
                device.keep_logit_rows(&mut a.attended)?;
                device.keep_logit_rows(&mut a.hidden)?;
            }
            let output = Output { x: &a.attended, weight: &layer.o, bias: layer.o_bias.as_ref() };
            output.add(device, &mut a.partial, &mut a.hidden)?;

            let norm = Norm { weight: &layer.post_norm, eps };
            device.norm_gate_up(&a.hidden, norm, &layer.gate_up, &mut a.activated)?;
            let output = Output { x: &a.activated, weight: &layer.down, bias: None };
            output.add(device, &mut a.partial, &mut a.hidden)?;
            if let Some(hook) = step_hook {
                hook.run(&mut Paused { device, kv })?;
            }
        }
        self.logit_rows = inputs.logit_rows.len();
        self.in_flight = Some(mem::take(&mut self.spare));
        Ok(())
    }

    fn enqueue_logits(&mut self, wanted: &LogitRequests<'_>) -> Result<(), DeviceError> {
        let LogitRequests { mut sample, mut score } = *wanted;
        while let Some(tile) =
            next_tile(first_index(sample).into_iter().chain(first_index(score)), self.logit_rows)?
        {
            let now;
            (now, sample) = sample.split_at(sample.partition_point(|(row, _)| *row < tile.end));
            let now = rebase(now, tile.start);
            let then;
            (then, score) = score.split_at(score.partition_point(|(row, _)| *row < tile.end));
            let then = rebase(then, tile.start);
            if self.group_rank.is_alone() && then.is_empty() && all_take_the_likeliest(&now, tile.len()) {
                self.choose(tile)?;
                continue;
            }
            self.compute_logits(tile)?;
            self.answer(&now, &then)?;
        }
        Ok(())
    }

    fn collect(&mut self, _: Option<Instant>, out: &mut LogitResults) -> Result<bool, DeviceError> {
        let mut results = self.in_flight.take().ok_or_else(no_step)?;
        out.append(&mut results);
        self.spare = results;
        Ok(true)
    }

    fn follow_logits(&mut self, wanted: &[usize]) -> Result<(), DeviceError> {
        let mut wanted = wanted;
        while let Some(tile) = next_tile(wanted.first().copied().into_iter(), self.logit_rows)? {
            wanted = &wanted[wanted.partition_point(|row| *row < tile.end)..];
            self.compute_logits(tile)?;
        }
        Ok(())
    }
}

/// Access to KV pages between two layers of a step, in a group of one rank.
struct Paused<'a, D: Device> {
    device: &'a mut D,
    kv: &'a mut D::KvPool,
}

impl<D: Device> PausedPages for Paused<'_, D> {
    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.device.read_pages(self.kv, pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        self.device.write_pages(self.kv, pages, data)
    }
}

/// A sublayer's addition to the residual stream: `x · Wᵀ (+ bias)`. Each rank holds a share of the columns of `x` and
/// `W`.
struct Output<'a, D: Device> {
    x: &'a D::Tensor,
    weight: &'a D::Matrix,
    bias: Option<&'a D::Vector>,
}

impl<D: Device> Output<'_, D> {
    /// Adds the product to `hidden`. If the group has several ranks, the product is first summed over the ranks in
    /// `partial`.
    fn add(
        self,
        device: &mut D,
        partial: &mut Option<D::Tensor>,
        hidden: &mut D::Tensor,
    ) -> Result<(), DeviceError> {
        let Some(partial) = partial else {
            return device.linear_add(self.x, self.weight, self.bias, hidden);
        };
        device.linear(self.x, self.weight, self.bias, partial)?;
        device.all_reduce_add(partial, hidden)
    }
}

impl<D: Device> Qwen3<D> {
    /// Computes the final norm and the LM head of a tile of the step's logit rows. The forward pass has left only logit
    /// rows in `hidden`.
    fn compute_logits(&mut self, tile: Range<usize>) -> Result<(), DeviceError> {
        let Self { device, group_rank, weights, activations: a, config, .. } = self;
        device.copy_rows(&a.hidden, tile, &mut a.tile)?;
        let norm = Norm { weight: &weights.final_norm, eps: config.rms_norm_eps };
        device.norm_linear(&a.tile, norm, weights.lm_head(), None, &mut a.logits)?;
        if group_rank.is_alone() { Ok(()) } else { device.gather_columns(&a.logits, a.gathered.as_mut()) }
    }

    /// Computes the logits of a tile and appends the likeliest token of each row. The logits cannot be read afterwards.
    fn choose(&mut self, tile: Range<usize>) -> Result<(), DeviceError> {
        let Self { device, weights, activations: a, config, in_flight, tile: answers, .. } = self;
        device.copy_rows(&a.hidden, tile, &mut a.tile)?;
        let norm = Norm { weight: &weights.final_norm, eps: config.rms_norm_eps };
        device.norm_argmax(&a.tile, norm, weights.lm_head(), &mut a.logits, &mut answers.sampled)?;
        let results = in_flight.as_mut().ok_or_else(no_step)?;
        results.sampled.extend(answers.sampled.drain(..).map(Ok));
        Ok(())
    }

    /// Samples and scores rows of a tile. Row indices count from the tile's first row.
    fn answer(
        &mut self,
        sample: &[(usize, SampleRow<'_>)],
        score: &[(usize, ScoreRow)],
    ) -> Result<(), DeviceError> {
        let Self { device, activations: a, in_flight, tile, .. } = self;
        let logits = a.gathered.as_ref().unwrap_or(&a.logits);
        let results = in_flight.as_mut().ok_or_else(no_step)?;
        answer_each(sample, &mut tile.sampled, &mut results.sampled, |rows, out| {
            device.sample(logits, rows, out)
        })?;
        answer_each(score, &mut tile.scores, &mut results.scores, |rows, out| device.score(logits, rows, out))
    }
}

/// Appends the answer to each of `requests` to `out`. If the device refuses to answer them together, each is asked
/// apart, and only the requests at fault have an error.
fn answer_each<R, A>(
    requests: &[(usize, R)],
    answers: &mut Vec<A>,
    out: &mut Vec<Result<A, DeviceError>>,
    mut ask: impl FnMut(&[(usize, R)], &mut Vec<A>) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    if requests.is_empty() {
        return Ok(());
    }
    let together = ask(requests, answers);
    match together {
        Ok(()) => out.extend(answers.drain(..).map(Ok)),
        Err(lost @ DeviceError::Lost(_)) => return Err(lost),
        Err(_) => {
            for request in requests {
                answers.clear();
                match ask(slice::from_ref(request), answers) {
                    Ok(()) => out.extend(answers.drain(..).map(Ok)),
                    Err(lost @ DeviceError::Lost(_)) => return Err(lost),
                    Err(refused) => out.push(Err(refused)),
                }
            }
            answers.clear();
        }
    }
    Ok(())
}

fn no_step() -> DeviceError {
    DeviceError::Misuse("no step is in flight".into())
}

fn no_pages() -> DeviceError {
    DeviceError::Misuse("no KV page is allocated yet".into())
}

fn first_index<T>(rows: &[(usize, T)]) -> Option<usize> {
    rows.first().map(|(row, _)| *row)
}

/// Returns the tile that starts at the lowest of the `wanted` logit rows, or `None` if no row is wanted.
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

/// True if `sample` holds exactly one request for each of a tile's `rows` logit rows, in order, and every request needs
/// only the likeliest token.
fn all_take_the_likeliest(sample: &[(usize, SampleRow<'_>)], rows: usize) -> bool {
    sample.iter().map(|(row, _)| *row).eq(0..rows) && sample.iter().all(|(_, row)| row.takes_the_likeliest())
}

/// Returns the requests `rows` with each row index counted from `start`, the tile's first row.
fn rebase<T: Copy>(rows: &[(usize, T)], start: usize) -> Vec<(usize, T)> {
    rows.iter().map(|&(row, request)| (row - start, request)).collect()
}
