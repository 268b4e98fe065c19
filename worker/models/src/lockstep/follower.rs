//! A follower: a rank that runs the leader's plans.

use prost::Message;
use tutti_kernels::{
    DeviceError, PageId,
    collective::{Collective, CollectiveError, Patience},
};
use tutti_proto::cluster::v1::{self as pb, group_plan::Action};

use super::plan::Forward;
use crate::{LogitResults, Model};

/// Runs the leader's plans on this rank's shard of the model until the leader leaves the group. After each forward
/// pass, calls `ran` with the number of forward passes so far.
///
/// After an error this rank is out of step with the other ranks, so its process must end.
pub fn follow(
    model: &mut dyn Model,
    plans: &mut dyn Collective,
    mut ran: impl FnMut(u64),
) -> Result<(), DeviceError> {
    let (mut message, mut forwards) = (Vec::new(), 0);
    let (mut in_flight, mut results) = (0, LogitResults::default());
    for number in 0.. {
        match plans.broadcast(&mut message, Patience::Forever) {
            Err(CollectiveError::Left { rank: 0, .. }) => return Ok(()),
            heard => heard?,
        }
        let plan = pb::GroupPlan::decode(&message[..])
            .map_err(|e| DeviceError::Lost(format!("cannot decode the leader's plan {number}: {e}")))?;
        if plan.number != number {
            let message = format!("the leader sent plan {}, expected plan {number}", plan.number);
            return Err(DeviceError::Lost(message));
        }
        let outcome = match plan.action {
            Some(Action::AllocatePages(pb::AllocatePages { pages })) => {
                // The slots are not on the wire: no model of a group has slot planes yet.
                let allocated = model.allocate_planes(pages as usize, 1);
                plans.all_gather(&[u8::from(allocated.is_ok())], &mut Vec::new())?;
                allocated
            }
            Some(Action::Forward(plan)) => {
                forwards += 1;
                if in_flight == model.limits().steps_in_flight {
                    model.collect(None, &mut results)?;
                    in_flight -= 1;
                }
                let outcome = Forward::new(plan).run(|inputs, embeddings| model.forward(inputs, embeddings));
                in_flight += usize::from(outcome.is_ok());
                ran(forwards);
                outcome
            }
            Some(Action::Logits(pb::LogitsPlan { rows })) => {
                let rows: Vec<usize> = rows.into_iter().map(|row| row as usize).collect();
                model.follow_logits(&rows)
            }
            Some(Action::ReadPages(pb::ReadPages { pages })) => {
                let mut own = Vec::new();
                let read = model.read_pages(&page_ids(&pages), &mut own);
                // If reading fails here, it also fails on the leader, and the leader then skips the `all_gather`. This
                // rank must therefore skip the `all_gather`, too.
                match read {
                    Ok(()) => Ok(plans.all_gather(&own, &mut Vec::new())?),
                    Err(error) => Err(error),
                }
            }
            Some(Action::WritePages(pb::WritePages { pages, data })) => {
                model.write_pages(&page_ids(&pages), &data)
            }
            None => Err(DeviceError::Lost(format!("the leader's plan {number} has no known action"))),
        };
        match outcome {
            // The leader refuses the same plan, so this rank goes on and stays in step with the group.
            Err(DeviceError::Misuse(why)) => tracing::debug!(number, why, "plan refused"),
            outcome => outcome?,
        }
    }
    Ok(())
}

fn page_ids(pages: &[u32]) -> Vec<PageId> {
    pages.iter().copied().map(PageId).collect()
}
