//! One conductor as the router sees it: the way to it, what it said last, and whether to send it requests.

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
        CheckpointFile, DescribeRequest, GetClusterRequest, GetClusterResponse, ModelDescription,
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

/// The largest text file taken from a conductor: a guard against a runaway stream, far above real tokenizers.
const MAX_FILE_BYTES: usize = 256 << 20;

/// Said of a conductor that a call is not answered by in time.
const SILENT: &str = "the conductor does not answer";

/// One conductor, from when it is known of until it is taken out; one that comes back is another.
#[derive(Debug)]
pub struct Member {
    /// Its URL, or what stands for it.
    pub name: String,
    /// What this router has there.
    pub own: Arc<OwnLoad>,
    /// What is known of it, behind a lock that is never held across an await.
    pub standing: Mutex<Standing>,
    client: ConductorClient<ConductorChannel>,
    timeouts: Timeouts,
    removed: AtomicBool,
    /// Raised where a request finds it lost, or somebody hears that it has changed: it is asked now and not in a while.
    doubted: Notify,
}

/// How long a conductor has to answer.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// A question about itself.
    pub answer: Duration,
    /// A request.
    pub accept: Duration,
}

/// What is known of a conductor.
#[derive(Debug)]
pub struct Standing {
    /// Whether it can be reached, and takes requests.
    pub contact: Contact,
    /// What it serves, once it has said so, as long as it lives.
    pub identity: Option<Identity>,
    /// The most tokens, prompt and output together, that one request may have there.
    pub max_request_tokens: u32,
    /// Why it gets nothing although it is ready: it serves something else than the others.
    pub misfit: Option<String>,
    /// Its load.
    pub reported: Reported,
    /// Its breaker.
    pub breaker: Breaker,
    /// This life of it.
    pub holder: Holder,
    /// When it was picked last, as a count of the fleet's picks.
    pub last_pick: u64,
}

/// How it answered last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Contact {
    /// It has not been asked yet.
    Unknown,
    /// It does not answer, or not as a conductor does, and why.
    Lost(String),
    /// It answers, and takes no requests, and why.
    NotReady(String),
    /// It takes requests, as it said in answer to a question asked then.
    Ready(Instant),
}

impl Member {
    /// A conductor at the end of this way, which has not been asked anything yet.
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

    /// It is not part of the fleet any more; streams that run there go on.
    pub fn remove(&self) {
        self.removed.store(true, Relaxed);
    }

    /// See [`Member::remove`].
    pub fn is_removed(&self) -> bool {
        self.removed.load(Relaxed)
    }

    /// A request found it lost, or it may have become ready.
    pub fn doubt(&self) {
        self.doubted.notify_one();
    }

    /// Completes once it is doubted, or after so long.
    pub async fn doubted(&self, at_most: Duration) {
        let _ = timeout(at_most, self.doubted.notified()).await;
    }

    /// Sends a request, and waits for its acceptance.
    pub async fn submit(&self, request: SubmitRequest) -> Result<Streaming<RequestEvent>, Failure> {
        let mut client = self.client.clone();
        match timeout(self.timeouts.accept, client.submit(request)).await {
            Ok(answer) => Ok(answer?.into_inner()),
            Err(_) => Err(Failure::transport(SILENT)),
        }
    }

    /// What it serves, and whether it can take requests, or why not.
    pub async fn describe(&self) -> Result<(ModelDescription, State), Error> {
        let mut client = self.client.clone();
        let answer = timeout(self.timeouts.answer, client.describe(DescribeRequest {}));
        let answer = self.answered(answer.await)?;
        let model = answer.model.ok_or_else(|| Error::internal("the conductor describes no model"))?;
        Ok((model, if answer.ready { State::Ok } else { State::Not(answer.reason) }))
    }

    /// Its workers and their load.
    pub async fn cluster(&self) -> Result<GetClusterResponse, Error> {
        let mut client = self.client.clone();
        let answer = timeout(self.timeouts.answer, client.get_cluster(GetClusterRequest {}));
        self.answered(answer.await)
    }

    /// One of the checkpoint's text files.
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

    /// A broken way there is told as such, whatever gRPC makes of it.
    fn answered<T>(&self, answer: Result<Result<Response<T>, Status>, Elapsed>) -> Result<T, Error> {
        let answer = answer.map_err(|_| Error::unavailable(SILENT))?;
        Ok(answer.map_err(|status| Failure::from(status).into_error())?.into_inner())
    }
}

impl Standing {
    /// Whether a request sent now would be served, as far as is known; its breaker aside.
    pub fn is_ready(&self) -> bool {
        matches!(self.contact, Contact::Ready(_)) && self.misfit.is_none()
    }

    /// Whether it may be sent a request, and how good a place for it that is. `failed` is when it failed this request
    /// before, if it did; of one that is not ready nothing better than its answer can be hoped for.
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

    /// Why it gets no requests, or only probes; none if it gets them.
    pub fn why_out(&self) -> Option<String> {
        match (&self.contact, &self.misfit) {
            (Contact::Unknown, _) => Some("not asked yet".into()),
            (Contact::Lost(why) | Contact::NotReady(why), _) => Some(why.clone()),
            (Contact::Ready(_), Some(why)) => Some(why.clone()),
            (Contact::Ready(_), None) => match self.breaker.position() {
                Position::Closed => None,
                Position::HalfOpen => Some("its requests have failed; one of them is trying it".into()),
                Position::Open => Some("its requests have failed; it is left alone for a while".into()),
            },
        }
    }
}
