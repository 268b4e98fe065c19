//! The gRPC service `tutti.cluster.v1.Conductor`, which routers and operators call.
//!
//! Clients cannot reach the service's listener, because callers can drain workers and are not subject to the routers'
//! limits.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use tokio_stream::{Stream, iter};
use tonic::{
    Request, Response, Status,
    service::{Routes, interceptor::InterceptedService},
};
use tutti_proto::{
    MAX_MESSAGE_BYTES, Rank, RequestId,
    cluster::v1::{self as pb, conductor_server::Conductor},
};
use tutti_runtime::{
    Error, ErrorKind,
    checkpoint::{Checkpoint, CheckpointFile},
    grpc_health,
    health::Health,
    request_id::XRequestId,
    serve::Standing,
    shutdown::Shutdown,
    token::Token,
    trace::TraceContext,
};

pub use tutti_proto::cluster::v1::conductor_server::ConductorServer;

use crate::{cluster::Cluster, request::Origin, submission::Submission};

/// Maximum bytes of a checkpoint file per message.
const PIECE_BYTES: usize = 1 << 20;

/// The service for routers, embedded or not.
#[derive(Clone)]
pub struct ConductorService {
    cluster: Arc<Cluster>,
    checkpoint: Arc<Checkpoint>,
    /// Begins the end of the process when an operator drains the conductor.
    shutdown: Shutdown,
}

impl ConductorService {
    /// Creates a service for this cluster and for this checkpoint's text files. `shutdown` begins when an operator
    /// drains the conductor.
    pub fn new(cluster: Arc<Cluster>, checkpoint: Arc<Checkpoint>, shutdown: Shutdown) -> Self {
        Self { cluster, checkpoint, shutdown }
    }

    /// The gRPC server, with the limit on message sizes that all services share.
    pub fn into_server(self) -> ConductorServer<Self> {
        ConductorServer::new(self)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }
}

/// Services of the listener for routers and operators: the conductor, and the health of the cluster. If `token` is
/// given, each call of the conductor must show it. The token is checked before a message is read. Must be called inside
/// a Tokio runtime.
pub fn cluster_routes(
    conductor: ConductorServer<ConductorService>,
    token: Option<Token>,
    health: Health,
) -> Routes {
    let check = move |request: Request<()>| match &token {
        Some(token) if !token.is_in(request.metadata().as_ref()) => {
            let message = "the call does not show the secret in the conductor's cluster token file";
            Err(Error::invalid("cluster_token_file", message).into_unauthenticated())
        }
        _ => {
            Standing::vouch(request.extensions());
            Ok(request)
        }
    };
    Routes::new(grpc_health::service::<ConductorServer<ConductorService>>(health))
        .add_service(InterceptedService::new(conductor, check))
}

/// A submission whose errors are gRPC statuses.
pub struct Events(Submission);

impl Stream for Events {
    type Item = Result<pb::RequestEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Pin::new(&mut self.0).poll_next(context).map(|item| item.map(|event| event.map_err(Status::from)))
    }
}

#[tonic::async_trait]
impl Conductor for ConductorService {
    type SubmitStream = Events;
    type ReadCheckpointFileStream = Pin<Box<dyn Stream<Item = Result<pb::FilePiece, Status>> + Send>>;

    async fn submit(
        &self,
        request: Request<pb::SubmitRequest>,
    ) -> Result<Response<Self::SubmitStream>, Status> {
        let pb::SubmitRequest { spec, timeout_ms, generated, trace, share, request_id } =
            request.into_inner();
        let request_id = XRequestId::parse(&request_id);
        let origin = Origin { trace: TraceContext::received(trace), share, request_id };
        let spec = spec.unwrap_or_default();
        let (cluster, has_media) = (self.cluster.clone(), !spec.media.is_empty());
        let resume = move || cluster.resume(spec, timeout_ms, generated, origin);
        // Media are large and are hashed, which would hold up all that this thread serves.
        let submission = match has_media {
            true => tokio::task::spawn_blocking(resume)
                .await
                .map_err(|e| Error::internal(format!("the request was not accepted: {e}")))??,
            false => resume()?,
        };
        Ok(Response::new(Events(submission)))
    }

    async fn describe(
        &self,
        _: Request<pb::DescribeRequest>,
    ) -> Result<Response<pb::DescribeResponse>, Status> {
        Ok(Response::new(self.cluster.describe()?))
    }

    async fn read_checkpoint_file(
        &self,
        request: Request<pb::ReadCheckpointFileRequest>,
    ) -> Result<Response<Self::ReadCheckpointFileStream>, Status> {
        let file = match request.into_inner().file() {
            pb::CheckpointFile::Tokenizer => CheckpointFile::Tokenizer,
            pb::CheckpointFile::TokenizerConfig => CheckpointFile::TokenizerConfig,
            pb::CheckpointFile::ChatTemplate => CheckpointFile::ChatTemplate,
            pb::CheckpointFile::SpecialTokensMap => CheckpointFile::SpecialTokensMap,
            pb::CheckpointFile::GenerationConfig => CheckpointFile::GenerationConfig,
            pb::CheckpointFile::Unspecified => {
                return Err(Error::invalid("file", "is not a file that a checkpoint may have").into());
            }
        };
        let checkpoint = self.checkpoint.clone();
        let bytes = tokio::task::spawn_blocking(move || checkpoint.read(file))
            .await
            .map_err(|e| Error::internal(format!("reading {}: {e}", file.name())))??
            .ok_or_else(|| {
                Error::new(ErrorKind::NotFound, format!("the checkpoint has no {}", file.name()))
            })?;
        let length = bytes.len();
        let piece = move |at: usize| {
            let end = bytes.len().min(at + PIECE_BYTES);
            Ok(pb::FilePiece { data: bytes[at..end].to_vec() })
        };
        // Each piece is copied only when it is sent. Otherwise each slow reader would hold a second copy of the file.
        let pieces = (0..length).step_by(PIECE_BYTES).map(piece);
        Ok(Response::new(Box::pin(iter(pieces))))
    }

    async fn get_cluster(
        &self,
        _: Request<pb::GetClusterRequest>,
    ) -> Result<Response<pb::GetClusterResponse>, Status> {
        let mut status = self.cluster.status();
        // The cluster's own flag is set late: during a drain, the cluster takes requests until the clients of an
        // embedded router have received their answers.
        status.draining |= self.shutdown.is_draining();
        Ok(Response::new(status))
    }

    async fn get_steps(
        &self,
        request: Request<pb::GetStepsRequest>,
    ) -> Result<Response<pb::GetStepsResponse>, Status> {
        Ok(Response::new(self.cluster.recent_steps(request.into_inner().after)))
    }

    async fn get_requests(
        &self,
        request: Request<pb::GetRequestsRequest>,
    ) -> Result<Response<pb::GetRequestsResponse>, Status> {
        let id = request.into_inner().request.map(RequestId);
        Ok(Response::new(self.cluster.recent_requests(id)))
    }

    async fn cancel_request(
        &self,
        request: Request<pb::CancelRequestRequest>,
    ) -> Result<Response<pb::CancelRequestResponse>, Status> {
        let pb::CancelRequestRequest { request, accepted_us } = request.into_inner();
        self.cluster.cancel_for_operator(RequestId(request), accepted_us)?;
        Ok(Response::new(pb::CancelRequestResponse {}))
    }

    async fn drain_worker(
        &self,
        request: Request<pb::DrainWorkerRequest>,
    ) -> Result<Response<pb::DrainWorkerResponse>, Status> {
        let worker = request.into_inner().worker.ok_or_else(|| {
            Error::invalid("worker", "is missing: the rank of the worker to drain, also if it is 0")
        })?;
        let phase = self.cluster.drain_worker(Rank(worker))?;
        Ok(Response::new(pb::DrainWorkerResponse { phase: phase.into() }))
    }

    async fn drain_conductor(
        &self,
        _: Request<pb::DrainConductorRequest>,
    ) -> Result<Response<pb::DrainConductorResponse>, Status> {
        if !self.shutdown.is_draining() {
            tracing::info!("draining: an operator asks for it");
            self.shutdown.begin();
        }
        Ok(Response::new(pb::DrainConductorResponse {}))
    }
}
