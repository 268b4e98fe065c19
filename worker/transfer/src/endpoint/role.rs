//! Roles of an endpoint. A leader serves an engine; a follower serves a rank that runs its leader's plans.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use tokio::{
    runtime::Handle,
    sync::{mpsc, watch},
};
use tonic::Status;
use tutti_kernels::collective::GroupRank;
use tutti_proto::{
    GraphKey,
    cluster::v1::{self as pb, rank_report::Report, worker_message::Message as ToConductor},
};
use tutti_scheduler::TransferError;

use crate::{
    Event, Network, Run, Source,
    network::ServiceAddress,
    ranks::{Ranks, ShareStore, report_to},
    receive::Space,
    send::StagingBudget,
};

/// Maximum number of reports in the queue to the leader. While the queue is full, the tasks of transfers wait.
const QUEUED_REPORTS: usize = 64;

/// Destination of the events of an endpoint's transfers.
#[derive(Clone)]
pub(crate) enum Role {
    /// The engine takes the events. This is the role of a group's leader, and of a worker without a group.
    Leader(Leader),
    /// The group's leader takes the events, as reports.
    Follower(Arc<Follower>),
}

#[derive(Clone)]
pub(crate) struct Leader {
    pub events: Events,
    /// The other ranks of this worker's group; `None` without a group.
    pub ranks: Option<Arc<Ranks>>,
    /// Weak, because a strong sender would keep the outbox open. The outbox must close when the worker ends, because
    /// that tells the conductor of the end.
    pub outbox: mpsc::WeakSender<pb::WorkerMessage>,
}

/// The queue of events to the engine, and the function that wakes the engine.
#[derive(Clone)]
pub(crate) struct Events {
    queue: mpsc::Sender<Event>,
    wake: Arc<dyn Fn() + Send + Sync>,
}

pub(crate) struct Follower {
    group_rank: GroupRank,
    pub store: ShareStore,
    hosts: Hosts,
    reports: mpsc::Sender<pb::RankReport>,
    /// `None` once the leader has named the port of its reports.
    pub inbox: Mutex<Option<mpsc::Receiver<pb::RankReport>>>,
    /// The reason why reports no longer reach the leader.
    cut_off: OnceLock<String>,
    /// The load that this rank's heartbeats report. The endpoint publishes its transfer counts in it.
    load: watch::Sender<pb::WorkerLoad>,
}

/// The hosts of a rank and of its group's leader.
#[derive(Clone, Debug)]
pub struct Hosts {
    /// The network of this rank, with the host at which other workers reach it.
    pub own: Network,
    /// Host at which this rank reaches its leader.
    pub leader: IpAddr,
}

impl Events {
    pub fn new(queue: mpsc::Sender<Event>, wake: impl Fn() + Send + Sync + 'static) -> Self {
        Self { queue, wake: Arc::new(wake) }
    }

    pub fn wake(&self) {
        (self.wake)();
    }

    /// Delivers an event to the engine, and waits while the engine's inbox is full. Fails if the engine has ended.
    pub async fn deliver(&self, event: Event) -> Result<(), Status> {
        self.queue.send(event).await.map_err(|_| Status::unavailable("the worker is ending"))?;
        self.wake();
        Ok(())
    }

    /// Delivers an event, or drops it if the engine has ended.
    pub async fn send(&self, event: Event) {
        // Ignored: if the engine has ended, nothing waits for its events.
        let _ = self.deliver(event).await;
    }
}

impl Role {
    /// Passes on a run whose range and length have been checked. Waits while there is no room for the run.
    pub async fn arrived(&self, run: Run, data: Vec<u8>) -> Result<(), Status> {
        match self {
            Self::Leader(leader) => leader.events.deliver(Event::Arrived(run, Source::Here(data))).await,
            Self::Follower(follower) => follower.store.put(run, data).await,
        }
    }

    /// Passes on the outcome of a push: the receiver has accepted the request, or the push has failed.
    pub async fn pushed(&self, key: GraphKey, outcome: Result<(), TransferError>) {
        match (self, outcome) {
            (_, Err(error)) => {
                tracing::info!(%key, %error, "planes did not get across");
                if let Self::Leader(Leader { ranks: Some(ranks), .. }) = self {
                    ranks.forget(key);
                }
                self.failed(key, error).await;
            }
            (Self::Leader(leader), Ok(())) => {
                leader.ranks.iter().for_each(|ranks| ranks.handed_over(key));
                leader.events.send(Event::Accepted(key)).await;
            }
            // A follower's success is not reported: the leader's own push reports the success of all ranks.
            (Self::Follower(_), Ok(())) => {}
        }
    }

    /// Passes on the failure of a transfer.
    pub async fn failed(&self, key: GraphKey, error: TransferError) {
        match self {
            Self::Leader(leader) => leader.events.send(Event::Failed(key, error)).await,
            Self::Follower(follower) => {
                let is_refused = matches!(error, TransferError::Refused(_));
                let reason = format!("rank {}: {error}", follower.group_rank.rank);
                follower
                    .report(Report::Failed(pb::ShareFailed { key: Some(key.into()), reason, is_refused }))
                    .await;
            }
        }
    }

    /// Publishes a follower's transfer counts in the load that its heartbeats report. Nothing else reports them.
    pub fn counted(&self, counts: pb::TransferCounts) {
        if let Self::Follower(follower) = self {
            follower.load.send_modify(|load| load.transfers = Some(counts));
        }
    }

    /// Forgets a request at the other ranks, or in a follower's store.
    pub fn ended(&self, key: GraphKey) {
        match self {
            Self::Leader(leader) => leader.ranks.iter().for_each(|ranks| ranks.forget(key)),
            Self::Follower(follower) => follower.store.forget(key),
        }
    }
}

impl Leader {
    /// Tells the conductor how much room a request has at this rank and at the other ranks.
    pub async fn announce(&self, key: GraphKey, space: &Space, room: pb::RankRoom, ranks: Vec<pb::RankRoom>) {
        let pb::RankRoom { port, shared_memory, socket } = room;
        let (layout_hash, known_pages) = (space.layout.id, space.known as u32);
        let key = Some(key.into());
        let reserved = pb::Reserved { key, port, layout_hash, shared_memory, known_pages, ranks, socket };
        let message = pb::WorkerMessage { message: Some(ToConductor::Reserved(reserved)) };
        if let Some(outbox) = self.outbox.upgrade() {
            // Ignored: sending fails only if the process is ending.
            let _ = outbox.send(message).await;
        }
    }
}

impl Follower {
    pub fn new(group_rank: GroupRank, hosts: Hosts, load: watch::Sender<pb::WorkerLoad>) -> Self {
        let (reports, inbox) = mpsc::channel(QUEUED_REPORTS);
        let store = ShareStore::new(group_rank.rank, reports.clone());
        let (inbox, cut_off) = (Mutex::new(Some(inbox)), OnceLock::new());
        Self { group_rank, store, hosts, reports, inbox, cut_off, load }
    }

    /// Fails if the leader can no longer learn the outcome of this rank's shares.
    pub fn check_reports(&self) -> Result<(), String> {
        let cut_off = self.cut_off.get();
        cut_off.map_or(Ok(()), |why| Err(format!("this rank cannot report to its leader: {why}")))
    }

    pub async fn report(&self, report: Report) {
        // Ignored: sending fails only if the process is ending, because until then the inbox is kept.
        let _ = self.reports.send(pb::RankReport { report: Some(report) }).await;
    }

    /// Starts reports to the leader. The reports include the total of bytes that have left `staging`.
    pub fn start_reports(self: &Arc<Self>, to: pb::ReportTo, staging: Arc<StagingBudget>, runtime: &Handle) {
        let Some(inbox) = self.inbox.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let leader = ServiceAddress::dialled(self.hosts.leader, to.port, &to.socket);
        let hello = (pb::RankHello { rank: self.group_rank.rank as u32 }, to.secret);
        let follower = Arc::clone(self);
        runtime.spawn(async move {
            let why = report_to(&follower.hosts.own, &leader, hello, inbox).await;
            tracing::error!(leader, why, "no longer reports to the group's leader");
            // Ignored: this is the only place that sets the reason.
            let _ = follower.cut_off.set(why);
        });
        let follower = Arc::clone(self);
        runtime.spawn(async move {
            loop {
                follower.report(Report::ReleasedBytes(staging.released().await)).await;
            }
        });
    }

    /// Returns this rank's entry of a destination that lists all ranks of a group.
    pub fn destination(&self, to: pb::PlaneDestination) -> pb::PlaneDestination {
        let own = to.ranks.get(self.group_rank.rank - 1).cloned().unwrap_or_default();
        let pb::RankDestination { address, shared_memory } = own;
        pb::PlaneDestination { address, shared_memory, ..to }
    }
}
