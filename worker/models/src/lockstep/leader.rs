//! The leader: rank 0, which decides what the group runs.

use std::time::Instant;

use prost::Message;
use tutti_kernels::{
    DeviceError, PageId, StepInputs,
    collective::{Collective, Patience},
};
use tutti_proto::{
    cluster::v1::{self as pb, group_plan::Action},
    declaration::{ModelDeclaration, WalkId},
};

use super::plan;
use crate::{EmbeddedRows, LayoutPart, Limits, LogitRequests, LogitResults, Model, PageLayout};

/// A whole TP group as one model: the leader's own shard, and the other ranks through plans.
///
/// Dropping the leader ends the other ranks.
pub struct Leader {
    model: Box<dyn Model>,
    plans: Box<dyn Collective>,
    next: u64,
    message: Vec<u8>,
}

impl Leader {
    /// Combines `model`, the leader's own shard, with `plans`, the collective on which all other ranks
    /// [follow](super::follow).
    pub fn new(model: Box<dyn Model>, plans: Box<dyn Collective>) -> Self {
        Self { model, plans, next: 0, message: Vec::new() }
    }

    /// Sends a plan to the other ranks without waiting for them to run it.
    fn send(&mut self, action: Action) -> Result<(), DeviceError> {
        let plan = pb::GroupPlan { number: self.next, action: Some(action) };
        self.next += 1;
        self.message.clear();
        plan.encode(&mut self.message)
            .map_err(|e| DeviceError::Misuse(format!("cannot encode a plan: {e}")))?;
        Ok(self.plans.broadcast(&mut self.message, Patience::Deadline)?)
    }
}

impl Model for Leader {
    fn declaration(&self) -> &ModelDeclaration {
        self.model.declaration()
    }

    fn limits(&self) -> &Limits {
        self.model.limits()
    }

    fn describe(&self) -> String {
        self.model.describe()
    }

    fn weight_bytes(&self) -> u64 {
        self.model.weight_bytes()
    }

    /// Bytes on this rank only: the other ranks report their own.
    fn step_bytes(&self) -> u64 {
        self.model.step_bytes()
    }

    fn page_bytes(&self) -> usize {
        self.model.page_bytes()
    }

    fn allocate_planes(&mut self, pages: usize, slots: usize) -> Result<(), DeviceError> {
        self.send(Action::AllocatePages(pb::AllocatePages { pages: pages as u64 }))?;
        let own = self.model.allocate_planes(pages, slots);
        let mut answers = Vec::new();
        self.plans.all_gather(&[u8::from(own.is_ok())], &mut answers)?;
        own?;
        match answers.iter().position(|answer| *answer == 0) {
            Some(rank) => Err(DeviceError::Lost(format!("rank {rank} cannot allocate {pages} KV pages"))),
            None => Ok(()),
        }
    }

    fn page_layout(&self) -> PageLayout {
        self.model.page_layout()
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        let action = pb::ReadPages { pages: pages.iter().map(|page| page.0).collect() };
        self.send(Action::ReadPages(action))?;
        let (mut own, mut all) = (Vec::new(), Vec::new());
        self.model.read_pages(pages, &mut own)?;
        self.plans.all_gather(&own, &mut all)?;
        self.model.page_layout().join(LayoutPart::Pages, &all, self.plans.group_rank().world_size, out);
        Ok(())
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        let action = pb::WritePages { pages: pages.iter().map(|page| page.0).collect(), data: data.to_vec() };
        self.send(Action::WritePages(action))?;
        self.model.write_pages(pages, data)
    }

    fn forward(
        &mut self,
        inputs: &StepInputs<'_>,
        embeddings: &[EmbeddedRows<'_>],
    ) -> Result<(), DeviceError> {
        self.send(Action::Forward(plan::forward(inputs, embeddings)))?;
        self.model.forward(inputs, embeddings)
    }

    fn has_thinker(&self) -> bool {
        self.model.has_thinker()
    }

    fn encode(&mut self, walk: WalkId, data: &[u8], out: &mut Vec<f32>) -> Result<(), DeviceError> {
        self.model.encode(walk, data, out)
    }

    fn enqueue_logits(&mut self, wanted: &LogitRequests<'_>) -> Result<(), DeviceError> {
        let sampled = wanted.sample.iter().map(|(row, _)| *row as u32);
        let mut rows: Vec<u32> = sampled.chain(wanted.score.iter().map(|(row, _)| *row as u32)).collect();
        rows.sort_unstable();
        rows.dedup();
        self.send(Action::Logits(pb::LogitsPlan { rows }))?;
        self.model.enqueue_logits(wanted)
    }

    fn collect(&mut self, until: Option<Instant>, out: &mut LogitResults) -> Result<bool, DeviceError> {
        self.model.collect(until, out)
    }

    fn follow_logits(&mut self, _: &[usize]) -> Result<(), DeviceError> {
        Err(DeviceError::Misuse("the leader of a group follows no one".into()))
    }
}
