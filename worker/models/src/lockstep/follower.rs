//! A follower: a rank that runs the leader's plans.

use prost::Message;
use tutti_kernels::{
    DeviceError, PageId, SlotId,
    collective::{Collective, CollectiveError, Patience},
};
use tutti_proto::cluster::v1::{self as pb, group_plan::Action};
use tutti_transfer::{Connector, Run, UnitIds, UnitKind};

use super::{logits, plan, tables::Tables};
use crate::{IdleModel, LogitResults, Model, PausedPages};

/// Runs the leader's plans on this rank's shard of the model until the leader leaves the group. `connector` exchanges
/// this rank's shares with other groups. Calls `ran` after each forward pass, with the number of forward passes so far.
///
/// After an error, this rank is no longer in lockstep with the other ranks, so its process must end.
pub fn follow(
    model: &mut dyn Model,
    plans: &mut dyn Collective,
    connector: &mut dyn Connector,
    mut ran: impl FnMut(u64),
) -> Result<(), DeviceError> {
    let mut follower = Follower {
        model,
        plans,
        connector,
        ran: &mut ran,
        number: 0,
        forwards: 0,
        in_flight: 0,
        tables: Tables::default(),
        results: LogitResults::default(),
    };
    follower.follow()
}

/// Not generic over `ran`, so that it is compiled once and not at each call of [`follow`].
struct Follower<'a> {
    model: &'a mut dyn Model,
    plans: &'a mut dyn Collective,
    connector: &'a mut dyn Connector,
    ran: &'a mut dyn FnMut(u64),
    /// Number of the current plan. Plans are numbered from 0.
    number: u64,
    /// Number of forward passes so far. The last `in_flight` of them are not collected yet.
    forwards: u64,
    in_flight: usize,
    /// The block tables of the slots, after all plans so far.
    tables: Tables,
    /// Buffer for the results of a forward pass.
    results: LogitResults,
}

impl Follower<'_> {
    fn follow(&mut self) -> Result<(), DeviceError> {
        let mut message = Vec::new();
        while self.hear(&mut message)? {
            match self.run(&message) {
                // The leader refuses the same plan, so this rank is still in lockstep and continues.
                Err(DeviceError::Misuse(why)) => tracing::debug!(number = self.number, why, "plan refused"),
                outcome => outcome?,
            }
            self.number += 1;
        }
        Ok(())
    }

    /// Waits for the next plan. Returns false if the leader has left the group.
    fn hear(&mut self, message: &mut Vec<u8>) -> Result<bool, DeviceError> {
        match self.plans.broadcast(message, Patience::Forever) {
            Err(CollectiveError::Left { rank: 0, .. }) => Ok(false),
            heard => Ok(heard.map(|_| true)?),
        }
    }

    fn run(&mut self, message: &[u8]) -> Result<(), DeviceError> {
        let plan = pb::GroupPlan::decode(message).map_err(|e| self.bad(e.to_string()))?;
        if plan.number != self.number {
            return Err(self.bad(format!("it has number {}", plan.number)));
        }
        match plan.action {
            Some(Action::AllocatePlanes(planes)) => self.allocate(planes),
            Some(Action::Forward(forward)) => self.forward(&forward),
            Some(Action::Logits(logits)) => {
                let logits = logits::decode(logits, self.model.limits().vocab_size);
                let logits = logits.map_err(|what| self.bad(what))?;
                self.model.follow_logits(&logits)
            }
            Some(Action::Read(planes)) => self.read(planes),
            Some(Action::Write(planes)) => self.write(planes),
            Some(Action::Orders(pb::RankOrders { orders })) => orders
                .into_iter()
                .try_for_each(|order| self.connector.order(order))
                .map_err(DeviceError::Lost),
            Some(Action::SendShare(pb::SendShare { run })) => self.send_share(run.unwrap_or_default()),
            Some(Action::WriteShares(pb::WriteShares { writes })) => self.write_shares(writes),
            None => Err(self.bad("it has no known action".into())),
        }
    }

    /// Returns the error that ends this rank because it cannot run the leader's plan.
    fn bad(&self, what: String) -> DeviceError {
        DeviceError::Lost(format!("the leader's plan {} is not usable: {what}", self.number))
    }

    fn allocate(
        &mut self,
        pb::AllocatePlanes { pages, slots }: pb::AllocatePlanes,
    ) -> Result<(), DeviceError> {
        let (pages, slots) = (pages as usize, slots as usize);
        self.tables = Tables::new(pages, slots).map_err(|what| self.bad(what))?;
        let allocated = self.model.allocate_planes(pages, slots);
        self.plans.all_gather(&[u8::from(allocated.is_ok())], &mut Vec::new())?;
        allocated
    }

    fn forward(&mut self, plan: &pb::ForwardPlan) -> Result<(), DeviceError> {
        self.forwards += 1;
        if self.in_flight == self.model.limits().steps_in_flight {
            self.model.collect(None, &mut self.results)?;
            self.in_flight -= 1;
        }
        let run =
            plan::decode(plan, &mut self.tables, |inputs, embeddings| self.model.forward(inputs, embeddings));
        let outcome = run.map_err(|what| self.bad(what))?;
        self.in_flight += usize::from(outcome.is_ok());
        (self.ran)(self.forwards);
        outcome
    }

    fn read(&mut self, pb::ReadPlanes { pages, slot }: pb::ReadPlanes) -> Result<(), DeviceError> {
        let mut own = Vec::new();
        // If this read fails, the read on the leader fails, too, and the leader skips the gather. So this rank also
        // skips the gather.
        match slot {
            Some(slot) => self.model.read_slot(SlotId(slot), &mut own)?,
            None => self.model.read_pages(&page_ids(&pages), &mut own)?,
        }
        Ok(self.plans.gather_bytes(&own, None)?)
    }

    fn write(&mut self, pb::WritePlanes { pages, slot }: pb::WritePlanes) -> Result<(), DeviceError> {
        self.tables.check_pages(pages.len()).map_err(|what| self.bad(what))?;
        let (kind, count) = match slot {
            Some(_) => (UnitKind::Slot, 1),
            None => (UnitKind::Pages, pages.len()),
        };
        let mut own = vec![0; count * self.model.page_layout().share_bytes(kind, self.plans.group_rank())];
        self.plans.scatter_bytes(None, &mut own)?;
        match slot {
            Some(slot) => self.model.write_slot(SlotId(slot), &own),
            None => self.model.write_pages(&page_ids(&pages), &own),
        }
    }

    /// Reads this rank's share of a run and hands it to the connector. If the connector cannot send the share, only the
    /// transfer of that request fails. The plan has still succeeded.
    fn send_share(&mut self, run: pb::ShareRun) -> Result<(), DeviceError> {
        let (run, ids) = Run::of_message(run);
        let mut own = Vec::new();
        IdleModel(self.model).read_units(&ids, &mut own)?;
        self.connector.send(run, own);
        Ok(())
    }

    fn write_shares(&mut self, writes: Vec<pb::RankWrite>) -> Result<(), DeviceError> {
        let own = self.plans.group_rank().rank as u32;
        let mine = writes.into_iter().filter(|write| write.rank == own);
        let mut runs = mine.map(|write| Run::of_message(write.run.unwrap_or_default()));
        runs.try_for_each(|(run, ids)| self.write_share(&run, &ids))
    }

    /// Writes this rank's share of a run that has arrived. Every failure is a [`DeviceError::Lost`], because the leader
    /// relies on the write, and the other ranks do not see the failure.
    fn write_share(&mut self, run: &Run, ids: &UnitIds) -> Result<(), DeviceError> {
        let Run { key, first, .. } = run;
        let lost =
            |why: &str| DeviceError::Lost(format!("cannot write the share of {key} from {first} on: {why}"));
        let data = self.connector.take(run).ok_or_else(|| lost("it has not arrived"))?;
        IdleModel(self.model).write_units(ids, &data).map_err(|error| lost(&error.to_string()))
    }
}

fn page_ids(pages: &[u32]) -> Vec<PageId> {
    pages.iter().copied().map(PageId).collect()
}
