//! One conductor whose tokens are known: a function of prompt and place, so that any other would go on the same.

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
    CheckpointFile, DescribeRequest, DescribeResponse, DrainWorkerRequest, DrainWorkerResponse, FilePiece,
    FinishReason, Finished, GetClusterRequest, GetClusterResponse, ModelDescription, PromptLogprobs,
    ReadCheckpointFileRequest, RequestEvent, SampledToken, SubmitRequest, TokenLogprob, WorkerPhase,
    WorkerStatus,
    conductor_server::{Conductor, ConductorServer},
};

#[allow(dead_code)]
#[path = "../../front_door/support/tokenizer.rs"]
mod tokenizer;

/// The token at this place behind this prompt.
pub fn token_at(prompt: &[u32], index: usize) -> u32 {
    let start = prompt.iter().fold(7, |sum: u32, token| sum.wrapping_mul(31).wrapping_add(*token));
    (start.wrapping_add(index as u32 * 13)) % 256
}

/// How a fake behaves, from now on whenever it is changed.
pub struct Behaviour {
    /// The name of its model, and a byte more in its tokenizer's file or not.
    pub model: Mutex<(String, bool)>,
    /// Whether its first worker still loads: it does not say yet what it serves.
    pub loads: Mutex<bool>,
    /// How often its tokenizer was fetched.
    pub fetched: AtomicUsize,
    /// Why it is not ready.
    pub unready: Mutex<Option<String>>,
    /// What it answers requests with instead of tokens.
    pub refuses: Mutex<Option<Status>>,
    /// Whether it leaves requests without an answer.
    pub ignores: Mutex<bool>,
    /// How many tokens it may still send.
    pub tokens: Semaphore,
    /// Whether it sends all tokens again that a request has had elsewhere, as one of an older build would.
    pub starts_over: Mutex<bool>,
    /// Whether the last token of a request comes without the ending, which never comes.
    pub swallows_endings: Mutex<bool>,
    /// What it was sent.
    pub submitted: Mutex<Vec<SubmitRequest>>,
}

/// A conductor at an address of its own.
pub struct Fake {
    pub url: String,
    pub behaviour: Arc<Behaviour>,
    address: SocketAddr,
    runtime: Option<Runtime>,
}

impl Fake {
    /// One that sends tokens as fast as it can.
    pub fn start() -> Self {
        Self::with_tokens(1_000_000)
    }

    /// One that sends this many tokens, and waits until it may send more.
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

    /// It dies: its sockets close, and all it knew of requests is gone.
    pub fn kill(&mut self) {
        let runtime = self.runtime.take().unwrap();
        let dying = std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)));
        dying.join().unwrap();
    }

    /// It comes back at the same address.
    pub fn revive(&mut self) {
        let (runtime, _) = serve(self.address, self.behaviour.clone());
        self.runtime = Some(runtime);
    }

    /// It stops, as a process does that is sent SIGSTOP: its sockets stay open and nothing is answered, for this long.
    pub fn freeze(&self, time: Duration) {
        // The runtime has this one thread.
        self.runtime.as_ref().unwrap().spawn(async move { std::thread::sleep(time) });
    }

    /// It lets requests have this many more tokens.
    pub fn allow(&self, tokens: usize) {
        self.behaviour.tokens.add_permits(tokens);
    }

    /// It answers requests with this from now on.
    pub fn refuse(&self, status: impl Into<Option<Status>>) {
        *self.behaviour.refuses.lock().unwrap() = status.into();
    }

    /// How many requests it was sent.
    pub fn count(&self) -> usize {
        self.behaviour.submitted.lock().unwrap().len()
    }

    /// The request that it was sent last.
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
        // The sockets of an earlier life may take a moment to close.
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
                // As an engine does: with the first token of the first try, unless the prompt was all it had to score.
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

    async fn drain_worker(
        &self,
        _: Request<DrainWorkerRequest>,
    ) -> Result<Response<DrainWorkerResponse>, Status> {
        Err(Status::unimplemented("a fake has no workers"))
    }

    async fn get_cluster(
        &self,
        _: Request<GetClusterRequest>,
    ) -> Result<Response<GetClusterResponse>, Status> {
        let worker = WorkerStatus { phase: WorkerPhase::Ready.into(), ..Default::default() };
        Ok(Response::new(GetClusterResponse { workers: vec![worker], requests_in_flight: 0 }))
    }
}
