//! Clients of the three APIs. A client sends a request, and records the arrival of each token of its answer.

mod grpc;
mod http;

use std::{path::PathBuf, time::Duration};

use serde::Serialize;

use self::{grpc::Grpc, http::Http};
use crate::{
    Error,
    outcome::{Failure, FailureKind, Outcome},
    workload::Request,
};

/// The API to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Api {
    /// OpenAI's `/v1/completions`.
    Completions,
    /// OpenAI's `/v1/chat/completions`.
    Chat,
    /// Tutti's `tutti.v1.Inference/Generate`.
    Grpc,
}

/// The fields that requests may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// The fields of OpenAI's API, and two that Tutti and vLLM share: `ignore_eos` and `return_token_ids`. Every output
    /// has its full length, and tokens are counted exactly.
    Extended,
    /// Only fields of OpenAI's API.
    Plain,
}

/// A server and how to call it.
#[derive(Clone, Debug)]
pub struct Target {
    /// Base URL.
    pub url: String,
    /// The API to load.
    pub api: Api,
    /// Model to ask for. `None` means the first one that the server lists.
    pub model: Option<String>,
    /// Key for the header `authorization`.
    pub api_key: Option<String>,
    /// File with certificates of authorities, in PEM form, that are trusted in addition to the system's.
    pub authorities: Option<PathBuf>,
    /// Maximum time of a request, from sending to the end of its answer.
    pub timeout: Duration,
    /// The fields that requests may have.
    pub dialect: Dialect,
    /// Number of requests that may be in flight.
    pub in_flight: usize,
}

/// A client of one server.
pub struct Client {
    transport: Transport,
    timeout: Duration,
}

enum Transport {
    Http(Http),
    Grpc(Grpc),
}

impl Client {
    /// Makes a client. Asks the server for its models unless `target` names one.
    pub async fn new(target: &Target) -> Result<Self, Error> {
        let transport = match target.api {
            Api::Completions | Api::Chat => Transport::Http(Http::new(target).await?),
            Api::Grpc => Transport::Grpc(Grpc::new(target).await?),
        };
        Ok(Self { transport, timeout: target.timeout })
    }

    /// The model that requests name.
    pub fn model(&self) -> &str {
        match &self.transport {
            Transport::Http(http) => &http.model,
            Transport::Grpc(grpc) => &grpc.model,
        }
    }

    /// Sends a request and reads its answer to the end.
    pub async fn send(&self, request: Request) -> Outcome {
        let start = std::time::Instant::now();
        let mut outcome = Outcome::default();
        let read = async {
            match &self.transport {
                Transport::Http(http) => http.send(request, start, &mut outcome).await,
                Transport::Grpc(grpc) => grpc.send(request, start, &mut outcome).await,
            }
        };
        let exact = match tokio::time::timeout(self.timeout, read).await {
            Ok(Ok(exact)) => exact,
            Ok(Err(failure)) => {
                outcome.failure = Some(failure);
                None
            }
            Err(_) => {
                let why = format!("no complete answer within {:?}", self.timeout);
                outcome.failure = Some(Failure::new(FailureKind::Timeout, why));
                None
            }
        };
        outcome.end = start.elapsed();
        outcome.judge(exact);
        outcome
    }
}
