//! Encoders on a worker that holds no thinker.

use std::time::Instant;

use tutti_kernels::{Device, DeviceError, PageId, StepInputs};
use tutti_proto::declaration::{ModelDeclaration, WalkId};

use super::HeldEncoders;
use crate::{
    DecoderDevice, EncoderItem, PageLayout,
    model::{EmbeddedRows, Limits, LogitRequests, LogitResults, Model, WantedRows},
};

pub(super) struct EncodersAlone<D: Device> {
    pub device: D,
    pub encoders: HeldEncoders<D>,
    pub declaration: ModelDeclaration,
    pub limits: Limits,
}

fn no_thinker() -> DeviceError {
    DeviceError::Misuse("this worker holds no thinker".into())
}

impl<D: DecoderDevice> Model for EncodersAlone<D> {
    fn declaration(&self) -> &ModelDeclaration {
        &self.declaration
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn describe(&self) -> String {
        format!("{} alone, on {}", self.encoders.names(), self.device.describe())
    }

    fn device_name(&self) -> String {
        self.device.describe()
    }

    fn weight_bytes(&self) -> u64 {
        self.encoders.weight_bytes()
    }

    fn step_bytes(&self) -> u64 {
        self.device.step_bytes()
    }

    fn page_bytes(&self) -> usize {
        0
    }

    fn allocate_planes(&mut self, _: usize, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn page_layout(&self) -> PageLayout {
        PageLayout::default()
    }

    fn read_pages(&mut self, _: &[PageId], _: &mut Vec<u8>) -> Result<(), DeviceError> {
        Err(no_thinker())
    }

    fn write_pages(&mut self, _: &[PageId], _: &[u8]) -> Result<(), DeviceError> {
        Err(no_thinker())
    }

    fn forward(&mut self, _: &StepInputs<'_>, _: &[EmbeddedRows<'_>]) -> Result<(), DeviceError> {
        Err(no_thinker())
    }

    fn has_thinker(&self) -> bool {
        false
    }

    fn encode(
        &mut self,
        walk: WalkId,
        items: &[EncoderItem<'_>],
        shape: Option<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        self.encoders.of_walk(&self.declaration, walk)?.run(&mut self.device, items, shape, out)
    }

    fn enqueue_logits(&mut self, _: &LogitRequests<'_>) -> Result<(), DeviceError> {
        Err(no_thinker())
    }

    fn collect(&mut self, _: Option<Instant>, _: &mut LogitResults) -> Result<bool, DeviceError> {
        Err(no_thinker())
    }

    fn follow_logits(&mut self, _: &WantedRows) -> Result<(), DeviceError> {
        Err(no_thinker())
    }
}
