//! Calls of a running conductor.

use std::{io, iter, time::Duration};

use tokio::time::timeout;
use tonic::{Code, Request, Response, Status, transport::Channel};
use tutti_proto::{
    MAX_MESSAGE_BYTES,
    cluster::v1::{self as pb, conductor_client::ConductorClient},
};
use tutti_runtime::{
    Error,
    tls::{ClusterTransport, roles::Role, with_causes},
    token::Token,
};
use tutti_settings::{CallSettings, ClusterTlsSettings};

/// Maximum time to connect.
const CONNECT: Duration = Duration::from_secs(5);
/// Maximum time for an answer.
const ANSWER: Duration = Duration::from_secs(10);

/// A reason why there is no connection to a conductor.
pub(super) struct Unreached {
    error: Error,
    /// True if no process listens at the address.
    pub nothing_listens: bool,
}

impl From<Error> for Unreached {
    fn from(error: Error) -> Self {
        Self { error, nothing_listens: false }
    }
}

impl From<Unreached> for Error {
    fn from(unreached: Unreached) -> Self {
        unreached.error
    }
}

/// A connection to a conductor, and the secret that calls show.
pub(super) struct Calls {
    client: ConductorClient<Channel>,
    token: Option<Token>,
    url: String,
}

impl Calls {
    /// Connects to the conductor of the settings.
    pub async fn connect(call: &CallSettings, tls: &ClusterTlsSettings) -> Result<Self, Unreached> {
        let url = call.conductor.clone().unwrap_or_default();
        let token = call.cluster_token_file.as_deref();
        let token = token.map(|path| Token::read("cluster_token_file", path)).transpose()?;
        let dial = ClusterTransport::read(tls)?.dial("conductor", &url, Role::Conductor)?;
        let unreached = |why: &str, nothing_listens| {
            let error = Error::unavailable(format!("no conductor answers at {url}: {why}"));
            Unreached { error, nothing_listens }
        };
        let channel = match timeout(CONNECT, dial.connect()).await {
            Ok(Ok(channel)) => channel,
            Ok(Err(error)) => return Err(unreached(&with_causes(&error), is_refused(&error))),
            Err(_) => return Err(unreached(&format!("no connection within {CONNECT:?}"), false)),
        };
        let client = ConductorClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
        Ok(Self { client, token, url })
    }

    /// Asks for the workers and the queue.
    pub async fn cluster(&self) -> Result<pb::GetClusterResponse, Error> {
        let request = self.request(pb::GetClusterRequest {});
        self.answer(self.client.clone().get_cluster(request)).await
    }

    /// Asks for the served model, and whether the cluster is ready.
    pub async fn describe(&self) -> Result<pb::DescribeResponse, Error> {
        let request = self.request(pb::DescribeRequest {});
        self.answer(self.client.clone().describe(request)).await
    }

    /// Asks for the request with this number, if the conductor still records the request. Without a number, asks for
    /// those that run and the last that have ended.
    pub async fn requests(&self, number: Option<u64>) -> Result<pb::GetRequestsResponse, Error> {
        let request = self.request(pb::GetRequestsRequest { request: number });
        self.answer(self.client.clone().get_requests(request)).await
    }

    /// Asks for steps and drops the answer. For the next minute the conductor then records its workers' steps and their
    /// prefill chunks.
    pub async fn watch_steps(&self) -> Result<(), Error> {
        let request = self.request(pb::GetStepsRequest { after: u64::MAX });
        self.answer(self.client.clone().get_steps(request)).await.map(drop)
    }

    /// Asks for the drain of a worker.
    pub async fn drain_worker(&self, worker: u32) -> Result<pb::WorkerPhase, Error> {
        let request = self.request(pb::DrainWorkerRequest { worker: Some(worker) });
        Ok(self.answer(self.client.clone().drain_worker(request)).await?.phase())
    }

    /// Asks for the drain of the conductor.
    pub async fn drain_conductor(&self) -> Result<(), Error> {
        let request = self.request(pb::DrainConductorRequest {});
        self.answer(self.client.clone().drain_conductor(request)).await.map(drop)
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            token.add_to(request.metadata_mut().as_mut());
        }
        request
    }

    async fn answer<T>(&self, answer: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, Error> {
        match timeout(ANSWER, answer).await {
            Ok(answer) => Ok(answer.map_err(|status| unanswered(status, &self.url))?.into_inner()),
            Err(_) => {
                let message = format!("the conductor at {} does not answer within {ANSWER:?}", self.url);
                Err(Error::unavailable(message))
            }
        }
    }
}

/// The error of a call that a conductor has refused, or that something else has answered.
fn unanswered(status: Status, url: &str) -> Error {
    if Error::is_carried_by(&status) {
        return status.into();
    }
    // The words of the gRPC library for an answer that is not gRPC, without and with a body.
    let message = status.message();
    let is_http =
        message.contains("HTTP status code") || message.contains("while receiving response with status");
    let what = match status.code() {
        _ if is_http => "it serves HTTP, as a port of --http or --operations",
        Code::Unimplemented => "it serves other calls, as a port of --grpc or --worker-listen",
        Code::Unauthenticated | Code::PermissionDenied => return status.into(),
        _ => {
            let cause =
                std::error::Error::source(&status).map_or_else(|| status.message().to_owned(), with_causes);
            return Error::unavailable(format!(
                "{url} does not answer as a conductor's --cluster-grpc: {cause}"
            ));
        }
    };
    Error::unavailable(format!("{url} is not a conductor's --cluster-grpc: {what}"))
}

/// True if the system found no listener at the address: a port is closed, or the file of a Unix socket is gone or
/// stale.
fn is_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    iter::successors(Some(error), |error| error.source())
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|error| matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound))
}

#[cfg(test)]
mod tests;
