//! The thinker, with the encoder on the same device if the worker holds both.

use std::time::Instant;

use tutti_kernels::{Device, DeviceError, PageId, StepInputs};
use tutti_proto::declaration::{ModelDeclaration, WalkId};

use super::encoder::Encoder;
use crate::{
    DecoderDevice, ExpertLoad, PageLayout, StepHook,
    decoder::Decoder,
    llama::Llama,
    model::{EmbeddedRows, Limits, LogitRequests, LogitResults, Model, WantedRows},
};

pub(super) struct WithThinker<D: Device> {
    pub thinker: Decoder<D, Llama<D>>,
    pub encoder: Option<Encoder<D>>,
    pub declaration: ModelDeclaration,
}

impl<D: DecoderDevice> Model for WithThinker<D> {
    fn declaration(&self) -> &ModelDeclaration {
        &self.declaration
    }

    fn limits(&self) -> &Limits {
        self.thinker.limits()
    }

    fn describe(&self) -> String {
        let encoder = if self.encoder.is_some() { ", with" } else { ", without" };
        format!("{}{encoder} an audio encoder (for tests)", self.thinker.describe())
    }

    fn device_name(&self) -> String {
        self.thinker.device_name()
    }

    fn weight_bytes(&self) -> u64 {
        self.thinker.weight_bytes() + self.encoder.as_ref().map_or(0, Encoder::weight_bytes)
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

    fn encode(&mut self, walk: WalkId, items: &[&[u8]], out: &mut Vec<f32>) -> Result<(), DeviceError> {
        match &mut self.encoder {
            Some(encoder) if self.declaration.encodes(walk) => encoder.run(self.thinker.device(), items, out),
            _ => Err(DeviceError::Misuse(format!("walk {walk} passes no encoder of this worker"))),
        }
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
