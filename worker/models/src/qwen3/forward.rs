//! One step of Qwen3: all layers over the step's tokens, then logits one tile at a time.

use std::{ops::Range, time::Instant};

use tutti_kernels::{
    Argmax, Attention, Device, DeviceError, Embed, GateUp, KvShape, Linear, Norm, PageId, PlanesShape,
    Quantize, Rotary, RotateAndStore, SampleRow, ScoreRow, StepInputs, VocabularyShard,
    collective::GroupRank,
};
use tutti_proto::declaration::ModelDeclaration;

use super::{LOGIT_TILE, Qwen3};
use crate::{
    DecoderDevice, PageLayout, PausedPages, PlaneLayout, PlanePlace, Section, StepHook,
    model::{EmbeddedRows, Limits, LogitRequests, LogitResults, Model},
    thinker::KV_PLANE,
    weights::share,
};

impl<D: DecoderDevice> Model for Qwen3<D> {
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
        self.planes = None;
        let kv = KvShape { pages, ..self.kv_shape };
        self.planes = Some(self.device.planes(&PlanesShape { kv: Some(kv), ..PlanesShape::default() })?);
        self.kv_shape = kv;
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
        let planes = self.planes.as_ref().ok_or_else(no_pages)?;
        self.device.read_pages(planes, pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        let planes = self.planes.as_mut().ok_or_else(no_pages)?;
        self.device.write_pages(planes, pages, data)
    }

    fn set_step_hook(&mut self, hook: Box<dyn StepHook>) {
        self.step_hook = Some(hook).filter(|_| self.group_rank.is_alone());
    }

    fn forward(
        &mut self,
        inputs: &StepInputs<'_>,
        embeddings: &[EmbeddedRows<'_>],
    ) -> Result<(), DeviceError> {
        self.check(inputs, embeddings)?;
        let Self {
            device, group_rank, weights, activations: a, planes, attention, config, step_hook, ..
        } = self;
        let planes = planes.as_mut().ok_or_else(no_pages)?;
        let eps = config.rms_norm_eps;

        device.begin_step(inputs, planes)?;
        let table = &weights.embedding;
        if group_rank.is_alone() {
            device.embed(Embed { table, shard: None }, &mut a.hidden)?;
        } else {
            let (first, vocabulary) = (share(config.vocab_size, *group_rank).start, config.vocab_size);
            let shard = Some(VocabularyShard { first, vocabulary });
            device.embed(Embed { table, shard }, &mut a.hidden)?;
            device.all_reduce(&mut a.hidden)?;
        }
        for rows in embeddings {
            device.overwrite_rows(&mut a.hidden, rows.first_token, rows.values)?;
        }
        device.rope_angles(&self.rope, &mut a.angles)?;
        let layers = weights.layers.len();
        for (index, (layer, &shape)) in weights.layers.iter().zip(attention.iter()).enumerate() {
            let norm = Some(Norm { weight: &layer.input_norm, eps });
            let bias = layer.qkv_bias.as_ref();
            device.linear(Linear { x: &a.hidden, norm, weight: &layer.qkv, bias }, &mut a.qkv)?;
            device.rotate_and_store(RotateAndStore {
                qkv: &mut a.qkv,
                shape,
                norms: Some(layer.head_norms(eps)),
                rotary: Rotary { angles: &a.angles },
                planes,
                layer: index,
            })?;
            let last = index + 1 == layers;
            if last && inputs.logit_rows.is_empty() {
                break;
            }
            device.attention(Attention { qkv: &a.qkv, shape, planes, layer: index }, &mut a.attended)?;
            if last {
                // After the last attention no token's result depends on another token, so only the tokens of
                // `logit_rows` are computed further.
                device.keep_logit_rows(&mut a.attended)?;
                device.keep_logit_rows(&mut a.hidden)?;
            }
            let bias = layer.o_bias.as_ref();
            let output = Linear { x: &a.attended, norm: None, weight: &layer.o, bias };
            add_output(device, output, &mut a.partial, &mut a.hidden)?;

            let norm = Some(Norm { weight: &layer.post_norm, eps });
            device.gate_up(GateUp { x: &a.hidden, norm, weight: &layer.gate_up }, &mut a.activated)?;
            let output = Linear::plain(&a.activated, &layer.down);
            add_output(device, output, &mut a.partial, &mut a.hidden)?;
            if let Some(hook) = step_hook {
                hook.run(&mut Paused { device, planes })?;
            }
        }
        self.logit_rows = Some(inputs.logit_rows.len());
        Ok(())
    }

    fn enqueue_logits(&mut self, wanted: &LogitRequests<'_>) -> Result<(), DeviceError> {
        let LogitRequests { mut sample, mut score } = *wanted;
        let logit_rows = self.logit_rows.ok_or_else(no_step)?;
        while let Some(tile) =
            next_tile(first_index(sample).into_iter().chain(first_index(score)), logit_rows)?
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
        self.end_step()
    }

    fn collect(&mut self, until: Option<Instant>, out: &mut LogitResults) -> Result<bool, DeviceError> {
        let done = self.in_flight.front_mut().ok_or_else(no_step)?;
        if !self.device.collect(done, until, out)? {
            return Ok(false);
        }
        self.in_flight.pop_front();
        Ok(true)
    }

    fn follow_logits(&mut self, wanted: &[usize]) -> Result<(), DeviceError> {
        let mut wanted = wanted;
        let logit_rows = self.logit_rows.ok_or_else(no_step)?;
        while let Some(tile) = next_tile(wanted.first().copied().into_iter(), logit_rows)? {
            wanted = &wanted[wanted.partition_point(|row| *row < tile.end)..];
            self.compute_logits(tile)?;
        }
        self.end_step()
    }
}

/// Access to KV pages between two layers of a step, in a group of one rank.
struct Paused<'a, D: Device> {
    device: &'a mut D,
    planes: &'a mut D::Planes,
}

impl<D: Device> PausedPages for Paused<'_, D> {
    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.device.read_pages(self.planes, pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        self.device.write_pages(self.planes, pages, data)
    }
}

/// The operands of a product on device `D`.
type LinearOn<'a, D> = Linear<'a, <D as Device>::Tensor, <D as Device>::Matrix, <D as Device>::Vector>;

/// Adds a sublayer's output to the residual stream `hidden`. Each rank holds a share of the columns of the input and of
/// the weight. If the group has several ranks, the product is first summed over the ranks in `partial`.
fn add_output<D: DecoderDevice>(
    device: &mut D,
    output: LinearOn<'_, D>,
    partial: &mut Option<D::Tensor>,
    hidden: &mut D::Tensor,
) -> Result<(), DeviceError> {
    let Some(partial) = partial else {
        return device.linear_add(output, hidden);
    };
    device.linear(output, partial)?;
    device.all_reduce_add(partial, hidden)
}

impl<D: DecoderDevice> Qwen3<D> {
    /// Refuses a step that this model cannot run. [`Device::begin_step`] refuses what concerns rows and planes.
    fn check(&self, inputs: &StepInputs<'_>, embeddings: &[EmbeddedRows<'_>]) -> Result<(), DeviceError> {
        let refuse = |why: String| Err(DeviceError::Misuse(why));
        let (tokens, limits) = (inputs.token_ids.len(), &self.limits);
        if self.in_flight.len() + usize::from(self.logit_rows.is_some()) >= limits.steps_in_flight {
            return refuse("the step before is not collected yet".into());
        }
        if tokens > limits.max_step_tokens {
            return refuse(format!("a step of {tokens} tokens, the limit is {}", limits.max_step_tokens));
        }
        if let Some(id) = inputs.token_ids.iter().find(|&&id| id as usize >= limits.vocab_size) {
            return refuse(format!("token id {id} of a vocabulary of {}", limits.vocab_size));
        }
        let width = self.config.hidden_size;
        let outside = |rows: &&EmbeddedRows<'_>| {
            let (values, room) = (rows.values.len(), tokens.saturating_sub(rows.first_token) * width);
            values > room || !values.is_multiple_of(width)
        };
        match embeddings.iter().find(outside) {
            Some(EmbeddedRows { first_token, values }) => {
                let count = values.len();
                refuse(format!("{count} values from token {first_token} on of {tokens} tokens of {width}"))
            }
            None => Ok(()),
        }
    }

    /// Computes the final norm and the LM head of a tile of the step's logit rows. The forward pass has left only logit
    /// rows in `hidden`.
    fn compute_logits(&mut self, tile: Range<usize>) -> Result<(), DeviceError> {
        let Self { device, group_rank, weights, activations: a, config, .. } = self;
        device.copy_rows(&a.hidden, tile, &mut a.tile)?;
        let norm = Some(Norm { weight: &weights.final_norm, eps: config.rms_norm_eps });
        let weight = weights.lm_head();
        device.linear(Linear { x: &a.tile, norm, weight, bias: None }, &mut a.logits)?;
        if group_rank.is_alone() { Ok(()) } else { device.gather_columns(&a.logits, a.gathered.as_mut()) }
    }

    /// Samples the likeliest token of each row of a tile. The logits cannot be read afterwards.
    fn choose(&mut self, tile: Range<usize>) -> Result<(), DeviceError> {
        let Self { device, weights, activations: a, config, .. } = self;
        device.copy_rows(&a.hidden, tile, &mut a.tile)?;
        let norm = Some(Norm { weight: &weights.final_norm, eps: config.rms_norm_eps });
        device.argmax(Argmax { x: &a.tile, norm, weight: weights.lm_head(), logits: &mut a.logits })
    }

    /// Samples and scores rows of a tile. Row indices count from the tile's first row.
    fn answer(
        &mut self,
        sample: &[(usize, SampleRow<'_>)],
        score: &[(usize, ScoreRow)],
    ) -> Result<(), DeviceError> {
        let Self { device, activations: a, .. } = self;
        let logits = a.gathered.as_ref().unwrap_or(&a.logits);
        if !sample.is_empty() {
            device.sample(logits, sample)?;
        }
        if !score.is_empty() {
            device.score(logits, score)?;
        }
        Ok(())
    }

    /// Ends the step whose logits are enqueued.
    fn end_step(&mut self) -> Result<(), DeviceError> {
        self.logit_rows = None;
        self.in_flight.push_back(self.device.end_step()?);
        Ok(())
    }
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
