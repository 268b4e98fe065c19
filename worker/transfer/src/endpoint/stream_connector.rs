//! The connector that moves units over gRPC streams, and through shared memory on one host.

use std::{sync::Arc, time::Instant};

use tokio::sync::mpsc;
use tutti_proto::{
    GraphKey,
    cluster::v1::{self as pb, rank_order::Order},
};

use super::{Endpoint, Role};
use crate::{Connector, Event, Extent, HandOver, Run, UnitKind, receive::Space};

/// A connector whose tasks run at the same time as the engine or, at a follower, as the leader's plans.
pub struct StreamConnector {
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) inbox: mpsc::Receiver<Event>,
}

impl StreamConnector {
    pub(super) fn new(endpoint: Arc<Endpoint>, inbox: mpsc::Receiver<Event>) -> Self {
        Self { endpoint, inbox }
    }
}

impl Connector for StreamConnector {
    fn room(&self) -> usize {
        let own = self.endpoint.sender.staging.left();
        self.endpoint.ranks().map_or(own, |ranks| ranks.left().min(own))
    }

    fn send(&mut self, run: Run, data: Vec<u8>) {
        if let Some(ranks) = self.endpoint.ranks().filter(|_| run.extent == Extent::Share) {
            ranks.staged(data.len());
        }
        // The method returns no result: if the push fails, an event reports the failure.
        self.endpoint.sender.put(run, data);
    }

    fn export(&mut self, key: GraphKey, hand_over: HandOver, since: Instant) {
        if let Some(ranks) = self.endpoint.ranks() {
            let (computed_tokens, counts) = (hand_over.computed as u32, hand_over.counts());
            ranks.order_end(key, pb::EndShare { key: Some(key.into()), computed_tokens, counts });
        }
        self.endpoint.sender.put_end(key, hand_over, since);
    }

    fn reserve(&mut self, key: GraphKey, kind: UnitKind, count: usize, known: usize) {
        let endpoint = &self.endpoint;
        let ranks = endpoint.ranks_for(kind).filter(|ranks| ranks.lost().is_none());
        let (layout, share) =
            (endpoint.units.of(kind, Extent::Whole).clone(), ranks.map(|_| endpoint.units.share.clone()));
        endpoint.reserve(key, Space { layout, share, count, known, segment: None });
    }

    fn end(&mut self, key: GraphKey) {
        self.endpoint.end(key);
    }

    fn next_event(&mut self) -> Option<Event> {
        self.inbox.try_recv().ok()
    }

    fn orders(&mut self) -> Vec<pb::RankOrder> {
        self.endpoint.ranks().map_or_else(Vec::new, |ranks| ranks.take_orders())
    }

    fn order(&mut self, order: pb::RankOrder) -> Result<(), String> {
        let Role::Follower(follower) = &self.endpoint.role else {
            return Err("a leader takes no orders".to_owned());
        };
        follower.check_reports()?;
        match order.order {
            Some(Order::ReportTo(to)) => {
                let staging = Arc::clone(&self.endpoint.sender.staging);
                follower.start_reports(to, staging, &self.endpoint.runtime);
            }
            Some(Order::Reserve(pb::ReserveShare { key, secret, lease_ms, count, known })) => {
                let (key, count, known) = (key.unwrap_or_default().into(), count as usize, known as usize);
                follower.store.expect(key, count, known);
                self.endpoint.reservations.expect(key, &pb::PlaneReservation { secret, lease_ms });
                let layout = self.endpoint.units.share.clone();
                self.endpoint.reserve(key, Space { layout, share: None, count, known, segment: None });
            }
            Some(Order::Push(pb::PushShare { key, to, count })) => {
                let to = follower.destination(to.unwrap_or_default());
                let (key, share) = (key.unwrap_or_default().into(), self.endpoint.units.share.clone());
                self.endpoint.push(key, to, share, count as usize);
            }
            Some(Order::End(pb::EndShare { key, computed_tokens, counts })) => {
                let message = pb::HandOver { computed_tokens, counts, ..Default::default() };
                let hand_over = HandOver::of_message(&message).unwrap_or_default();
                self.export(key.unwrap_or_default().into(), hand_over, Instant::now());
            }
            Some(Order::Forget(key)) => self.end(key.into()),
            None => tracing::warn!("ignored an order of unknown kind"),
        }
        Ok(())
    }

    fn take(&mut self, run: &Run) -> Option<Vec<u8>> {
        match &self.endpoint.role {
            Role::Follower(follower) => follower.store.take(run),
            Role::Leader(_) => None,
        }
    }
}
