//! The leader: rank 0, which decides which operations the group runs.

mod shares;

use std::time::Instant;

use prost::Message;
use tutti_kernels::{
    DeviceError, PageId, SlotId, StepInputs,
    collective::{Collective, GroupRank, Patience},
};
use tutti_proto::{
    cluster::v1::{self as pb, group_plan::Action},
    declaration::{ModelDeclaration, WalkId},
};
use tutti_transfer::UnitKind;

use super::{logits, plan, tables::Tables};
use crate::{
    EmbeddedRows, EncoderItem, ExpertLoad, GroupShares, Limits, LogitRequests, LogitResults, Model,
    PageLayout, WantedRows,
};

/// A whole TP group as one model. It runs its own shard directly, and sends plans to the other ranks.
///
/// Dropping the leader ends the other ranks.
pub struct Leader {
    model: Box<dyn Model>,
    plans: Box<dyn Collective>,
    layout: PageLayout,
    /// The limits of the leader's shard, but with one step in flight. A plan holds the token ids of its rows, so the
    /// leader must collect a step's tokens before it sends the next step.
    limits: Limits,
    /// Copy of the block tables of the other ranks.
    tables: Tables,
    next: u64,
    message: Vec<u8>,
    /// The plan of the last forward pass. Its memory is reused for the next.
    forward: pb::ForwardPlan,
}

impl Leader {
    /// Combines `model`, the leader's own shard, with `plans`, the collective on which all other ranks
    /// [follow](super::follow).
    pub fn new(model: Box<dyn Model>, plans: Box<dyn Collective>) -> Self {
        let layout = model.page_layout();
        let (tables, message, forward) = (Tables::default(), Vec::new(), pb::ForwardPlan::default());
        let limits = Limits { steps_in_flight: 1, ..model.limits().clone() };
        Self { model, plans, layout, limits, tables, next: 0, message, forward }
    }

    /// Sends a plan to the other ranks without waiting for them to run it. Returns the plan's action.
    fn send(&mut self, action: Action) -> Result<Action, DeviceError> {
        let plan = pb::GroupPlan { number: self.next, action: Some(action) };
        self.next += 1;
        self.message.clear();
        plan.encode(&mut self.message)
            .map_err(|e| DeviceError::Misuse(format!("cannot encode a plan: {e}")))?;
        self.plans.broadcast(&mut self.message, Patience::Deadline)?;
        plan.action.ok_or_else(|| DeviceError::Lost("a plan lost its action".into()))
    }

    /// Sends the plan `plan`, reads this rank's share with `read`, and appends the shares of all ranks to `out`. If
    /// `read` fails, it also fails on the other ranks, and no rank takes part in a gather.
    fn gather(
        &mut self,
        plan: pb::ReadPlanes,
        kind: UnitKind,
        read: impl FnOnce(&mut dyn Model, &mut Vec<u8>) -> Result<(), DeviceError>,
        out: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        self.send(Action::Read(plan))?;
        let mut own = Vec::new();
        read(&mut *self.model, &mut own)?;
        let ranks = self.plans.group_rank().world_size;
        let mut shares = vec![0; own.len() * ranks];
        self.plans.gather_bytes(&own, Some(&mut shares))?;
        self.layout.join(kind, &shares, ranks, out);
        Ok(())
    }

    /// Sends the plan `plan`, sends each other rank its share of `data`, and returns this rank's own share.
    fn scatter(
        &mut self,
        plan: pb::WritePlanes,
        kind: UnitKind,
        count: usize,
        data: &[u8],
    ) -> Result<Vec<u8>, DeviceError> {
        let wanted = count * self.layout.bytes(kind);
        if data.len() != wanted {
            return Err(DeviceError::Misuse(format!("{} bytes for {wanted} of {kind:?}", data.len())));
        }
        self.send(Action::Write(plan))?;
        let group_rank = self.plans.group_rank();
        let mut shares = Vec::with_capacity(data.len());
        for rank in 0..group_rank.world_size {
            self.layout.cut(kind, data, GroupRank { rank, ..group_rank }, &mut shares);
        }
        let mut own = vec![0; count * self.layout.share_bytes(kind, group_rank)];
        self.plans.scatter_bytes(Some(&shares), &mut own)?;
        Ok(own)
    }
}

impl Model for Leader {
    fn declaration(&self) -> &ModelDeclaration {
        self.model.declaration()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn describe(&self) -> String {
        self.model.describe()
    }

    fn device_name(&self) -> String {
        self.model.device_name()
    }

    fn weight_bytes(&self) -> u64 {
        self.model.weight_bytes()
    }

    /// Bytes on this rank only. The other ranks report their own bytes.
    fn step_bytes(&self) -> u64 {
        self.model.step_bytes()
    }

    fn free_bytes(&self) -> Option<u64> {
        self.model.free_bytes()
    }

    fn page_bytes(&self) -> usize {
        self.model.page_bytes()
    }

    fn allocate_planes(&mut self, pages: usize, slots: usize) -> Result<(), DeviceError> {
        self.tables = Tables::new(pages, slots).map_err(DeviceError::Misuse)?;
        let plan = pb::AllocatePlanes { pages: pages as u64, slots: slots as u64 };
        self.send(Action::AllocatePlanes(plan))?;
        let own = self.model.allocate_planes(pages, slots);
        let mut answers = Vec::new();
        self.plans.all_gather(&[u8::from(own.is_ok())], &mut answers)?;
        own?;
        match answers.iter().position(|answer| *answer == 0) {
            Some(rank) => {
                let message = format!("rank {rank} cannot allocate {pages} pages and {slots} slots");
                Err(DeviceError::Lost(message))
            }
            None => Ok(()),
        }
    }

    fn page_layout(&self) -> PageLayout {
        self.layout.clone()
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.tables.check_pages(pages.len()).map_err(DeviceError::Misuse)?;
        let plan = pb::ReadPlanes { pages: pages.iter().map(|page| page.0).collect(), slot: None };
        self.gather(plan, UnitKind::Pages, |model, own| model.read_pages(pages, own), out)
    }

    fn write_pages(&mut self, pages: &[PageId], data: &[u8]) -> Result<(), DeviceError> {
        self.tables.check_pages(pages.len()).map_err(DeviceError::Misuse)?;
        let plan = pb::WritePlanes { pages: pages.iter().map(|page| page.0).collect(), slot: None };
        let own = self.scatter(plan, UnitKind::Pages, pages.len(), data)?;
        self.model.write_pages(pages, &own)
    }

    fn read_slot(&mut self, slot: SlotId, out: &mut Vec<u8>) -> Result<(), DeviceError> {
        self.tables.check_slot(slot).map_err(DeviceError::Misuse)?;
        let plan = pb::ReadPlanes { pages: Vec::new(), slot: Some(slot.0) };
        self.gather(plan, UnitKind::Slot, |model, own| model.read_slot(slot, own), out)
    }

    fn write_slot(&mut self, slot: SlotId, data: &[u8]) -> Result<(), DeviceError> {
        self.tables.check_slot(slot).map_err(DeviceError::Misuse)?;
        let plan = pb::WritePlanes { pages: Vec::new(), slot: Some(slot.0) };
        let own = self.scatter(plan, UnitKind::Slot, 1, data)?;
        self.model.write_slot(slot, &own)
    }

    fn group_shares(&mut self) -> Option<&mut dyn GroupShares> {
        Some(self)
    }

    fn forward(
        &mut self,
        inputs: &StepInputs<'_>,
        embeddings: &[EmbeddedRows<'_>],
    ) -> Result<(), DeviceError> {
        plan::encode(inputs, embeddings, &mut self.tables, &mut self.forward).map_err(DeviceError::Misuse)?;
        let plan = std::mem::take(&mut self.forward);
        if let Action::Forward(plan) = self.send(Action::Forward(plan))? {
            self.forward = plan;
        }
        self.model.forward(inputs, embeddings)
    }

    fn has_thinker(&self) -> bool {
        self.model.has_thinker()
    }

    fn encode(
        &mut self,
        walk: WalkId,
        items: &[EncoderItem<'_>],
        shape: Option<usize>,
        out: &mut Vec<f32>,
    ) -> Result<(), DeviceError> {
        self.model.encode(walk, items, shape, out)
    }

    fn enqueue_logits(&mut self, wanted: &LogitRequests<'_>) -> Result<(), DeviceError> {
        self.send(Action::Logits(logits::encode(wanted.rows_of_group())))?;
        self.model.enqueue_logits(wanted)
    }

    fn collect(&mut self, until: Option<Instant>, out: &mut LogitResults) -> Result<bool, DeviceError> {
        self.model.collect(until, out)
    }

    fn expert_loads(&mut self, out: &mut Vec<ExpertLoad>) -> Result<(), DeviceError> {
        self.model.expert_loads(out)
    }

    fn restart_expert_loads(&mut self) -> Result<(), DeviceError> {
        self.model.restart_expert_loads()
    }

    fn follow_logits(&mut self, _: &WantedRows) -> Result<(), DeviceError> {
        Err(DeviceError::Misuse("the leader of a group follows no one".into()))
    }
}
