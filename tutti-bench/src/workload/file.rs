//! Requests of a file: a JSON object per line.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Serialize;
use serde_json::{Map, Value};

use super::{Content, Request, reserved};
use crate::{Error, client::Api};

/// Maximum length of a line, in bytes.
const MAX_LINE: u64 = 256 << 20;
const FIELDS: &str = "prompt, messages, max_tokens, arrival_s, body";

/// A file whose lines have all been checked. It is read again line by line during the run, so it may be larger than
/// memory.
#[derive(Clone, Debug, Serialize)]
pub struct File {
    /// The file.
    pub path: PathBuf,
    /// Number of its requests.
    pub requests: u64,
    /// True if each request has a time of arrival.
    pub timed: bool,
    /// True if the requests are sent again and again.
    pub repeat: bool,
    #[serde(skip)]
    api: Api,
    /// Further fields of each request. Fields of a line replace them.
    pub extra: Map<String, Value>,
}

impl File {
    /// Checks all lines of a file.
    pub fn check(path: &Path, api: Api, repeat: bool, extra: Map<String, Value>) -> Result<Self, Error> {
        let mut file = Self { path: path.to_owned(), requests: 0, timed: true, repeat, api, extra };
        let (mut last, mut timed, mut requests) = (Duration::ZERO, 0, 0);
        for line in file.lines()? {
            let (number, request) = line?;
            if let Some(at) = request.at {
                if timed < requests {
                    return Err(file.fault(number, "arrival_s", "is given, though lines above lack it"));
                }
                if at < last {
                    let why = format!("is {} s, which is before the line above", at.as_secs_f64());
                    return Err(file.fault(number, "arrival_s", why));
                }
                (last, timed) = (at, timed + 1);
            } else if timed > 0 {
                return Err(file.fault(number, "arrival_s", "is missing, though lines above have it"));
            }
            requests += 1;
        }
        if requests == 0 {
            return Err(Error::argument("--workload", format!("{} has no requests", path.display())));
        }
        (file.requests, file.timed) = (requests, timed == requests);
        Ok(file)
    }

    /// Passes requests to `take` until it returns false or none is left.
    pub fn read(self, mut take: impl FnMut(Result<Request, Error>) -> bool) {
        loop {
            let lines = match self.lines() {
                Ok(lines) => lines,
                Err(error) => {
                    take(Err(error));
                    return;
                }
            };
            for line in lines {
                // All lines were valid when they were checked, so an error means that the file has changed. The rest of
                // the file is not read.
                let failed = line.is_err();
                if !take(line.map(|(_, request)| request)) || failed {
                    return;
                }
            }
            if !self.repeat {
                return;
            }
        }
    }

    fn lines(&self) -> Result<impl Iterator<Item = Result<(usize, Request), Error>>, Error> {
        let open = fs::File::open(&self.path).map_err(|e| Error::file(&self.path, e))?;
        let mut reader = BufReader::new(open);
        let mut number = 0;
        Ok(std::iter::from_fn(move || {
            loop {
                number += 1;
                let mut line = Vec::new();
                match reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
                    Ok(0) => return None,
                    Ok(_) if line.trim_ascii().is_empty() => {}
                    Ok(_) => return Some(self.request(number, &line).map(|request| (number, request))),
                    Err(error) => return Some(Err(Error::file(&self.path, error))),
                }
            }
        }))
    }

    fn fault(&self, line: usize, field: &str, why: impl Into<String>) -> Error {
        Error::Line { file: self.path.clone(), line, field: field.into(), why: why.into() }
    }

    fn request(&self, number: usize, line: &[u8]) -> Result<Request, Error> {
        let fault = |field: &str, why: String| self.fault(number, field, why);
        let value: Value =
            serde_json::from_slice(line).map_err(|e| fault("line", format!("is no JSON: {e}")))?;
        let Value::Object(mut object) = value else {
            return Err(fault("line", "is no JSON object".into()));
        };
        let content = match (object.remove("prompt"), object.remove("messages")) {
            (Some(prompt), None) => self.prompt(prompt).map_err(|why| fault("prompt", why))?,
            (None, Some(messages)) => self.messages(messages).map_err(|why| fault("messages", why))?,
            (None, None) => return Err(fault("prompt", "is missing, and so is messages".into())),
            (Some(_), Some(_)) => return Err(fault("messages", "is given beside prompt".into())),
        };
        let max_tokens = object.remove("max_tokens");
        let max_tokens = max_tokens.ok_or_else(|| fault("max_tokens", "is missing".into()))?;
        let max_tokens =
            max_tokens.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| *n > 0).ok_or_else(|| {
                fault("max_tokens", format!("must be an integer from 1 to {}, and is {max_tokens}", u32::MAX))
            })?;
        let at = object.remove("arrival_s").map(|at| match at.as_f64().map(Duration::try_from_secs_f64) {
            Some(Ok(duration)) => Ok(duration),
            _ => Err(fault("arrival_s", format!("must be a number of seconds from 0 on, and is {at}"))),
        });
        let mut extra = self.extra.clone();
        match object.remove("body") {
            None => {}
            Some(Value::Object(body)) => {
                for (key, value) in body {
                    if let Some(why) = reserved(&key, self.api) {
                        return Err(fault(&format!("body.{key}"), why.into()));
                    }
                    extra.insert(key, value);
                }
            }
            Some(other) => return Err(fault("body", format!("must be an object, and is {other}"))),
        }
        if let Some(unknown) = object.keys().next() {
            return Err(fault(unknown, format!("is not known; the fields are {FIELDS}")));
        }
        Ok(Request { content, max_tokens, seed: None, at: at.transpose()?, extra })
    }

    fn prompt(&self, prompt: Value) -> Result<Content, String> {
        match prompt {
            Value::String(text) if !text.is_empty() => Ok(Content::Text(text)),
            Value::Array(ids) if !ids.is_empty() => {
                if self.api == Api::Chat {
                    return Err("is token ids, but --api chat takes text".into());
                }
                let id = |value: &Value| {
                    let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
                    id.ok_or_else(|| format!("must hold token ids, and holds {value}"))
                };
                Ok(Content::TokenIds(ids.iter().map(id).collect::<Result<_, _>>()?))
            }
            other => Err(format!("must be text or a list of token ids that is not empty, and is {other}")),
        }
    }

    fn messages(&self, messages: Value) -> Result<Content, String> {
        if self.api == Api::Completions {
            return Err("need --api chat or --api grpc".into());
        }
        let Value::Array(messages) = messages else {
            return Err(format!("must be a list, and is {messages}"));
        };
        if messages.is_empty() {
            return Err("must hold a message".into());
        }
        for message in &messages {
            if !message["role"].is_string() {
                return Err(format!("must hold objects with a role, and hold {message}"));
            }
            if self.api == Api::Grpc && !message["content"].is_string() {
                return Err(format!("need content that is text over gRPC, and hold {message}"));
            }
        }
        Ok(Content::Messages(messages))
    }
}
