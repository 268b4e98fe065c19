//! A front door with a scripted conductor.

pub mod tokenizer;

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use axum::{
    body::Body,
    http::{Request, StatusCode, header},
};
use futures_util::{Stream, StreamExt, stream};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tonic::{
    Response, Status,
    service::Routes,
    transport::{Channel, Endpoint, Server},
};
use tower::{ServiceExt, service_fn};
use tutti_proto::cluster::v1::{
    CancelRequestRequest, CancelRequestResponse, CheckpointFile, DescribeRequest, DescribeResponse,
    DrainConductorRequest, DrainConductorResponse, DrainWorkerRequest, DrainWorkerResponse, FilePiece,
    FinishReason, Finished, GetClusterRequest, GetClusterResponse, GetRequestsRequest, GetRequestsResponse,
    GetStepsRequest, GetStepsResponse, MediaInput, ModelDeclaration, ModelDescription, PromptLogprobs,
    ReadCheckpointFileRequest, RequestEvent, RequestSpec, SampledToken, SubmitRequest, TokenLogprob,
    TopLogprob,
    conductor_server::{Conductor, ConductorServer},
};
use tutti_router::{CheckedText, FrontDoor, RouterSettings};
use tutti_runtime::{
    Error, ErrorKind,
    health::{Health, State},
    metrics::Metrics,
};

pub const MODEL: &str = "tiny";
pub const CONTEXT: u32 = 64;

const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}<|role|>{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|role|>assistant:{% endif %}";

/// A step of a scripted request.
pub enum Step {
    Event(RequestEvent),
    Fail(Status),
    /// Sends nothing further, but leaves the stream open.
    Hang,
}

type Script = Arc<dyn Fn(&RequestSpec) -> Vec<Step> + Send + Sync>;

/// A conductor that plays a script for every request, and reports streams that are dropped before their end.
#[derive(Clone)]
pub struct FakeConductor {
    script: Arc<Mutex<Script>>,
    pub submitted: Arc<Mutex<Vec<SubmitRequest>>>,
    cancelled: mpsc::Sender<()>,
    files: Arc<Mutex<BTreeMap<CheckpointFile, Vec<u8>>>>,
    has_tokenizer: bool,
    aliases: Arc<Mutex<Vec<String>>>,
    media: Arc<Mutex<Vec<MediaInput>>>,
    context: u32,
    vocab: u32,
}

impl FakeConductor {
    /// Sets the script for all further requests.
    pub fn play(&self, script: impl Fn(&RequestSpec) -> Vec<Step> + Send + Sync + 'static) {
        *self.script.lock().unwrap() = Arc::new(script);
    }

    /// Sets the checkpoint's tokenizer_config.json.
    pub fn set_tokenizer_config(&self, config: &Value) {
        let bytes = config.to_string().into_bytes();
        self.files.lock().unwrap().insert(CheckpointFile::TokenizerConfig, bytes);
    }

    /// The request received last.
    pub fn last(&self) -> SubmitRequest {
        self.submitted.lock().unwrap().last().cloned().unwrap()
    }

    pub fn count(&self) -> usize {
        self.submitted.lock().unwrap().len()
    }
}

/// A stream that plays a script, and reports if it is dropped before the end.
struct Playing {
    steps: std::vec::IntoIter<Step>,
    cancelled: Option<mpsc::Sender<()>>,
}

impl Stream for Playing {
    type Item = Result<RequestEvent, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let item = match self.steps.next() {
            Some(Step::Event(event)) => {
                if event.finished.is_some() {
                    self.cancelled = None;
                }
                Some(Ok(event))
            }
            Some(Step::Fail(status)) => {
                self.cancelled = None;
                Some(Err(status))
            }
            // Only dropping the stream ends it, so no waker is needed.
            Some(Step::Hang) => {
                self.steps = vec![Step::Hang].into_iter();
                return Poll::Pending;
            }
            None => None,
        };
        Poll::Ready(item)
    }
}

impl Drop for Playing {
    fn drop(&mut self) {
        if let Some(cancelled) = self.cancelled.take() {
            let _ = cancelled.try_send(());
        }
    }
}

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Conductor for FakeConductor {
    type SubmitStream = Events<RequestEvent>;
    type ReadCheckpointFileStream = Events<FilePiece>;

    async fn submit(
        &self,
        request: tonic::Request<SubmitRequest>,
    ) -> Result<Response<Self::SubmitStream>, Status> {
        let request = request.into_inner();
        let spec = request.spec.clone().unwrap();
        self.submitted.lock().unwrap().push(request);
        let script = self.script.lock().unwrap().clone();
        let mut steps = script(&spec);
        if let Some(Step::Fail(_)) = steps.first()
            && let Step::Fail(status) = steps.remove(0)
        {
            return Err(status);
        }
        let cancelled = Some(self.cancelled.clone());
        Ok(Response::new(Box::pin(Playing { steps: steps.into_iter(), cancelled })))
    }

    async fn describe(
        &self,
        _: tonic::Request<DescribeRequest>,
    ) -> Result<Response<DescribeResponse>, Status> {
        let media = self.media.lock().unwrap().clone();
        let model = ModelDescription {
            served_name: MODEL.into(),
            vocab_size: self.vocab,
            max_context_tokens: self.context,
            eos_token_ids: vec![tokenizer::END],
            has_tokenizer: self.has_tokenizer,
            declaration: Some(ModelDeclaration { media, ..Default::default() }),
            max_request_tokens: self.context,
            aliases: self.aliases.lock().unwrap().clone(),
        };
        Ok(Response::new(DescribeResponse { model: Some(model), ready: true, reason: String::new() }))
    }

    async fn read_checkpoint_file(
        &self,
        request: tonic::Request<ReadCheckpointFileRequest>,
    ) -> Result<Response<Self::ReadCheckpointFileStream>, Status> {
        let file = request.into_inner().file();
        let bytes = self
            .files
            .lock()
            .unwrap()
            .get(&file)
            .cloned()
            .ok_or_else(|| Status::not_found("the checkpoint has no such file"))?;
        let pieces: Vec<_> = bytes.chunks(1000).map(|data| Ok(FilePiece { data: data.to_vec() })).collect();
        Ok(Response::new(stream::iter(pieces).boxed()))
    }

    async fn get_steps(
        &self,
        _: tonic::Request<GetStepsRequest>,
    ) -> Result<Response<GetStepsResponse>, Status> {
        Err(Status::unimplemented("a fake has no steps"))
    }

    async fn get_requests(
        &self,
        _: tonic::Request<GetRequestsRequest>,
    ) -> Result<Response<GetRequestsResponse>, Status> {
        Err(Status::unimplemented("a fake keeps no requests"))
    }

    /// Cancels request 7, which was accepted at 70.
    async fn cancel_request(
        &self,
        request: tonic::Request<CancelRequestRequest>,
    ) -> Result<Response<CancelRequestResponse>, Status> {
        match request.into_inner() {
            CancelRequestRequest { request: 7, accepted_us: 0 | 70 } => {
                Ok(Response::new(CancelRequestResponse {}))
            }
            _ => Err(Error::new(ErrorKind::NotFound, "the request is not in progress").into()),
        }
    }

    async fn drain_worker(
        &self,
        _: tonic::Request<DrainWorkerRequest>,
    ) -> Result<Response<DrainWorkerResponse>, Status> {
        Err(Status::unimplemented("a fake has no workers"))
    }

    async fn drain_conductor(
        &self,
        _: tonic::Request<DrainConductorRequest>,
    ) -> Result<Response<DrainConductorResponse>, Status> {
        Err(Status::unimplemented("a fake does not end"))
    }

    async fn get_cluster(
        &self,
        _: tonic::Request<GetClusterRequest>,
    ) -> Result<Response<GetClusterResponse>, Status> {
        Ok(Response::new(GetClusterResponse::default()))
    }
}

/// A front door with its conductor.
pub struct Setup {
    pub conductor: FakeConductor,
    pub front_door: FrontDoor,
    pub health: Health,
    pub metrics: Metrics,
    pub cancelled: mpsc::Receiver<()>,
}

/// Starts a front door and waits until it is ready.
pub async fn ready() -> Setup {
    ready_with(RouterSettings::default(), true).await
}

/// Starts a front door, with or without a tokenizer in the checkpoint, and waits until it is ready.
pub async fn ready_with(config: RouterSettings, has_tokenizer: bool) -> Setup {
    follow(start(config, has_tokenizer).await).await
}

/// Starts a front door whose model has further names, and waits until it is ready.
pub async fn ready_as(aliases: &[&str]) -> Setup {
    let setup = start(RouterSettings::default(), true).await;
    *setup.conductor.aliases.lock().unwrap() = aliases.iter().map(|name| (*name).to_owned()).collect();
    follow(setup).await
}

/// Lets a front door follow its conductor, and waits until it is ready.
pub async fn follow(setup: Setup) -> Setup {
    tokio::spawn(setup.front_door.clone().follow(setup.health.clone()));
    let mut state = setup.health.watch_ready();
    state.wait_for(|state| *state == State::Ok).await.unwrap();
    setup
}

/// Creates a front door that does not follow its conductor yet.
pub async fn start(config: RouterSettings, has_tokenizer: bool) -> Setup {
    start_with(config, has_tokenizer, None).await
}

/// Creates a front door that does not follow its conductor yet, with the parsed text if given.
pub async fn start_with(config: RouterSettings, has_tokenizer: bool, text: Option<CheckedText>) -> Setup {
    let mut files = BTreeMap::new();
    files.insert(CheckpointFile::GenerationConfig, br#"{"temperature": 0.5, "eos_token_id": 261}"#.to_vec());
    if has_tokenizer {
        let tokenizer_config = json!({ "eos_token": "<|end|>", "chat_template": TEMPLATE });
        files.insert(CheckpointFile::Tokenizer, tokenizer::byte_level());
        files.insert(CheckpointFile::TokenizerConfig, tokenizer_config.to_string().into_bytes());
    }
    serve(config, files, (tokenizer::VOCAB, CONTEXT), text)
}

/// Starts a front door for a checkpoint with this chat template, whose tokenizer has these further special tokens, and
/// waits until it is ready. The context is long.
pub async fn ready_for(template: &str, markers: &[&str]) -> Setup {
    ready_for_with(RouterSettings::default(), template, markers).await
}

/// Does the same with these settings.
pub async fn ready_for_with(config: RouterSettings, template: &str, markers: &[&str]) -> Setup {
    follow(start_for(config, template, markers)).await
}

/// Starts a front door for a checkpoint whose model takes these media, and waits until it is ready.
pub async fn ready_for_media(
    config: RouterSettings,
    template: &str,
    markers: &[&str],
    media: Vec<MediaInput>,
) -> Setup {
    let setup = start_for(config, template, markers);
    *setup.conductor.media.lock().unwrap() = media;
    follow(setup).await
}

/// Creates a front door for a checkpoint.
pub fn start_for(config: RouterSettings, template: &str, markers: &[&str]) -> Setup {
    let tokenizer_config = json!({ "eos_token": "<|end|>", "chat_template": template });
    let files = BTreeMap::from([
        (CheckpointFile::Tokenizer, tokenizer::with_markers(markers)),
        (CheckpointFile::TokenizerConfig, tokenizer_config.to_string().into_bytes()),
    ]);
    serve(config, files, (tokenizer::VOCAB + markers.len() as u32, 1 << 16), None)
}

/// The default settings with a change.
pub fn settings(change: impl FnOnce(&mut RouterSettings)) -> RouterSettings {
    let mut settings = RouterSettings::default();
    change(&mut settings);
    settings
}

/// Creates a front door whose settings may be refused.
pub fn try_start(config: RouterSettings) -> Result<FrontDoor, Error> {
    let channel = Endpoint::from_static("http://in.process").connect_lazy();
    FrontDoor::new(channel, None, config, &Metrics::default())
}

fn serve(
    config: RouterSettings,
    files: BTreeMap<CheckpointFile, Vec<u8>>,
    (vocab, context): (u32, u32),
    text: Option<CheckedText>,
) -> Setup {
    let (cancel, cancelled) = mpsc::channel(64);
    let has_tokenizer = files.contains_key(&CheckpointFile::Tokenizer);
    let conductor = FakeConductor {
        script: Arc::new(Mutex::new(Arc::new(|_| says("ok")))),
        submitted: Arc::default(),
        cancelled: cancel,
        files: Arc::new(Mutex::new(files)),
        has_tokenizer,
        aliases: Arc::default(),
        media: Arc::default(),
        context,
        vocab,
    };
    let metrics = Metrics::default();
    let channel = connect(Routes::new(ConductorServer::new(conductor.clone())));
    let front_door = FrontDoor::new(channel, text, config, &metrics).unwrap();
    Setup { conductor, front_door, health: Health::default(), metrics, cancelled }
}

/// A channel to gRPC services through memory instead of a socket.
pub fn connect(services: Routes) -> Channel {
    let endpoint = tutti_router::tune(Endpoint::from_static("http://in.process"));
    endpoint.connect_with_connector_lazy(service_fn(move |_| {
        let services = services.clone();
        async move {
            let (ours, theirs) = tokio::io::duplex(64 << 10);
            let incoming = stream::iter([Ok::<_, std::io::Error>(theirs)]).chain(stream::pending());
            tokio::spawn(Server::builder().add_routes(services).serve_with_incoming(incoming));
            Ok::<_, std::io::Error>(TokioIo::new(ours))
        }
    }))
}

/// An output token without a logprob.
pub fn token(index: usize, id: u32) -> SampledToken {
    SampledToken { token_id: id, index: index as u32, logprob: None }
}

/// An event with tokens only.
pub fn tokens(first: usize, ids: &[u32]) -> Step {
    let tokens = ids.iter().enumerate().map(|(i, &id)| token(first + i, id)).collect();
    Step::Event(RequestEvent { tokens, ..Default::default() })
}

/// The terminal event.
pub fn end(reason: FinishReason, generated: usize) -> Step {
    let finished = Finished { reason: reason.into(), generated: generated as u32, ..Default::default() };
    Step::Event(RequestEvent { finished: Some(finished), ..Default::default() })
}

/// A script with one token and event per byte of the text, then an end-of-sequence token.
pub fn says(text: &str) -> Vec<Step> {
    let ids: Vec<u32> = text.bytes().map(u32::from).chain([tokenizer::END]).collect();
    says_ids(&ids, FinishReason::EndOfSequence)
}

/// The tokens of a text: markers, and bytes.
pub fn ids_of(text: &str, markers: &[&str]) -> Vec<u32> {
    let all: Vec<(&str, u32)> =
        [("<think>", 263)].into_iter().chain(markers.iter().copied().zip(264..)).collect();
    let (mut ids, mut rest) = (Vec::new(), text);
    while let Some(character) = rest.chars().next() {
        let marker = all.iter().find(|(marker, _)| rest.starts_with(marker));
        match marker {
            Some((marker, id)) => {
                ids.push(*id);
                rest = &rest[marker.len()..];
            }
            None => {
                let (first, behind) = rest.split_at(character.len_utf8());
                ids.extend(first.bytes().map(u32::from));
                rest = behind;
            }
        }
    }
    ids
}

/// A script with one event per token of a text, then an end-of-sequence token.
pub fn writes(text: &str, markers: &[&str]) -> Vec<Step> {
    let mut ids = ids_of(text, markers);
    ids.push(tokenizer::END);
    says_ids(&ids, FinishReason::EndOfSequence)
}

/// A script with one event per token, then the terminal event.
pub fn says_ids(ids: &[u32], reason: FinishReason) -> Vec<Step> {
    let mut steps: Vec<Step> = ids.iter().enumerate().map(|(i, &id)| tokens(i, &[id])).collect();
    steps.push(end(reason, ids.len()));
    steps
}

/// A logprob with these alternatives.
pub fn logprob(logprob: f32, rank: u32, top: &[(u32, f32)]) -> TokenLogprob {
    let top = top.iter().map(|&(token_id, logprob)| TopLogprob { token_id, logprob }).collect();
    TokenLogprob { logprob, rank, top }
}

/// An event with the logprobs of prompt tokens from `first` on.
pub fn prompt_logprobs(first: u32, tokens: Vec<TokenLogprob>) -> Step {
    Step::Event(RequestEvent {
        prompt_logprobs: vec![PromptLogprobs { first, tokens }],
        ..Default::default()
    })
}

/// An answer that has been read to its end.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: axum::http::HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    /// The events of a stream. An event that is not JSON is given as a string.
    pub fn events(&self) -> Vec<Value> {
        let event = |event: &str| {
            let data = event.strip_prefix("data: ").unwrap();
            serde_json::from_str(data).unwrap_or_else(|_| json!(data))
        };
        self.text.split_terminator("\n\n").map(event).collect()
    }
}

impl Setup {
    /// Posts a JSON body.
    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(post(path, body.to_string())).await
    }

    /// Sends a request and reads the whole answer.
    pub async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.front_door.http_routes().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        Answer { status: parts.status, headers: parts.headers, text }
    }
}

/// A POST request with a JSON body.
pub fn post(path: &str, body: impl Into<Body>) -> Request<Body> {
    Request::post(path).header(header::CONTENT_TYPE, "application/json").body(body.into()).unwrap()
}
