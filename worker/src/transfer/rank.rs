//! Transfers of a rank that follows its leader: it pushes its own share of each request, and takes its share of the
//! requests that its group receives. The leader's plans say when; reports tell the leader what has become of it.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, OnceLock},
    time::Instant,
};

use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
};
use tutti_engine::{Cargo, ExportSummary, PageRun, TransferError};
use tutti_kernels::collective::GroupRank;
use tutti_models::{PageLayout, RankCourier, ShareRun, ShareUnits};
use tutti_proto::{
    GraphKey,
    cluster::v1::{self as pb, rank_order::Order, rank_report::Report},
};

use crate::network::Network;

use super::{
    freight::Freight,
    listener::Listener,
    pushes::Pushes,
    rank_reports::report_to,
    receiver::{Receiver, Taker},
    reservations::{Reservations, ReservedSpace},
    segment::Segment,
    share_store::ShareStore,
};

/// Maximum number of reports in the queue to the leader. While the queue is full, the tasks of transfers wait.
const QUEUED_REPORTS: usize = 64;

/// A follower's side of all transfers of shares.
pub struct RankTransfer {
    hub: Arc<RankHub>,
    /// `None` once the leader has said where it takes reports.
    reports: Option<mpsc::Receiver<pb::RankReport>>,
    hosts: RankHosts,
}

struct RankHub {
    runtime: Handle,
    group_rank: GroupRank,
    freight: Freight,
    pushes: Pushes,
    reservations: Arc<Reservations>,
    store: Arc<ShareStore>,
    listener: Listener,
    reports: mpsc::Sender<pb::RankReport>,
    /// The reason why reports no longer reach the leader.
    cut_off: OnceLock<String>,
    /// The load that heartbeats report, for the counts of transfers.
    load: watch::Sender<pb::WorkerLoad>,
}

/// Hosts of a rank's group.
#[derive(Clone, Debug)]
pub struct RankHosts {
    /// Host at which other workers reach this rank, and its way to them.
    pub own: Network,
    /// Host at which this rank reaches its leader.
    pub leader: IpAddr,
}

impl RankTransfer {
    /// The transfer of a rank that has no part in any yet.
    pub fn new(
        group_rank: GroupRank,
        hosts: RankHosts,
        layout: &PageLayout,
        load: watch::Sender<pb::WorkerLoad>,
        runtime: &Handle,
    ) -> Self {
        let (reports, inbox) = mpsc::channel(QUEUED_REPORTS);
        let freight = Freight::of_share(layout, group_rank);
        let hub = Arc::new(RankHub {
            runtime: runtime.clone(),
            group_rank,
            pushes: Pushes::new(freight.largest_unit(), hosts.own.clone()),
            freight,
            reservations: Arc::default(),
            store: Arc::new(ShareStore::new(group_rank.rank, reports.clone())),
            listener: Listener::at(hosts.own.clone()),
            reports,
            cut_off: OnceLock::new(),
            load,
        });
        Self { hub, reports: Some(inbox), hosts }
    }

    fn start_reports(&mut self, to: pb::ReportTo) {
        let Some(inbox) = self.reports.take() else { return };
        let leader = SocketAddr::new(self.hosts.leader, u16::try_from(to.port).unwrap_or_default());
        let hello = pb::RankHello { rank: self.hub.group_rank.rank as u32, secret: to.secret };
        let (hub, network) = (Arc::clone(&self.hub), self.hosts.own.clone());
        self.hub.runtime.spawn(async move {
            let why = report_to(&network, leader, hello, inbox).await;
            tracing::error!(%leader, why, "no longer reports to the group's leader");
            // The first reason stays, and there is no other.
            let _ = hub.cut_off.set(why);
        });
        let hub = Arc::clone(&self.hub);
        self.hub.runtime.spawn(async move {
            loop {
                let released = hub.pushes.staging.released().await;
                hub.report(Report::ReleasedBytes(released)).await;
            }
        });
    }
}

impl RankCourier for RankTransfer {
    fn order(&mut self, order: pb::RankOrder) -> Result<(), String> {
        let hub = &self.hub;
        if let Some(why) = hub.cut_off.get() {
            return Err(format!("this rank cannot report to its leader: {why}"));
        }
        match order.order {
            Some(Order::ReportTo(to)) => self.start_reports(to),
            Some(Order::Reserve(reserve)) => hub.reserve(reserve),
            Some(Order::Push(push)) => hub.push(push),
            Some(Order::End(pb::EndShare { key, computed_tokens, counts })) => {
                let count = |index: usize| counts.get(index).map_or(0, |count| *count as usize);
                let (computed, pages, slots) = (computed_tokens as usize, count(0), count(1));
                let summary = ExportSummary { first: None, computed, pages, slots, since: Instant::now() };
                hub.pushes.put_end(key.unwrap_or_default().into(), summary);
            }
            Some(Order::Forget(key)) => hub.forget(key.into()),
            None => tracing::warn!("ignored an order of unknown kind"),
        }
        Ok(())
    }

    fn send(&mut self, run: &ShareRun, data: Vec<u8>) {
        let cargo = match run.units {
            ShareUnits::Pages(_) => Cargo::Pages,
            ShareUnits::Slot(_) => Cargo::Slot,
        };
        self.hub.pushes.put(PageRun { key: run.key, cargo, first: run.first, data });
    }

    fn take(&mut self, run: &ShareRun) -> Option<Vec<u8>> {
        self.hub.store.take(run)
    }
}

impl RankHub {
    async fn report(&self, report: Report) {
        // Sending fails only if the process is ending, since the inbox outlives the reports.
        let _ = self.reports.send(pb::RankReport { report: Some(report) }).await;
    }

    async fn report_failure(&self, key: GraphKey, error: TransferError) {
        let is_refused = matches!(error, TransferError::Refused(_));
        let reason = format!("rank {}: {error}", self.group_rank.rank);
        tracing::info!(%key, reason, "a share did not get across");
        self.report(Report::Failed(pb::ShareFailed { key: Some(key.into()), reason, is_refused })).await;
    }

    fn push(self: &Arc<Self>, pb::PushShare { key, to, count }: pb::PushShare) {
        let (key, to) = (GraphKey::from(key.unwrap_or_default()), to.unwrap_or_default());
        let own = to.ranks.get(self.group_rank.rank - 1).cloned().unwrap_or_default();
        let pb::RankDestination { address, shared_memory } = own;
        let to = pb::PlaneDestination { address, shared_memory, ..to };
        let Some(push) = self.pushes.begin(key, to, self.freight.clone(), count as usize) else { return };
        let hub = Arc::clone(self);
        self.runtime.spawn(async move {
            let outcome = hub.pushes.run(key, push).await;
            hub.load.send_modify(|load| load.transfers = Some(hub.pushes.tally.message()));
            if let Some(Err(error)) = outcome {
                hub.report_failure(key, error).await;
            }
        });
    }

    fn reserve(self: &Arc<Self>, reserve: pb::ReserveShare) {
        let pb::ReserveShare { key, secret, lease_ms, count, known } = reserve;
        let (key, count, known) = (GraphKey::from(key.unwrap_or_default()), count as usize, known as usize);
        self.store.expect(key, count, known);
        self.reservations.expect(key, &pb::PlaneReservation { secret: secret.clone(), lease_ms });
        let space = ReservedSpace { freight: self.freight.clone(), share: None, count, known, segment: None };
        self.reservations.hold(key, space);
        self.runtime.spawn(Arc::clone(self).offer(key, secret, count));
    }

    /// Reports the room for a request's share, and then waits until the reservation ends or its lease expires.
    async fn offer(self: Arc<Self>, key: GraphKey, secret: Vec<u8>, count: usize) {
        let services = || {
            let (reservations, taker) =
                (Arc::clone(&self.reservations), Taker::Rank(Arc::clone(&self.store)));
            (Receiver { reservations, taker }, None)
        };
        let port = match self.listener.port(&self.runtime, self.freight.largest_unit(), services).await {
            Ok(port) => port.into(),
            Err(error) => {
                let error = TransferError::Lost(format!("cannot listen for planes: {error}"));
                return self.report_failure(key, error).await;
            }
        };
        let shared_memory =
            Segment::offer(&secret, self.freight.bytes(count)).map_or_else(String::new, |segment| {
                let path = segment.path();
                self.reservations.set_segment(key, segment);
                path
            });
        let room = Some(pb::RankRoom { port, shared_memory });
        self.report(Report::Held(pb::ShareRoom { key: Some(key.into()), room })).await;
        if let Some(lease) = self.reservations.expired(key).await {
            let error = TransferError::Lost(format!("its sender was silent for {lease:?}"));
            self.report_failure(key, error).await;
        }
    }

    fn forget(&self, key: GraphKey) {
        self.pushes.close(key);
        self.reservations.end(key);
        self.store.forget(key);
    }
}
