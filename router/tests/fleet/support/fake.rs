//! A fake conductor. A token depends only on the prompt and the token's index, so that all fakes continue a request
//! with the same tokens.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::{Stream, StreamExt, stream};
use tokio::{net::TcpListener, runtime::Runtime, sync::Semaphore};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport::Server};
use tutti_proto::cluster::v1::{
    CancelRequestRequest, CancelRequestResponse, CheckpointFile, DescribeRequest, DescribeResponse,
    DrainConductorRequest, DrainConductorResponse, DrainWorkerRequest, DrainWorkerResponse, FilePiece,
    FinishReason, Finished, GetClusterRequest, GetClusterResponse, GetRequestsRequest, GetRequestsResponse,
    GetStepsRequest, GetStepsResponse, ModelDescription, PromptLogprobs, ReadCheckpointFileRequest,
    RequestEvent, SampledToken, SubmitRequest, TokenLogprob, WorkerPhase, WorkerStatus,
    conductor_server::{Conductor, ConductorServer},
};

#[allow(dead_code)]
#[path = "../../front_door/support/tokenizer.rs"]
mod tokenizer;

/// The output token with this index after this prompt.
pub fn token_at(prompt: &[u32], index: usize) -> u32 {
    let start = prompt.iter().fold(7, |sum: u32, token| sum.wrapping_mul(31).wrapping_add(*token));
    (start.wrapping_add(index as u32 * 13)) % 256
}

/// Behaviour of a fake. Changes take effect at once.
pub struct Behaviour {
    /// The model's name, and a flag: true adds a byte to the tokenizer's file, so that the file differs.
    pub model: Mutex<(String, bool)>,
    /// True while the first worker loads: the model is not described yet.
    pub loads: Mutex<bool>,
    /// Number of times that the tokenizer was fetched.
    pub fetched: AtomicUsize,
    /// The reason that the fake is not ready, if it is not.
    pub unready: Mutex<Option<String>>,
    /// The status that refuses every request, if set.
    pub refuses: Mutex<Option<Status>>,
    /// True if requests get no answer.
    pub ignores: Mutex<bool>,
    /// One permit for each token that may still be sent.
    pub tokens: Semaphore,
    /// True if the fake repeats tokens that a request has already received from another conductor.
    pub starts_over: Mutex<bool>,
    /// True if the terminal event is never sent.
    pub swallows_endings: Mutex<bool>,
    /// The requests received so far.
    pub submitted: Mutex<Vec<SubmitRequest>>,
}

/// A fake conductor on a socket.
pub struct Fake {
    pub url: String,
    pub behaviour: Arc<Behaviour>,
    address: SocketAddr,
    runtime: Option<Runtime>,
}

impl Fake {
    /// Starts a fake that sends tokens as fast as it can.
    pub fn start() -> Self {
        Self::with_tokens(1_000_000)
    }

    /// Starts a fake that sends this many tokens and then waits for [`Fake::allow`].
    pub fn with_tokens(count: usize) -> Self {
        let behaviour = Arc::new(Behaviour {
            model: Mutex::new(("tiny".into(), false)),
            loads: Mutex::default(),
            fetched: AtomicUsize::default(),
            unready: Mutex::default(),
            refuses: Mutex::default(),
            ignores: Mutex::default(),
            tokens: Semaphore::new(count),
            starts_over: Mutex::default(),
            swallows_endings: Mutex::default(),
            submitted: Mutex::default(),
        });
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let (runtime, address) = serve(any, behaviour.clone());
        Self { url: format!("http://{address}"), behaviour, address, runtime: Some(runtime) }
    }

    /// Kills the fake: its sockets close, and its running requests end.
    pub fn kill(&mut self) {
        let runtime = self.runtime.take().unwrap();
        let dying = std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)));
        dying.join().unwrap();
    }

    /// Starts the fake again at the same address.
    pub fn revive(&mut self) {
        let (runtime, _) = serve(self.address, self.behaviour.clone());
        self.runtime = Some(runtime);
    }

    /// Freezes the fake for this long, like SIGSTOP: its sockets stay open, and it answers nothing.
    pub fn freeze(&self, time: Duration) {
        // The runtime has a single thread, so blocking it freezes the fake.
        self.runtime.as_ref().unwrap().spawn(async move { std::thread::sleep(time) });
    }

    /// Allows this many more tokens to be sent.
    pub fn allow(&self, tokens: usize) {
        self.behaviour.tokens.add_permits(tokens);
    }

    /// Refuses requests with this status from now on; `None` accepts them again.
    pub fn refuse(&self, status: impl Into<Option<Status>>) {
        *self.behaviour.refuses.lock().unwrap() = status.into();
    }

    /// Number of requests received.
    pub fn count(&self) -> usize {
        self.behaviour.submitted.lock().unwrap().len()
    }

    /// The request received last.
    pub fn last(&self) -> SubmitRequest {
        self.behaviour.submitted.lock().unwrap().last().cloned().unwrap()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

fn serve(address: SocketAddr, behaviour: Arc<Behaviour>) -> (Runtime, SocketAddr) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (address_sender, address_receiver) = std::sync::mpsc::sync_channel(1);
    runtime.spawn(async move {
        // Tries again if binding fails, because the old sockets may take a moment to close after a kill.
        let listener = loop {
            match TcpListener::bind(address).await {
                Ok(listener) => break listener,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        address_sender.send(listener.local_addr().unwrap()).unwrap();
        let service = ConductorServer::new(Service(behaviour));
        Server::builder().add_service(service).serve_with_incoming(TcpListenerStream::new(listener)).await
    });
    let address = address_receiver.recv().unwrap();
    (runtime, address)
}

struct Service(Arc<Behaviour>);

type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Conductor for Service {
    type SubmitStream = Streamed<RequestEvent>;
    type ReadCheckpointFileStream = Streamed<FilePiece>;

    async fn submit(&self, request: Request<SubmitRequest>) -> Result<Response<Self::SubmitStream>, Status> {
        let request = request.into_inner();
        self.0.submitted.lock().unwrap().push(request.clone());
        if let Some(status) = self.0.refuses.lock().unwrap().clone() {
            return Err(status);
        }
        let ignores = *self.0.ignores.lock().unwrap();
        if ignores {
            std::future::pending::<()>().await;
        }
        let spec = request.spec.unwrap();
        let max_tokens = spec.stopping.as_ref().unwrap().max_tokens as usize;
        let behaviour = self.0.clone();
        let first = if *behaviour.starts_over.lock().unwrap() { 0 } else { request.generated.len() };
        let events = stream::unfold(first, move |index| {
            let (behaviour, spec) = (behaviour.clone(), spec.clone());
            async move {
                if index > max_tokens {
                    return None;
                }
                if index == max_tokens {
                    if *behaviour.swallows_endings.lock().unwrap() {
                        std::future::pending::<()>().await;
                    }
                    let (reason, generated) = (FinishReason::Length.into(), index as u32);
                    let finished = Some(Finished { reason, generated, ..Default::default() });
                    return Some((Ok(RequestEvent { finished, ..Default::default() }), index + 1));
                }
                behaviour.tokens.acquire().await.unwrap().forget();
                let token_id = token_at(&spec.prompt, index);
                let logprob = || TokenLogprob { logprob: -1.0, rank: 1, top: vec![] };
                let tokens = vec![SampledToken {
                    token_id,
                    index: index as u32,
                    logprob: spec.logprobs.map(|_| logprob()),
                }];
                // Prompt logprobs come with the first token of the first attempt, as from a worker.
                let scored = (index == 0 && spec.prompt_logprobs.is_some()).then(|| PromptLogprobs {
                    first: 1,
                    tokens: spec.prompt[1..].iter().map(|_| logprob()).collect(),
                });
                let prompt_logprobs = scored.into_iter().collect();
                Some((Ok(RequestEvent { tokens, prompt_logprobs, finished: None }), index + 1))
            }
        });
        Ok(Response::new(events.boxed()))
    }

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<DescribeResponse>, Status> {
        if *self.0.loads.lock().unwrap() {
            return Err(Status::unavailable("its workers load"));
        }
        let model = ModelDescription {
            served_name: self.0.model.lock().unwrap().0.clone(),
            vocab_size: tokenizer::VOCAB,
            max_context_tokens: 4096,
            eos_token_ids: vec![tokenizer::END],
            has_tokenizer: true,
            declaration: None,
            max_request_tokens: 4096,
            aliases: Vec::new(),
        };
        let unready = self.0.unready.lock().unwrap().clone();
        let (ready, reason) = (unready.is_none(), unready.unwrap_or_default());
        Ok(Response::new(DescribeResponse { model: Some(model), ready, reason }))
    }

    async fn read_checkpoint_file(
        &self,
        request: Request<ReadCheckpointFileRequest>,
    ) -> Result<Response<Self::ReadCheckpointFileStream>, Status> {
        if request.into_inner().file() != CheckpointFile::Tokenizer {
            return Err(Status::not_found("the checkpoint has no such file"));
        }
        self.0.fetched.fetch_add(1, Relaxed);
        let mut data = tokenizer::byte_level();
        if self.0.model.lock().unwrap().1 {
            data.push(b' ');
        }
        Ok(Response::new(stream::iter([Ok(FilePiece { data })]).boxed()))
    }

    async fn get_steps(&self, _: Request<GetStepsRequest>) -> Result<Response<GetStepsResponse>, Status> {
        Err(Status::unimplemented("a fake has no steps"))
    }

    async fn get_requests(
        &self,
        _: Request<GetRequestsRequest>,
    ) -> Result<Response<GetRequestsResponse>, Status> {
        Err(Status::unimplemented("a fake keeps no requests"))
    }

    async fn cancel_request(
        &self,
        _: Request<CancelRequestRequest>,
    ) -> Result<Response<CancelRequestResponse>, Status> {
        Err(Status::unimplemented("a fake keeps no requests"))
    }

    async fn drain_worker(
        &self,
        _: Request<DrainWorkerRequest>,
    ) -> Result<Response<DrainWorkerResponse>, Status> {
        Err(Status::unimplemented("a fake has no workers"))
    }

    async fn drain_conductor(
        &self,
        _: Request<DrainConductorRequest>,
    ) -> Result<Response<DrainConductorResponse>, Status> {
        Err(Status::unimplemented("a fake does not end"))
    }

    async fn get_cluster(
        &self,
        _: Request<GetClusterRequest>,
    ) -> Result<Response<GetClusterResponse>, Status> {
        let worker = WorkerStatus { phase: WorkerPhase::Ready.into(), ..Default::default() };
        Ok(Response::new(GetClusterResponse { workers: vec![worker], ..Default::default() }))
    }
}
