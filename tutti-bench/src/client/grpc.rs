//! Tutti's gRPC API.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use serde_json::Value;
use tonic::{
    Status,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};
use tutti_proto::v1::{
    Chat, ChatMessage, GenerateRequest, GetModelRequest, Sampling, Stopping, TokenIds,
    generate_request::Prompt, inference_client::InferenceClient,
};

use super::{Dialect, Target};
use crate::{
    Error,
    events::Usage,
    outcome::{Failure, FailureKind, Outcome},
    workload::{Content, Request},
};

/// Number of requests that share a connection. Servers bound the streams per connection; Tutti's bound is 1024.
const STREAMS_PER_CONNECTION: usize = 128;
const MAX_CONNECTIONS: usize = 128;
/// Maximum size of an answer's message, in bytes.
const MAX_MESSAGE: usize = 64 << 20;

pub(super) struct Grpc {
    /// Connections, used in turn.
    channels: Vec<Channel>,
    turn: AtomicUsize,
    pub(super) model: String,
    dialect: Dialect,
    authorization: Option<MetadataValue<Ascii>>,
}

impl Grpc {
    pub(super) async fn new(target: &Target) -> Result<Self, Error> {
        let refused = |why: String| Error::argument("--url", why);
        if !target.url.starts_with("http://") {
            return Err(refused(format!("must begin with http:// for --api grpc, and is {}", target.url)));
        }
        let endpoint = Endpoint::from_shared(target.url.clone())
            .map_err(|e| refused(format!("{}: {e}", target.url)))?
            .tcp_nodelay(true);
        let connections = target.in_flight.div_ceil(STREAMS_PER_CONNECTION).clamp(1, MAX_CONNECTIONS);
        let authorization = target.api_key.as_ref().map(|key| format!("Bearer {key}").parse()).transpose();
        let mut grpc = Self {
            channels: (0..connections).map(|_| endpoint.connect_lazy()).collect(),
            turn: AtomicUsize::new(0),
            model: target.model.clone().unwrap_or_default(),
            dialect: target.dialect,
            authorization: authorization.map_err(|_| {
                Error::argument("--api-key-file", "the key has characters that no header may have")
            })?,
        };
        if target.model.is_none() {
            let answer = grpc.client().get_model(grpc.authorized(GetModelRequest {})).await;
            let refused =
                |status: Status| Error::Server { url: target.url.clone(), why: failure(&status).message };
            grpc.model = answer.map_err(refused)?.into_inner().name;
        }
        Ok(grpc)
    }

    fn client(&self) -> InferenceClient<Channel> {
        let index = self.turn.fetch_add(1, Ordering::Relaxed) % self.channels.len();
        InferenceClient::new(self.channels[index].clone()).max_decoding_message_size(MAX_MESSAGE)
    }

    fn authorized<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        if let Some(authorization) = &self.authorization {
            request.metadata_mut().insert("authorization", authorization.clone());
        }
        request
    }

    /// Returns the number of tokens that the answer must have, if that is known.
    pub(super) async fn send(
        &self,
        request: Request,
        start: Instant,
        outcome: &mut Outcome,
    ) -> Result<Option<u32>, Failure> {
        let max_tokens = request.max_tokens;
        let ignore_eos = self.dialect == Dialect::Extended;
        let message = GenerateRequest {
            model: self.model.clone(),
            prompt: Some(prompt(request.content)),
            sampling: Some(Sampling { seed: request.seed, ..Sampling::default() }),
            stopping: Some(Stopping { max_tokens: Some(max_tokens), ignore_eos, ..Stopping::default() }),
            ..GenerateRequest::default()
        };
        let answer = self.client().generate(self.authorized(message)).await;
        let mut answer = answer.map_err(|status| failure(&status))?.into_inner();
        while let Some(message) = answer.message().await.map_err(|status| failure(&status))? {
            if !message.token_ids.is_empty() {
                outcome.arrivals.push((start.elapsed(), message.token_ids.len() as u32));
            }
            if let Some(usage) = message.usage {
                let (prompt_tokens, completion_tokens) = (usage.prompt_tokens, usage.completion_tokens);
                outcome.usage = Some(Usage { prompt_tokens, completion_tokens });
            }
        }
        Ok(ignore_eos.then_some(max_tokens))
    }
}

fn prompt(content: Content) -> Prompt {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    match content {
        Content::Text(text) => Prompt::Text(text),
        Content::TokenIds(ids) => Prompt::TokenIds(TokenIds { ids }),
        Content::Messages(messages) => Prompt::Chat(Chat {
            messages: messages
                .iter()
                .map(|message| ChatMessage {
                    role: text(&message["role"]),
                    content: text(&message["content"]),
                })
                .collect(),
        }),
    }
}

fn failure(status: &Status) -> Failure {
    let mut message = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        message = format!("{message}: {error}");
        cause = error.source();
    }
    Failure::new(FailureKind::Grpc(status.code() as i32), message)
}
