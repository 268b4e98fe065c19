//! Client that sends streamed requests and records the arrival of each token.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};
use tutti_bench::events::{Lines, parse};

/// Outcome of a request. Times count from the moment of sending.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// Delay between the planned and the actual time of sending, caused by the generator itself.
    pub lag: Duration,
    /// Time of the response head, which shows that the server has accepted the request.
    pub accepted: Option<Duration>,
    /// Time and number of tokens of each event with text or tokens.
    pub arrivals: Vec<(Duration, u32)>,
    /// Time of the end of the stream.
    pub end: Duration,
    /// Prompt tokens, counted by the server.
    pub prompt_tokens: u32,
    /// Generated tokens, counted by the server.
    pub tokens: u32,
    /// Reason of a failure; `None` if the request was served.
    pub failure: Option<String>,
}

/// A server, and the model that requests name.
#[derive(Clone, Debug)]
pub struct Target {
    client: reqwest::Client,
    url: String,
    /// The `model` of every request.
    pub model: String,
    /// True if requests set temperature 0. Otherwise the server decides.
    greedy: bool,
}

impl Target {
    /// Connects to a server by its base URL. Without a `model`, requests ask for the first model that the server lists.
    pub async fn new(url: &str, model: Option<String>, timeout: Duration) -> Result<Self, String> {
        let mut target = Self::named(url, model.as_deref().unwrap_or_default(), timeout)?;
        if model.is_none() {
            target.model = first_model(&target.client, &target.url).await?;
        }
        Ok(target)
    }

    /// Returns the target for a server's base URL and a model's name. Connects to nothing, so the server need not run
    /// yet.
    pub fn named(url: &str, model: &str, timeout: Duration) -> Result<Self, String> {
        let client = reqwest::Client::builder()
            .timeout(timeout)
            .tcp_nodelay(true)
            .build()
            .map_err(|e| format!("no HTTP client: {e}"))?;
        Ok(Self { client, url: url.trim_end_matches('/').to_owned(), model: model.to_owned(), greedy: false })
    }

    /// Returns the target, changed so that requests set temperature 0.
    pub fn greedy(self) -> Self {
        Self { greedy: true, ..self }
    }

    /// True if a GET of `/ready` succeeds.
    pub async fn ready(&self) -> bool {
        self.answers("/ready").await
    }

    /// True if a GET of `path` succeeds.
    pub async fn answers(&self, path: &str) -> bool {
        let answer = self.client.get(format!("{}{path}", self.url)).send().await;
        answer.is_ok_and(|response| response.status().is_success())
    }

    /// Returns the text of `/metrics`.
    pub async fn metrics(&self) -> Result<String, String> {
        let answer = self.client.get(format!("{}/metrics", self.url)).send().await;
        let answer = answer.and_then(reqwest::Response::error_for_status);
        let text = async { answer?.text().await };
        text.await.map_err(|e| format!("{}/metrics: {e}", self.url))
    }

    /// Sends one prompt and reads its stream to the end. A request that does not return exactly `max_tokens` tokens has
    /// failed.
    pub async fn generate(&self, prompt: &[u32], max_tokens: u32, seed: u64) -> Record {
        self.generate_watched(prompt, max_tokens, seed, |_| {}).await
    }

    /// Like [`generate`](Self::generate). Calls `watch` when the server has accepted the
    /// request and after each chunk of events.
    pub async fn generate_watched(
        &self,
        prompt: &[u32],
        max_tokens: u32,
        seed: u64,
        watch: impl FnMut(&Record),
    ) -> Record {
        self.send(self.body(prompt, max_tokens, seed), max_tokens, watch).await
    }

    /// Returns the body of a request for a prompt, which is text or token ids.
    pub fn body(&self, prompt: impl Serialize, max_tokens: u32, seed: u64) -> String {
        let mut body = json!({
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "seed": seed, "ignore_eos": true,
            "stream": true, "stream_options": { "include_usage": true }, "return_token_ids": true,
        });
        if self.greedy {
            body["temperature"] = json!(0);
        }
        body.to_string()
    }

    /// Like [`generate_watched`](Self::generate_watched), for a [body](Self::body) that asks for `max_tokens` tokens.
    pub async fn send(&self, body: String, max_tokens: u32, watch: impl FnMut(&Record)) -> Record {
        let start = Instant::now();
        let mut record = Record::default();
        let outcome = self.read(body, start, &mut record, watch).await;
        record.end = start.elapsed();
        record.failure = match outcome {
            Err(why) => Some(why),
            Ok(()) if record.tokens == 0 => Some("the stream ended without a token".into()),
            Ok(()) if record.tokens != max_tokens => {
                Some(format!("{} tokens came, {max_tokens} were asked for", record.tokens))
            }
            Ok(()) => None,
        };
        record
    }

    async fn read(
        &self,
        body: String,
        start: Instant,
        record: &mut Record,
        mut watch: impl FnMut(&Record),
    ) -> Result<(), String> {
        let request = self
            .client
            .post(format!("{}/v1/completions", self.url))
            .header("content-type", "application/json")
            .body(body);
        let mut response = request.send().await.map_err(|e| format!("not sent: {e}"))?;
        if !response.status().is_success() {
            let status = response.status().as_u16();
            let text = response.text().await.unwrap_or_default();
            return Err(format!("status {status}: {text}"));
        }
        record.accepted = Some(start.elapsed());
        watch(record);
        let mut lines = Lines::default();
        while let Some(chunk) = response.chunk().await.map_err(|e| format!("the stream broke: {e}"))? {
            let now = start.elapsed();
            lines.push(&chunk);
            while let Some(line) = lines.next().map_err(|e| e.to_string())? {
                if line == "data: [DONE]" {
                    return Ok(());
                }
                if let Some(event) = line.strip_prefix("data: ") {
                    take(event, now, record)?;
                }
            }
            watch(record);
        }
        Err("the stream ended without [DONE]".into())
    }
}

async fn first_model(client: &reqwest::Client, url: &str) -> Result<String, String> {
    let fail = |e| format!("{url}/v1/models: {e}");
    let response = client.get(format!("{url}/v1/models")).send().await.map_err(|e| fail(e.to_string()))?;
    let text = response.text().await.map_err(|e| fail(e.to_string()))?;
    let list: Value = serde_json::from_str(&text).map_err(|e| fail(e.to_string()))?;
    let model = list["data"][0]["id"].as_str().ok_or_else(|| fail(format!("lists no model: {text}")))?;
    Ok(model.to_owned())
}

fn take(event: &str, now: Duration, record: &mut Record) -> Result<(), String> {
    let delta = parse(event).map_err(|e| e.to_string())?;
    if let Some(usage) = delta.usage {
        (record.prompt_tokens, record.tokens) = (usage.prompt_tokens, usage.completion_tokens);
    }
    if delta.tokens > 0 {
        record.arrivals.push((now, delta.tokens));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
