//! Requests to send: made from a seed, or read from a file.

mod file;
mod synthetic;

use std::{thread, time::Duration};

use serde_json::{Map, Value};
use tokio::sync::mpsc;

pub use self::{
    file::File,
    synthetic::{Alphabet, Synthetic},
};
use crate::{Error, client::Api};

/// Number of requests that are made or read ahead.
const AHEAD: usize = 256;

/// A request to send.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The prompt.
    pub content: Content,
    /// Maximum number of tokens of the answer.
    pub max_tokens: u32,
    /// Seed of the answer, for servers that sample.
    pub seed: Option<u64>,
    /// Time of arrival from the start of the run, if the workload gives it.
    pub at: Option<Duration>,
    /// Further fields of the request's body. They replace fields of the same names.
    pub extra: Map<String, Value>,
}

/// A prompt.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Content {
    Text(String),
    TokenIds(Vec<u32>),
    Messages(Vec<Value>),
}

/// The source of requests.
#[derive(Clone, Debug)]
pub enum Workload {
    /// Requests made from a seed.
    Synthetic(Synthetic),
    /// Requests read from a file.
    File(File),
}

impl Workload {
    /// Starts to make or read requests on a separate thread, so that no answer is delayed.
    pub fn start(self) -> Result<mpsc::Receiver<Result<Request, Error>>, Error> {
        let (sender, receiver) = mpsc::channel(AHEAD);
        let produce = move || {
            // Sending fails once no more requests are wanted.
            match self {
                Self::Synthetic(mut synthetic) => {
                    while sender.blocking_send(Ok(synthetic.request())).is_ok() {}
                }
                Self::File(file) => file.read(|request| sender.blocking_send(request).is_ok()),
            }
        };
        let thread = thread::Builder::new().name("workload".into());
        thread.spawn(produce).map_err(|e| Error::Internal(format!("no thread for the workload: {e}")))?;
        Ok(receiver)
    }
}

/// Returns the reason why a request must not set this field of its body; `None` if it may.
pub fn reserved(key: &str, api: Api) -> Option<&'static str> {
    match key {
        _ if api == Api::Grpc => Some("cannot be set over gRPC"),
        "model" => Some("is set by --model"),
        "prompt" | "messages" | "max_tokens" => Some("is a field of the line, not of its body"),
        "stream" | "stream_options" => Some("is set by the generator, which reads streams"),
        "n" => Some("cannot be set: the generator reads one choice of each answer"),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
