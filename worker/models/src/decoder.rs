//! A paged decoder: the parts of a text model that are equal in all families.
//!
//! [`Decoder`] is a [`Model`] around a family's [`Layers`]. It embeds the tokens, replaces the embeddings of media
//! tokens, holds the planes and runs the step hook. It also computes and samples the logits ([`logits`]), and refuses
//! steps that cannot run. In a TP group, each rank holds a share of the vocabulary. A family supplies a [`TextShape`],
//! its weights, and the loop over its layers.

mod ends;
mod logits;
mod planes;
mod step;

use std::{collections::VecDeque, path::Path, time::Instant};

use tutti_kernels::{
    Device, DeviceError, Embed, KvType, PageId, Quantize, SlotId, StepInputs, VocabularyShard, WeightType,
    collective::GroupRank,
};
use tutti_proto::declaration::ModelDeclaration;

pub(crate) use self::{
    ends::EndSpecs,
    planes::{EntryPlane, KvPlane, RankPlanes, SlotPlane},
    step::{LayerStep, LinearOn},
};
use self::{ends::Ends, logits::Head};
use crate::{
    DecoderDevice, LoadError, LoadOptions, PageLayout, StepHook,
    expert_loads::{ExpertCounts, ExpertLoad},
    model::{EmbeddedRows, Limits, LogitRequests, LogitResults, Model, WantedRows},
    weights::{Loader, Progress, Source, TensorSpec, Values, kv_scales, share},
};

/// The layers of a family, with their weights and buffers.
pub(crate) trait Layers<D: DecoderDevice>: Send + 'static {
    /// Enqueues all layers over the tokens of a step, in place in [`LayerStep::hidden`]. At the end, `hidden` holds
    /// only the step's logit rows ([`LayerStep::keep_logit_rows`]). In a step without logit rows, the contents of
    /// `hidden` do not matter.
    fn run(&mut self, step: &mut LayerStep<'_, D>) -> Result<(), DeviceError>;
}

/// The parts of a text model's config that a decoder needs. Sizes are those of the whole model, not of a rank's shard.
#[derive(Clone, Debug)]
pub(crate) struct TextShape {
    /// Family and size, for logs.
    pub summary: String,
    /// Prefix of the embedding's and the final norm's names in the checkpoint.
    pub prefix: &'static str,
    /// Name of the embedding in the checkpoint, behind the prefix.
    pub embedding: &'static str,
    /// Name of the LM head in the checkpoint.
    pub lm_head: &'static str,
    /// Maximum number of parts of an [embedded row](EmbeddedRows) behind its embedding. Fewer than there are layers.
    pub levels: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Value that the final norm adds to the mean square.
    pub norm_eps: f32,
    /// Conversion of the final norm's stored weight on the device.
    pub norm_values: Values,
    /// True if the embedding matrix is also the LM head.
    pub tied: bool,
    /// Type of dummy weights.
    pub dtype: WeightType,
    /// Vocabulary, context and ends of sequence.
    pub limits: Limits,
    /// The plane of keys and values; `None` if no layer has attention.
    pub kv: Option<KvPlane>,
    /// Names in the checkpoint of the attention modules of the plane's layers, in order. Empty if the family's
    /// checkpoints have no scales of keys and values.
    pub attention_modules: Vec<String>,
    /// The paged planes of compressed entries, in the order of their declaration.
    pub entries: Vec<EntryPlane>,
    /// Number of tokens per page that the family needs; `None` for the number that the options say.
    pub page_tokens: Option<usize>,
    /// The planes of state in slots, in the order of their declaration.
    pub slots: Vec<SlotPlane>,
    /// Indices of the layers with experts.
    pub expert_layers: Vec<usize>,
}

impl TextShape {
    /// Returns the declaration of the whole text model of a checkpoint, without its weights.
    pub fn declaration(&self, options: &LoadOptions) -> Result<ModelDeclaration, LoadError> {
        let mut source = Source::open(&options.dir, options, self.dtype)?;
        let ends = EndSpecs::new(self, &mut source, GroupRank::ALONE);
        let weight_type = source.check(&ends.embedding)?;
        Ok(RankPlanes::new(self, &source, options, weight_type, GroupRank::ALONE)?.declaration()?)
    }
}

/// A text model on a device.
pub(crate) struct Decoder<D: Device, L> {
    device: D,
    layers: L,
    ends: Ends<D>,
    shape: TextShape,
    group_rank: GroupRank,
    declaration: ModelDeclaration,
    weight_bytes: u64,
    /// Type of the embedding in the checkpoint.
    weight_type: WeightType,
    quantize: Quantize,
    /// True if the device holds matrices that the checkpoint stores quantised.
    holds_quantised: bool,
    /// The residual stream of the largest step, of `T` tokens: `[T, hidden]`.
    hidden: D::Tensor,
    /// This rank's part of a sublayer's output, `[T, hidden]`. The parts are summed over ranks. `None` in a group of
    /// one rank.
    partial: Option<D::Tensor>,
    head: Head<D>,
    rank_planes: RankPlanes,
    /// `None` until the planes are allocated.
    planes: Option<D::Planes>,
    step_hook: Option<Box<dyn StepHook>>,
    /// Number of logit rows of the step whose layers are enqueued but whose logits are not. `hidden` then holds the
    /// hidden states of these rows. `None` if no step is in this state.
    logit_rows: Option<usize>,
    /// Steps in flight whose logits are enqueued, oldest first.
    in_flight: VecDeque<D::Done>,
    expert_counts: ExpertCounts,
}

impl<D: DecoderDevice, L: Layers<D>> Decoder<D, L> {
    /// Loads a model from `dir`. `specs` are the tensors of the layers, in the order of loading. `layers` loads the
    /// layers.
    pub fn load<'s>(
        shape: TextShape,
        specs: impl Iterator<Item = &'s TensorSpec>,
        (dir, options): (&Path, &LoadOptions),
        mut device: D,
        progress: Progress<'_>,
        layers: impl FnOnce(&mut Loader<'_, D>) -> Result<L, LoadError>,
    ) -> Result<Self, LoadError> {
        let mut source = Source::open(dir, options, shape.dtype)?;
        let group_rank = device.group_rank();
        let (vocabulary, hidden_size, tokens) =
            (shape.limits.vocab_size, shape.hidden_size, options.max_step_tokens);
        let ends = EndSpecs::new(&shape, &mut source, group_rank);
        let weight_type = source.check(&ends.embedding)?;
        let rank_planes = RankPlanes::new(&shape, &source, options, weight_type, group_rank)?;
        kv_scales::mark_used(&mut source, &shape.attention_modules);
        let mut all: Vec<&TensorSpec> = ends.all().collect();
        specs.for_each(|spec| all.push(spec));
        let mut loader = Loader::new(source, options.quantize, all.into_iter(), &mut device, progress)?;
        let ends = ends.load(&mut loader, shape.norm_eps)?;
        let layers = layers(&mut loader)?;
        loader.report_unused();
        let holds_quantised = loader.holds_quantised();
        let weight_bytes = loader.finish();

        let expert_counts = ExpertCounts::new(&shape.expert_layers);
        Ok(Self {
            layers,
            ends,
            group_rank,
            declaration: rank_planes.declaration()?,
            weight_bytes,
            weight_type,
            quantize: options.quantize,
            holds_quantised,
            hidden: device.tensor(tokens, hidden_size)?,
            partial: (!group_rank.is_alone()).then(|| device.tensor(tokens, hidden_size)).transpose()?,
            head: Head::allocate(vocabulary, hidden_size, tokens, &mut device)?,
            shape: TextShape {
                limits: Limits { steps_in_flight: device.limits().steps_in_flight, ..shape.limits },
                ..shape
            },
            device,
            rank_planes,
            planes: None,
            step_hook: None,
            logit_rows: None,
            in_flight: VecDeque::new(),
            expert_counts,
        })
    }

    /// The device that the model runs on.
    pub fn device(&mut self) -> &mut D {
        &mut self.device
    }

    /// Refuses a step that this model cannot run. Does not check rows and planes, which [`Device::begin_step`] checks.
    fn check(&self, inputs: &StepInputs<'_>, embeddings: &[EmbeddedRows<'_>]) -> Result<(), DeviceError> {
        let refuse = |why: String| Err(DeviceError::Misuse(why));
        let (tokens, limits) = (inputs.token_ids.len(), self.limits());
        if self.in_flight.len() + usize::from(self.logit_rows.is_some()) >= limits.steps_in_flight {
            return refuse("the step before is not collected yet".into());
        }
        let padded = inputs.padded_tokens().max(tokens);
        if padded > limits.max_step_tokens {
            return refuse(format!("a step of {padded} tokens, the limit is {}", limits.max_step_tokens));
        }
        if let Some(id) = inputs.token_ids.iter().find(|&&id| id as usize >= limits.vocab_size) {
            return refuse(format!("token id {id} of a vocabulary of {}", limits.vocab_size));
        }
        let (hidden, levels) = (self.shape.hidden_size, self.shape.levels);
        let outside = |rows: &&EmbeddedRows<'_>| {
            let (width, room) = (rows.width, tokens.saturating_sub(rows.first_token));
            let fits = (1..=1 + levels).contains(&rows.parts(hidden)) && width.is_multiple_of(hidden);
            !fits || rows.values.len() / width > room || !rows.values.len().is_multiple_of(width)
        };
        match embeddings.iter().find(outside) {
            Some(EmbeddedRows { first_token, width, values }) => {
                let count = values.len();
                refuse(format!(
                    "{count} values in rows of {width} from token {first_token} on, of {tokens} tokens of {hidden} and \
                     {levels} levels"
                ))
            }
            None => Ok(()),
        }
    }

    /// Ends the enqueueing of a step after its logits. The step is then in flight.
    fn end_step(&mut self) -> Result<(), DeviceError> {
        self.logit_rows = None;
        self.in_flight.push_back(self.device.end_step()?);
        Ok(())
    }
}

impl<D: DecoderDevice, L: Layers<D>> Model for Decoder<D, L> {
    fn declaration(&self) -> &ModelDeclaration {
        &self.declaration
    }

    fn limits(&self) -> &Limits {
        &self.shape.limits
    }

    fn describe(&self) -> String {
        let Self { shape: TextShape { summary, .. }, weight_type, .. } = self;
        let GroupRank { rank, world_size: size } = self.group_rank;
        let rank = if size == 1 { String::new() } else { format!(", rank {rank} of {size}") };
        let quantized = match self.quantize {
            Quantize::None if self.holds_quantised => " and quantised ones as stored",
            Quantize::None => "",
            Quantize::Int8 => " in int8",
            Quantize::Int4 => " in int4",
        };
        let kv = match self.rank_planes.kv_type() {
            KvType::Full(dtype) if dtype == *weight_type => String::new(),
            other => format!(", keys and values in {other}"),
        };
        format!("{summary}, {weight_type:?} weights{quantized}{kv}{rank}, on {}", self.device.describe())
    }

    fn device_name(&self) -> String {
        self.device.describe()
    }

    fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    fn step_bytes(&self) -> u64 {
        self.device.step_bytes()
    }

    fn free_bytes(&self) -> Option<u64> {
        self.device.free_bytes()
    }

    fn page_bytes(&self) -> usize {
        self.rank_planes.page_bytes()
    }

    fn allocate_planes(&mut self, pages: usize, slots: usize) -> Result<(), DeviceError> {
        // The old planes are freed first, because the device may lack the memory for both.
        self.planes = None;
        self.planes = Some(self.device.planes(&self.rank_planes.shape(pages, slots))?);
        Ok(())
    }

    fn page_layout(&self) -> PageLayout {
        self.rank_planes.layout(self.device.kv_format())
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        let planes = self.planes.as_ref().ok_or_else(no_planes)?;
        self.device.read_pages(planes, pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        let planes = self.planes.as_mut().ok_or_else(no_planes)?;
        self.device.write_pages(planes, pages, data)
    }

    fn read_slot(&mut self, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        match &self.planes {
            _ if !self.declaration.has_slots() => Ok(()),
            Some(planes) => self.device.read_slot(planes, slot, out),
            None => Err(no_planes()),
        }
    }

    fn write_slot(&mut self, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        match &mut self.planes {
            _ if !self.declaration.has_slots() && data.is_empty() => Ok(()),
            Some(planes) => self.device.write_slot(planes, slot, data),
            None => Err(no_planes()),
        }
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
        let Self { device, layers, ends, shape, group_rank, hidden, partial, planes, step_hook, .. } = self;
        let planes = planes.as_mut().ok_or_else(no_planes)?;
        device.begin_step(inputs, planes)?;
        let (table, vocabulary) = (&ends.embedding, shape.limits.vocab_size);
        if group_rank.is_alone() {
            device.embed(Embed { table, shard: None }, hidden)?;
        } else {
            let first = share(vocabulary, *group_rank).start;
            device.embed(Embed { table, shard: Some(VocabularyShard { first, vocabulary }) }, hidden)?;
            device.all_reduce(hidden)?;
        }
        for rows in embeddings {
            device.overwrite_rows(hidden, rows.first_token, &rows.part(0, shape.hidden_size))?;
        }
        let (valid_rows, logit_rows) = (inputs.token_ids.len(), inputs.logit_rows.len());
        layers.run(&mut LayerStep {
            device,
            planes,
            hidden,
            partial,
            step_hook,
            embeddings,
            hidden_size: shape.hidden_size,
            valid_rows,
            logit_rows,
        })?;
        self.logit_rows = Some(logit_rows);
        Ok(())
    }

    fn enqueue_logits(&mut self, wanted: &LogitRequests<'_>) -> Result<(), DeviceError> {
        let logit_rows = self.logit_rows.ok_or_else(no_step)?;
        let Self { device, ends, head, hidden, .. } = self;
        head.lead(device, ends, hidden, logit_rows, wanted)?;
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

    fn expert_loads(&mut self, out: &mut Vec<ExpertLoad>) -> Result<(), DeviceError> {
        self.expert_counts.read(&mut self.device, out)
    }

    fn restart_expert_loads(&mut self) -> Result<(), DeviceError> {
        self.expert_counts.restart(&mut self.device)
    }

    fn follow_logits(&mut self, wanted: &WantedRows) -> Result<(), DeviceError> {
        let logit_rows = self.logit_rows.ok_or_else(no_step)?;
        let Self { device, ends, head, hidden, .. } = self;
        head.follow(device, ends, hidden, logit_rows, wanted)?;
        self.end_step()
    }
}

fn no_step() -> DeviceError {
    DeviceError::Misuse("no step is in flight".into())
}

fn no_planes() -> DeviceError {
    DeviceError::Misuse("no KV page is allocated yet".into())
}
