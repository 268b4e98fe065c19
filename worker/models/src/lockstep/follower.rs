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
/// this rank's shares with other groups. After each forward pass, calls `ran` with the number of forward passes so far.
///
/// After an error this rank is out of step with the other ranks, so its process must end.
pub fn follow(
    model: &mut dyn Model,
    plans: &mut dyn Collective,
    connector: &mut dyn Connector,
    mut ran: impl FnMut(u64),
) -> Result<(), DeviceError> {
    let layout = model.page_layout();
    let (mut message, mut forwards, mut tables) = (Vec::new(), 0, Tables::default());
    let (mut in_flight, mut results) = (0, LogitResults::default());
    for number in 0.. {
        match plans.broadcast(&mut message, Patience::Forever) {
            Err(CollectiveError::Left { rank: 0, .. }) => return Ok(()),
            heard => heard?,
        }
        let bad =
            |what: String| DeviceError::Lost(format!("the leader's plan {number} is not usable: {what}"));
        let plan = pb::GroupPlan::decode(&message[..]).map_err(|e| bad(e.to_string()))?;
        if plan.number != number {
            return Err(bad(format!("it has number {}", plan.number)));
        }
        let outcome = match plan.action {
            Some(Action::AllocatePlanes(pb::AllocatePlanes { pages, slots })) => {
                let (pages, slots) = (pages as usize, slots as usize);
                tables = Tables::new(pages, slots).map_err(bad)?;
                let allocated = model.allocate_planes(pages, slots);
                plans.all_gather(&[u8::from(allocated.is_ok())], &mut Vec::new())?;
                allocated
            }
            Some(Action::Forward(plan)) => {
                forwards += 1;
                if in_flight == model.limits().steps_in_flight {
                    model.collect(None, &mut results)?;
                    in_flight -= 1;
                }
                let run =
                    plan::decode(&plan, &mut tables, |inputs, embeddings| model.forward(inputs, embeddings));
                let outcome = run.map_err(bad)?;
                in_flight += usize::from(outcome.is_ok());
                ran(forwards);
                outcome
            }
            Some(Action::Logits(plan)) => model.follow_logits(&logits::decode(plan).map_err(bad)?),
            Some(Action::Read(pb::ReadPlanes { pages, slot })) => {
                let mut own = Vec::new();
                let read = match slot {
                    Some(slot) => model.read_slot(SlotId(slot), &mut own),
                    None => model.read_pages(&page_ids(&pages), &mut own),
                };
                // If reading fails here, it also fails on the leader, and the leader then skips the gather. This rank
                // must therefore skip the gather, too.
                match read {
                    Ok(()) => Ok(plans.gather_bytes(&own, None)?),
                    Err(error) => Err(error),
                }
            }
            Some(Action::Write(pb::WritePlanes { pages, slot })) => {
                tables.check_pages(pages.len()).map_err(bad)?;
                let (part, count) = match slot {
                    Some(_) => (UnitKind::Slot, 1),
                    None => (UnitKind::Pages, pages.len()),
                };
                let mut own = vec![0; count * layout.share_bytes(part, plans.group_rank())];
                plans.scatter_bytes(None, &mut own)?;
                match slot {
                    Some(slot) => model.write_slot(SlotId(slot), &own),
                    None => model.write_pages(&page_ids(&pages), &own),
                }
            }
            Some(Action::Orders(pb::RankOrders { orders })) => {
                orders.into_iter().try_for_each(|order| connector.order(order)).map_err(DeviceError::Lost)
            }
            Some(Action::SendShare(pb::SendShare { run })) => {
                let (run, ids) = Run::of_message(run.unwrap_or_default());
                let mut own = Vec::new();
                let read = IdleModel(model).read_units(&ids, &mut own);
                // The connector has no part in the plan's outcome: a share that cannot be sent fails its request alone.
                read.map(|()| connector.send(run, own))
            }
            Some(Action::WriteShares(pb::WriteShares { writes })) => {
                let own = plans.group_rank().rank as u32;
                let mine = writes.into_iter().filter(|write| write.rank == own);
                let mut mine = mine.map(|write| Run::of_message(write.run.unwrap_or_default()));
                mine.try_for_each(|(run, ids)| write_share(model, connector, &run, &ids))
            }
            None => Err(bad("it has no known action".into())),
        };
        match outcome {
            // The leader refuses the same plan, so this rank goes on and stays in step with the group.
            Err(DeviceError::Misuse(why)) => tracing::debug!(number, why, "plan refused"),
            outcome => outcome?,
        }
    }
    Ok(())
}

/// Writes this rank's share of a run that has arrived. Every failure is a [`DeviceError::Lost`]: the leader counts on the
/// write, and the other ranks do not see the failure.
fn write_share(
    model: &mut dyn Model,
    connector: &mut dyn Connector,
    run: &Run,
    ids: &UnitIds,
) -> Result<(), DeviceError> {
    let Run { key, first, .. } = run;
    let lost =
        |why: &str| DeviceError::Lost(format!("cannot write the share of {key} from {first} on: {why}"));
    let data = connector.take(run).ok_or_else(|| lost("it has not arrived"))?;
    IdleModel(model).write_units(ids, &data).map_err(|error| lost(&error.to_string()))
}

fn page_ids(pages: &[u32]) -> Vec<PageId> {
    pages.iter().copied().map(PageId).collect()
}
