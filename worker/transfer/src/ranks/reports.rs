//! Reports of a group's other ranks to their leader, about transfers of shares.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_stream::{StreamExt, once, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming, service::interceptor::InterceptedService};
use tutti_proto::{
    GraphKey,
    cluster::v1::{
        self as pb,
        rank_report::Report,
        rank_reports_client::RankReportsClient,
        rank_reports_server::{RankReports, RankReportsServer},
    },
};
use tutti_runtime::tls::with_causes;
use tutti_scheduler::TransferError;

use super::Ranks;
use crate::{
    Event, Extent, KEEP_ALIVE, Network, Run, Source, UnitKind,
    credential::{self, Check},
    endpoint::Events,
    receive::Reservations,
    send::Sender,
};

/// The leader's end: the gRPC service that the other ranks call.
pub(crate) struct Reports {
    pub ranks: Arc<Ranks>,
    pub sender: Arc<Sender>,
    pub reservations: Arc<Reservations>,
    pub events: Events,
}

#[tonic::async_trait]
impl RankReports for Reports {
    async fn report(
        &self,
        request: Request<Streaming<pb::RankReport>>,
    ) -> Result<Response<pb::ReportsEnded>, Status> {
        let mut reports = request.into_inner();
        let Some(Report::Hello(hello)) = reports.message().await?.and_then(|report| report.report) else {
            return Err(Status::invalid_argument("the first report is not a hello"));
        };
        let rank = hello.rank as usize;
        if !self.ranks.followers().contains(&rank) {
            return Err(Status::invalid_argument(format!("rank {rank} is not in the group, or leads it")));
        }
        let ended = self.take_all(rank, &mut reports).await;
        let why = ended.as_ref().err().map_or("its stream ended", Status::message);
        let why = format!("rank {rank} reports no more: {why}");
        for key in self.ranks.lose(&why) {
            self.fail(key, TransferError::Lost(why.clone())).await;
        }
        ended.map(|()| Response::new(pb::ReportsEnded {}))
    }
}

impl Reports {
    /// Returns the service, with a check of its callers' credentials in front.
    pub fn into_service(self) -> InterceptedService<RankReportsServer<Self>, impl Check> {
        let check = credential::check_report(Arc::clone(&self.ranks));
        InterceptedService::new(RankReportsServer::new(self), check)
    }

    async fn take_all(&self, rank: usize, reports: &mut Streaming<pb::RankReport>) -> Result<(), Status> {
        while let Some(report) = reports.message().await? {
            let report = report.report.ok_or_else(|| Status::invalid_argument("a report of unknown kind"))?;
            self.take(rank, report).await?;
        }
        Ok(())
    }

    async fn take(&self, rank: usize, report: Report) -> Result<(), Status> {
        match report {
            Report::Hello(_) => return Err(Status::invalid_argument("a second hello")),
            Report::Held(pb::ShareRoom { key, room }) => {
                self.ranks.held(key.unwrap_or_default().into(), rank, room.unwrap_or_default());
            }
            Report::Arrived(pb::ShareArrived { key, kind, first, count }) => {
                let kind = if kind == 0 { UnitKind::Pages } else { UnitKind::Slot };
                let (key, first, count) = (key.unwrap_or_default().into(), first as usize, count as usize);
                let run = Run { key, kind, extent: Extent::Share, first, count };
                self.events.send(Event::Arrived(run, Source::Rank(rank))).await;
            }
            Report::ReleasedBytes(bytes) => {
                if self.ranks.released(rank, bytes) {
                    self.events.wake();
                }
            }
            Report::Failed(pb::ShareFailed { key, reason, is_refused }) => {
                let error = if is_refused { TransferError::Refused } else { TransferError::Lost };
                self.fail(key.unwrap_or_default().into(), error(reason)).await;
            }
        }
        Ok(())
    }

    /// Fails the transfer of a request that this group sends or receives. Has no effect if the transfer is over.
    async fn fail(&self, key: GraphKey, error: TransferError) {
        if self.sender.has(key) {
            self.sender.close(key);
            self.ranks.forget(key);
        } else if !self.reservations.fail(key, error.to_string()) {
            return;
        }
        // A request that this group receives is not forgotten yet, because the engine may already have ordered a write
        // of its shares. The ranks keep the request until the engine orders them to forget it.
        tracing::info!(%key, %error, "a share did not get across");
        self.events.send(Event::Failed(key, error)).await;
    }
}

/// Streams a rank's reports to its leader, after a hello that shows the group's secret. Returns the reason if the
/// stream ends.
pub(crate) async fn report_to(
    network: &Network,
    leader: &str,
    hello: (pb::RankHello, Vec<u8>),
    reports: mpsc::Receiver<pb::RankReport>,
) -> String {
    let dial = match network.dial(leader) {
        Ok(dial) => dial,
        Err(error) => return error.to_string(),
    };
    let dial = dial.tuned(|endpoint| {
        endpoint.http2_keep_alive_interval(KEEP_ALIVE).keep_alive_timeout(KEEP_ALIVE).tcp_nodelay(true)
    });
    let channel = match dial.connect().await {
        Ok(channel) => channel,
        Err(error) => return with_causes(&error),
    };
    let (hello, secret) = hello;
    let hello = pb::RankReport { report: Some(Report::Hello(hello)) };
    let stream = once(hello).chain(ReceiverStream::new(reports));
    match RankReportsClient::new(channel).report(credential::call(stream, &secret)).await {
        Ok(_) => "the leader takes no more reports".to_owned(),
        Err(status) => status.message().to_owned(),
    }
}
