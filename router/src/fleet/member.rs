//! One conductor of the fleet: its channel, its last answers, and whether it gets requests.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{error::Elapsed, timeout},
};
use tonic::{Response, Status, Streaming};
use tutti_proto::{
    MAX_MESSAGE_BYTES,
    cluster::v1::{
        CancelRequestRequest, CheckpointFile, DescribeRequest, GetClusterRequest, GetClusterResponse,
        GetRequestsRequest, GetRequestsResponse, GetStepsRequest, GetStepsResponse, ModelDescription,
        ReadCheckpointFileRequest, RequestEvent, SubmitRequest, conductor_client::ConductorClient,
    },
};
use tutti_runtime::{Error, health::State, prefix_index::Holder};

use super::{
    Need,
    breaker::{Breaker, Position},
    choice::Tier,
    failure::Failure,
    identity::Identity,
    load::{OwnLoad, Reported},
};
use crate::conductor_channel::ConductorChannel;

/// Maximum size of a text file from a conductor. The limit guards against an endless stream, and is far above the size
/// of real tokenizers.
const MAX_FILE_BYTES: usize = 256 << 20;

/// Error of a call that the conductor does not answer in time.
const SILENT: &str = "the conductor does not answer";

/// One conductor, from the time it joins the fleet until its removal. A conductor that joins again is a new member.
#[derive(Debug)]
pub struct Member {
    /// The conductor's URL, or `embedded`.
    pub name: String,
    /// Load of this router's requests on the conductor.
    pub own: Arc<OwnLoad>,
    /// The conductor's last known state. The lock is never held across an await.
    pub standing: Mutex<Standing>,
    client: ConductorClient<ConductorChannel>,
    timeouts: Timeouts,
    removed: AtomicBool,
    /// Notified when the conductor should be polled at once: a request lost its connection to the conductor, or the
    /// conductor's state may have changed.
    doubted: Notify,
}

/// Maximum times that a conductor may take to answer.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Time to answer a poll.
    pub answer: Duration,
    /// Time to accept or refuse a request.
    pub accept: Duration,
}

/// The last known state of a conductor.
#[derive(Debug)]
pub struct Standing {
    /// Result of the last poll.
    pub contact: Contact,
    /// Identity of the served model, once the conductor has described it.
    pub identity: Option<Identity>,
    /// Maximum number of prompt and output tokens of one request.
    pub max_request_tokens: u32,
    /// Text that says how the conductor's model differs from the fleet's model; `None` if the models are equal. A
    /// conductor whose model differs gets no requests.
    pub misfit: Option<String>,
    /// Load from the conductor's last report.
    pub reported: Reported,
    /// The conductor's circuit breaker.
    pub breaker: Breaker,
    /// Id of the conductor's process in the prefix index. A conductor that was lost gets a new id, since the conductor
    /// may have restarted with an empty prefix cache.
    pub holder: Holder,
    /// Serial number of the last pick that chose the conductor; 0 before the first such pick.
    pub last_pick: u64,
}

/// Result of a conductor's last poll.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contact {
    /// The conductor has not answered a poll yet.
    Unknown,
    /// The conductor does not answer, or answers with an error. The text is the reason.
    Lost(String),
    /// The conductor accepts no requests. The text is the conductor's reason.
    NotReady(String),
    /// The conductor accepts requests. The `Instant` is the time at which the poll was sent.
    Ready(Instant),
}

impl Member {
    /// Creates a member for the conductor behind a channel.
    pub fn new(name: String, channel: ConductorChannel, timeouts: Timeouts, holder: Holder) -> Self {
        let client = ConductorClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let standing = Standing {
            contact: Contact::Unknown,
            identity: None,
            max_request_tokens: 0,
            misfit: None,
            reported: Reported::default(),
            breaker: Breaker::default(),
            holder,
            last_pick: 0,
        };
        Self {
            name,
            own: Arc::default(),
            standing: Mutex::new(standing),
            client,
            timeouts,
            removed: AtomicBool::new(false),
            doubted: Notify::new(),
        }
    }

    /// Marks the member as removed from the fleet. Its running streams continue.
    pub fn remove(&self) {
        self.removed.store(true, Relaxed);
    }

    /// True after [`Member::remove`].
    pub fn is_removed(&self) -> bool {
        self.removed.load(Relaxed)
    }

    /// Requests a poll now: a request lost its connection to the conductor, or the conductor may have become ready.
    pub fn doubt(&self) {
        self.doubted.notify_one();
    }

    /// Completes at the next call of [`Member::doubt`], or after `at_most`.
    pub async fn doubted(&self, at_most: Duration) {
        let _ = timeout(at_most, self.doubted.notified()).await;
    }

    /// Sends a request and waits until the conductor accepts it.
    pub async fn submit(&self, request: SubmitRequest) -> Result<Streaming<RequestEvent>, Failure> {
        let mut client = self.client.clone();
        match timeout(self.timeouts.accept, client.submit(request)).await {
            Ok(answer) => Ok(answer?.into_inner()),
            Err(_) => Err(Failure::transport(SILENT)),
        }
    }

    /// Asks for the conductor's model, and for its readiness.
    pub async fn describe(&self) -> Result<(ModelDescription, State), Error> {
        let mut client = self.client.clone();
        let answer = timeout(self.timeouts.answer, client.describe(DescribeRequest {}));
        let answer = self.answered(answer.await)?;
        let model = answer.model.ok_or_else(|| Error::internal("the conductor describes no model"))?;
        Ok((model, if answer.ready { State::Ok } else { State::Not(answer.reason) }))
    }

    /// Asks for the conductor's workers and their load.
    pub async fn cluster(&self) -> Result<GetClusterResponse, Error> {
        let mut client = self.client.clone();
        let answer = timeout(self.timeouts.answer, client.get_cluster(GetClusterRequest {}));
        self.answered(answer.await)
    }

    /// Asks for the newest steps whose sequence number is greater than `after`.
    pub async fn steps(&self, after: u64) -> Result<GetStepsResponse, Error> {
        let mut client = self.client.clone();
        self.answered(timeout(self.timeouts.answer, client.get_steps(GetStepsRequest { after })).await)
    }

    /// Asks for the request with this number, or for all that run and the last that have ended. The conductor assigns
    /// the numbers.
    pub async fn requests(&self, request: Option<u64>) -> Result<GetRequestsResponse, Error> {
        let mut client = self.client.clone();
        let answer = timeout(self.timeouts.answer, client.get_requests(GetRequestsRequest { request }));
        self.answered(answer.await)
    }

    /// Ends a request with an error for its client. `accepted_us` tells the request from one that had the same number
    /// before a restart of the conductor; 0 ends any.
    pub async fn cancel(&self, request: u64, accepted_us: u64) -> Result<(), Error> {
        let mut client = self.client.clone();
        let asked = CancelRequestRequest { request, accepted_us };
        let answer = timeout(self.timeouts.answer, client.cancel_request(asked));
        self.answered(answer.await).map(drop)
    }

    /// Fetches one of the checkpoint's text files.
    pub async fn read_file(&self, file: CheckpointFile) -> Result<Vec<u8>, Error> {
        let request = ReadCheckpointFileRequest { file: file.into() };
        let mut pieces = self.client.clone().read_checkpoint_file(request).await?.into_inner();
        let mut bytes = Vec::new();
        while let Some(piece) = pieces.message().await? {
            bytes.extend_from_slice(&piece.data);
            if bytes.len() > MAX_FILE_BYTES {
                let message = format!("{} is over {MAX_FILE_BYTES} bytes", file.as_str_name());
                return Err(Error::internal(message));
            }
        }
        Ok(bytes)
    }

    /// Turns a timeout or a broken connection, for which gRPC has several codes, into an `Unavailable` error.
    fn answered<T>(&self, answer: Result<Result<Response<T>, Status>, Elapsed>) -> Result<T, Error> {
        let answer = answer.map_err(|_| Error::unavailable(SILENT))?;
        Ok(answer.map_err(|status| Failure::from(status).into_error())?.into_inner())
    }
}

impl Standing {
    /// True if a request sent now would probably be served. The breaker is not considered.
    pub fn is_ready(&self) -> bool {
        matches!(self.contact, Contact::Ready(_)) && self.misfit.is_none()
    }

    /// The conductor's tier for a request, or `None` if it must not get the request.
    ///
    /// `failed` is the time at which an earlier attempt at the request failed on this conductor, if one did. The
    /// conductor qualifies again once a poll sent after that time says that the conductor is ready.
    pub fn tier(&self, failed: Option<Instant>, need: Need, now: Instant) -> Option<Tier> {
        if self.misfit.is_some() || self.identity.is_none() {
            return None;
        }
        match self.contact {
            Contact::Ready(asked) if failed.is_some_and(|failed| asked <= failed) => None,
            Contact::Ready(_) if self.breaker.permits(now) => Some(Tier::Good),
            Contact::Ready(_) => Some(Tier::Failing),
            _ => (need == Need::Any && failed.is_none()).then_some(Tier::Unready),
        }
    }

    /// The reason that the conductor gets no requests, or only probes and requests for which no better conductor
    /// exists. `None` if the conductor is ready, serves the fleet's model, and its circuit breaker is closed.
    pub fn why_out(&self) -> Option<String> {
        match (&self.contact, &self.misfit) {
            (Contact::Unknown, _) => Some("no answer from the conductor yet".into()),
            (Contact::Lost(why) | Contact::NotReady(why), _) => Some(why.clone()),
            (Contact::Ready(_), Some(why)) => Some(why.clone()),
            (Contact::Ready(_), None) => match self.breaker.position() {
                Position::Closed => None,
                Position::HalfOpen => Some("its requests have failed; one request probes it now".into()),
                Position::Open => Some("its requests have failed; it gets none for some seconds".into()),
            },
        }
    }
}
