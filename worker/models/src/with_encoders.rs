//! A thinker with encoders on the same device, or encoders alone on a worker of their own.

mod alone;

use std::time::Instant;

use tutti_kernels::{Device, DeviceError, PageId, SlotId, StepInputs};
use tutti_proto::declaration::{ModelDeclaration, WalkId};

use self::alone::EncodersAlone;
use crate::{
    DecoderDevice, EncoderItem, ExpertLoad, LoadError, LoadOptions, PageLayout, StepHook,
    architecture::{self, Architecture, Checkpoint},
    decoder::{Decoder, Layers},
    model::{EmbeddedRows, Limits, LogitRequests, LogitResults, Model, WantedRows},
    thinker::{self, DeclaredEncoder, HeldNodes},
    weights::Progress,
};

/// An encoder on a device, with its weights and buffers.
pub(crate) trait MediaEncoder<D: Device>: Send {
    /// Bytes of the encoder's weights.
    fn weight_bytes(&self) -> u64;

    /// Encodes the items of a call, and appends the rows of their tokens to `out`. `shape` is the number of tokens to
    /// compute, padding included: see [`Model::encode`].
    fn run(
        &mut self,
        device: &mut D,
        items: &[EncoderItem<'_>],
        shape: Option<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError>;
}

/// The checked encoders of a checkpoint, before they are loaded.
pub(crate) trait EncoderSet {
    /// Returns the encoders as they are declared.
    fn declared(&self) -> Vec<DeclaredEncoder>;

    /// Loads the encoder of the node `node`, which is one of the declared.
    fn load<D: DecoderDevice>(
        &self,
        node: &'static str,
        options: &LoadOptions,
        device: &mut D,
    ) -> Result<Box<dyn MediaEncoder<D>>, LoadError>;
}

/// The encoders that a worker holds.
struct HeldEncoders<D: Device>(Vec<(&'static str, Box<dyn MediaEncoder<D>>)>);

impl<D: Device> HeldEncoders<D> {
    fn weight_bytes(&self) -> u64 {
        self.0.iter().map(|(_, encoder)| encoder.weight_bytes()).sum()
    }

    /// Names of the nodes, for logs.
    fn names(&self) -> String {
        let names: Vec<&str> = self.0.iter().map(|(node, _)| *node).collect();
        if names.is_empty() { "no encoder".into() } else { names.join(" and ") }
    }

    /// Returns the encoder that a walk passes.
    fn of_walk(
        &mut self,
        declaration: &ModelDeclaration,
        walk: WalkId,
    ) -> Result<&mut dyn MediaEncoder<D>, DeviceError> {
        let node = declaration
            .walk(walk)
            .filter(|_| declaration.encodes(walk))
            .and_then(|walk| walk.nodes.first().and_then(|node| declaration.nodes().get(node.0 as usize)));
        let held = self.0.iter_mut().find(|(name, _)| node.is_some_and(|node| node == name));
        match held {
            Some((_, encoder)) => Ok(&mut **encoder),
            None => Err(DeviceError::Misuse(format!("walk {walk} passes no encoder of this worker"))),
        }
    }
}

/// Loads the nodes of the model that the options name. Errors contain `architecture`, which is the name of the
/// architecture.
pub(crate) fn load<A: Architecture, D: DecoderDevice>(
    (mut config, encoders): (A, &impl EncoderSet),
    architecture: &'static str,
    checkpoint: Checkpoint<'_>,
    mut device: D,
    progress: Progress<'_>,
) -> Result<Box<dyn Model>, LoadError> {
    let Checkpoint { file, options } = checkpoint;
    let held = HeldNodes::of(options.nodes.as_deref());
    let declared = encoders.declared();
    let alone = !held.thinker() && declared.iter().any(|encoder| held.holds(encoder.node));
    // In a group only the leader encodes.
    let encodes = device.group_rank().is_leader();
    let of_node = |encoder: &DeclaredEncoder| {
        let node = encoder.node;
        let is_held = encodes && held.holds(node);
        is_held.then(|| Ok::<_, LoadError>((node, encoders.load(node, options, &mut device)?)))
    };
    let loaded = HeldEncoders(declared.iter().filter_map(of_node).collect::<Result<_, _>>()?);
    if !alone {
        let thinker = architecture::load(config, architecture, checkpoint, device, progress)?;
        let declaration = thinker::with_encoders(thinker.declaration(), declared)?;
        return Ok(Box::new(WithEncoders { thinker, encoders: loaded, declaration }));
    }
    if options.expert_parallel {
        config.divide_whole_experts().map_err(|problem| file.invalid(problem))?;
    }
    let text = config.text(&options.dir, options.max_step_tokens)?;
    // The declaration contains the thinker's planes. This worker allocates no memory for them.
    let declaration = thinker::with_encoders(&text.declaration(options)?, declared)?;
    Ok(Box::new(EncodersAlone { device, encoders: loaded, declaration, limits: text.limits }))
}

struct WithEncoders<D: Device, L> {
    thinker: Decoder<D, L>,
    encoders: HeldEncoders<D>,
    declaration: ModelDeclaration,
}

impl<D: DecoderDevice, L: Layers<D>> Model for WithEncoders<D, L> {
    fn declaration(&self) -> &ModelDeclaration {
        &self.declaration
    }

    fn limits(&self) -> &Limits {
        self.thinker.limits()
    }

    fn describe(&self) -> String {
        format!("{}, with {}", self.thinker.describe(), self.encoders.names())
    }

    fn device_name(&self) -> String {
        self.thinker.device_name()
    }

    fn weight_bytes(&self) -> u64 {
        self.thinker.weight_bytes() + self.encoders.weight_bytes()
    }

    fn step_bytes(&self) -> u64 {
        self.thinker.step_bytes()
    }

    fn free_bytes(&self) -> Option<u64> {
        self.thinker.free_bytes()
    }

    fn page_bytes(&self) -> usize {
        self.thinker.page_bytes()
    }

    fn allocate_planes(&mut self, pages: usize, slots: usize) -> Result<(), DeviceError> {
        self.thinker.allocate_planes(pages, slots)
    }

    fn page_layout(&self) -> PageLayout {
        self.thinker.page_layout()
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.thinker.read_pages(pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        self.thinker.write_pages(pages, data)
    }

    fn read_slot(&mut self, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.thinker.read_slot(slot, out)
    }

    fn write_slot(&mut self, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        self.thinker.write_slot(slot, data)
    }

    fn set_step_hook(&mut self, hook: Box<dyn StepHook>) {
        self.thinker.set_step_hook(hook);
    }

    fn forward(
        &mut self,
        inputs: &StepInputs<'_>,
        embeddings: &[EmbeddedRows<'_>],
    ) -> Result<(), DeviceError> {
        self.thinker.forward(inputs, embeddings)
    }

    fn encode(
        &mut self,
        walk: WalkId,
        items: &[EncoderItem<'_>],
        shape: Option<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        self.encoders.of_walk(&self.declaration, walk)?.run(self.thinker.device(), items, shape, out)
    }

    fn enqueue_logits(&mut self, wanted: &LogitRequests<'_>) -> Result<(), DeviceError> {
        self.thinker.enqueue_logits(wanted)
    }

    fn collect(&mut self, until: Option<Instant>, out: &mut LogitResults) -> Result<bool, DeviceError> {
        self.thinker.collect(until, out)
    }

    fn expert_loads(&mut self, out: &mut Vec<ExpertLoad>) -> Result<(), DeviceError> {
        self.thinker.expert_loads(out)
    }

    fn restart_expert_loads(&mut self) -> Result<(), DeviceError> {
        self.thinker.restart_expert_loads()
    }

    fn follow_logits(&mut self, wanted: &WantedRows) -> Result<(), DeviceError> {
        self.thinker.follow_logits(wanted)
    }
}
