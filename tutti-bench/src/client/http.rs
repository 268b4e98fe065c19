//! OpenAI's HTTP API.

use std::{error::Error as _, time::Instant};

use reqwest::{Certificate, Response};
use serde_json::{Map, Value, json};

use super::{Api, Dialect, Target};
use crate::{
    Error,
    events::{Lines, parse},
    outcome::{Failure, FailureKind, Outcome},
    workload::{Content, Request},
};

pub(super) struct Http {
    client: reqwest::Client,
    url: String,
    pub(super) model: String,
    api: Api,
    dialect: Dialect,
    authorization: Option<String>,
}

impl Http {
    pub(super) async fn new(target: &Target) -> Result<Self, Error> {
        let base = target.url.trim_end_matches('/');
        let mut builder = reqwest::Client::builder().tcp_nodelay(true).pool_max_idle_per_host(usize::MAX);
        if let Some(file) = &target.authorities {
            let text = std::fs::read(file).map_err(|e| Error::file(file, e))?;
            let refused = |e: reqwest::Error| Error::argument("--ca", format!("{}: {e}", file.display()));
            let authorities = Certificate::from_pem_bundle(&text).map_err(refused)?;
            if authorities.is_empty() {
                return Err(Error::argument("--ca", format!("{} has no certificate", file.display())));
            }
            builder = authorities.into_iter().fold(builder, reqwest::ClientBuilder::add_root_certificate);
        }
        let client = builder.build().map_err(|e| Error::Internal(format!("no HTTP client: {e}")))?;
        let path = if target.api == Api::Chat { "/v1/chat/completions" } else { "/v1/completions" };
        let mut http = Self {
            client,
            url: format!("{base}{path}"),
            model: target.model.clone().unwrap_or_default(),
            api: target.api,
            dialect: target.dialect,
            authorization: target.api_key.as_ref().map(|key| format!("Bearer {key}")),
        };
        if target.model.is_none() {
            let url = format!("{base}/v1/models");
            http.model = http.first_model(&url).await.map_err(|why| Error::Server { url, why })?;
        }
        Ok(http)
    }

    async fn first_model(&self, url: &str) -> Result<String, String> {
        let request = self.client.get(url);
        let response = self.authorized(request).send().await.map_err(|e| chain(&e))?;
        let status = response.status();
        let text = response.text().await.map_err(|e| chain(&e))?;
        if !status.is_success() {
            return Err(format!("status {}: {text}", status.as_u16()));
        }
        let list: Value = serde_json::from_str(&text).map_err(|e| format!("{e}: {text}"))?;
        let model = list["data"][0]["id"].as_str();
        model.map(str::to_owned).ok_or_else(|| format!("lists no model: {text}"))
    }

    fn authorized(&self, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
        match &self.authorization {
            Some(authorization) => request.header("authorization", authorization),
            None => request,
        }
    }

    /// Returns the number of tokens that the answer must have, if that is known.
    pub(super) async fn send(
        &self,
        request: Request,
        start: Instant,
        outcome: &mut Outcome,
    ) -> Result<Option<u32>, Failure> {
        let max_tokens = request.max_tokens;
        let body = body(&self.model, self.api, self.dialect, request);
        // The length is exact only without stop strings, which may end an output early.
        let exact = body["ignore_eos"] == true && !body.keys().any(|key| key.starts_with("stop"));
        let text = Value::Object(body).to_string();
        let request = self.client.post(&self.url).header("content-type", "application/json").body(text);
        let response = self.authorized(request).send().await.map_err(|e| {
            let kind = if e.is_connect() { FailureKind::Connect } else { FailureKind::Broken };
            Failure::new(kind, chain(&e))
        })?;
        read(response, start, outcome).await?;
        Ok(exact.then_some(max_tokens))
    }
}

fn body(model: &str, api: Api, dialect: Dialect, request: Request) -> Map<String, Value> {
    let mut body = Map::new();
    let mut set = |key: &str, value: Value| body.insert(key.to_owned(), value);
    set("model", json!(model));
    match (api, request.content) {
        (Api::Chat, Content::Text(text)) => set("messages", json!([{ "role": "user", "content": text }])),
        (_, Content::Text(text)) => set("prompt", json!(text)),
        (_, Content::TokenIds(ids)) => set("prompt", json!(ids)),
        (_, Content::Messages(messages)) => set("messages", Value::Array(messages)),
    };
    set("max_tokens", json!(request.max_tokens));
    set("stream", json!(true));
    set("stream_options", json!({ "include_usage": true }));
    if dialect == Dialect::Extended {
        set("ignore_eos", json!(true));
        set("return_token_ids", json!(true));
    }
    if let Some(seed) = request.seed {
        set("seed", json!(seed));
    }
    body.extend(request.extra);
    body
}

async fn read(mut response: Response, start: Instant, outcome: &mut Outcome) -> Result<(), Failure> {
    if !response.status().is_success() {
        let status = response.status().as_u16();
        let text = response.text().await.unwrap_or_default();
        return Err(Failure::new(FailureKind::Status(status), text));
    }
    let broken = |e: reqwest::Error| Failure::new(FailureKind::Broken, chain(&e));
    let mut lines = Lines::default();
    while let Some(chunk) = response.chunk().await.map_err(broken)? {
        let now = start.elapsed();
        lines.push(&chunk);
        while let Some(line) = lines.next()? {
            let Some(event) = line.strip_prefix("data:").map(str::trim_start) else { continue };
            if event == "[DONE]" {
                // The connection can be used again only after the body was read to its end.
                while response.chunk().await.map_err(broken)?.is_some() {}
                return Ok(());
            }
            let delta = parse(event)?;
            outcome.usage = delta.usage.or(outcome.usage);
            if delta.tokens > 0 {
                outcome.arrivals.push((now, delta.tokens));
            }
        }
    }
    Err(Failure::new(FailureKind::Broken, "the stream ended without [DONE]"))
}

/// Returns an error's text with its causes, because the text of reqwest's own error does not say why.
fn chain(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
