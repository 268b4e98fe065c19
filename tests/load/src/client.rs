//! One streamed request, and when each of its tokens came.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json, value::RawValue};

/// What became of a request. Times count from the moment it was sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// How much later than planned it was sent: the generator's own fault.
    pub lag: Duration,
    /// When the server had taken it: the answer's head came.
    pub accepted: Option<Duration>,
    /// When each event that carried text or tokens came, and how many tokens it carried.
    pub arrivals: Vec<(Duration, u32)>,
    /// When the stream ended.
    pub end: Duration,
    /// Prompt tokens, as the server counts them.
    pub prompt_tokens: u32,
    /// Generated tokens, as the server counts them.
    pub tokens: u32,
    /// Why it does not count as served.
    pub failure: Option<String>,
}

/// Where requests go.
#[derive(Clone, Debug)]
pub struct Target {
    client: reqwest::Client,
    url: String,
    /// The `model` of every request.
    pub model: String,
    /// Whether requests ask for the likeliest token instead of leaving the temperature to the server.
    greedy: bool,
}

impl Target {
    /// A server by its base URL. Without a model's name the first one it lists is meant.
    pub async fn new(url: &str, model: Option<String>, timeout: Duration) -> Result<Self, String> {
        let mut target = Self::named(url, model.as_deref().unwrap_or_default(), timeout)?;
        if model.is_none() {
            target.model = first_model(&target.client, &target.url).await?;
        }
        Ok(target)
    }

    /// A server by its base URL, and the model that it has. It need not run yet.
    pub fn named(url: &str, model: &str, timeout: Duration) -> Result<Self, String> {
        let client = reqwest::Client::builder()
            .timeout(timeout)
            .tcp_nodelay(true)
            .build()
            .map_err(|e| format!("no HTTP client: {e}"))?;
        Ok(Self { client, url: url.trim_end_matches('/').to_owned(), model: model.to_owned(), greedy: false })
    }

    /// The same server, each of whose tokens is to be the likeliest one.
    pub fn greedy(self) -> Self {
        Self { greedy: true, ..self }
    }

    /// Whether `/ready` says so, for servers that have one.
    pub async fn ready(&self) -> bool {
        self.answers("/ready").await
    }

    /// Whether a GET of this path succeeds.
    pub async fn answers(&self, path: &str) -> bool {
        let answer = self.client.get(format!("{}{path}", self.url)).send().await;
        answer.is_ok_and(|response| response.status().is_success())
    }

    /// What it counts of itself, for servers that have `/metrics`.
    pub async fn metrics(&self) -> Result<String, String> {
        let answer = self.client.get(format!("{}/metrics", self.url)).send().await;
        let answer = answer.and_then(reqwest::Response::error_for_status);
        let text = async { answer?.text().await };
        text.await.map_err(|e| format!("{}/metrics: {e}", self.url))
    }

    /// Sends one prompt and reads its stream to the end. A request that gives fewer tokens than asked for has failed.
    pub async fn generate(&self, prompt: &[u32], max_tokens: u32, seed: u64) -> Record {
        self.generate_watched(prompt, max_tokens, seed, |_| {}).await
    }

    /// The same; `watch` is shown the record whenever the server has taken the request or more tokens have come.
    pub async fn generate_watched(
        &self,
        prompt: &[u32],
        max_tokens: u32,
        seed: u64,
        watch: impl FnMut(&Record),
    ) -> Record {
        self.send(self.body(prompt, max_tokens, seed), max_tokens, watch).await
    }

    /// What is sent for a prompt, as text or as token ids.
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

    /// Sends a [body](Target::body) that asks for so many tokens; as [`Target::generate_watched`].
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
            while let Some(line) = lines.next()? {
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

/// Of an event, what counts here. The rest is skipped unread: at full load the generator shares its machine with what it
/// measures.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow, default)]
    text: Option<&'a RawValue>,
    token_ids: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
}

fn take(event: &str, now: Duration, record: &mut Record) -> Result<(), String> {
    let event: Event<'_> = serde_json::from_str(event).map_err(|e| format!("an event is no JSON: {e}"))?;
    if let Some(error) = event.error {
        return Err(format!("error in the stream: {error}"));
    }
    if let Some(usage) = event.usage {
        (record.prompt_tokens, record.tokens) = (usage.prompt_tokens, usage.completion_tokens);
    }
    let Some(choice) = event.choices.first() else { return Ok(()) };
    let ids = choice.token_ids.as_ref().map_or(0, Vec::len) as u32;
    let text = choice.text.is_some_and(|text| text.get() != r#""""#);
    // Servers that do not give token ids are taken to send one token an event.
    match ids.max(u32::from(text)) {
        0 => {}
        tokens => record.arrivals.push((now, tokens)),
    }
    Ok(())
}

/// Cuts a byte stream into lines, whatever its chunks are.
#[derive(Default)]
struct Lines {
    held: Vec<u8>,
    /// How much of `held` has been given out.
    read: usize,
}

impl Lines {
    fn push(&mut self, chunk: &[u8]) {
        self.held.drain(..self.read);
        self.read = 0;
        self.held.extend_from_slice(chunk);
    }

    /// The next line that is complete.
    fn next(&mut self) -> Result<Option<&str>, String> {
        let rest = &self.held[self.read..];
        let Some(end) = rest.iter().position(|byte| *byte == b'\n') else { return Ok(None) };
        self.read += end + 1;
        let line = rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end]);
        std::str::from_utf8(line).map(Some).map_err(|e| format!("a line is no text: {e}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_do_not_depend_on_chunks() {
        let text = "data: {\"é\": 1}\n\ndata: [DONE]\n";
        for size in 1..text.len() {
            let mut lines = Lines::default();
            let mut got = Vec::new();
            for chunk in text.as_bytes().chunks(size) {
                lines.push(chunk);
                while let Some(line) = lines.next().unwrap() {
                    got.push(line.to_owned());
                }
            }
            assert_eq!(got, ["data: {\"é\": 1}", "", "data: [DONE]"], "chunks of {size}");
        }
    }

    #[test]
    fn tokens_are_counted_by_ids_or_else_by_event() {
        let mut record = Record::default();
        let now = Duration::from_millis(3);
        take(r#"{"choices":[{"text":"","token_ids":[1,2]}]}"#, now, &mut record).unwrap();
        take(r#"{"choices":[{"text":"a"}]}"#, now, &mut record).unwrap();
        take(r#"{"choices":[{"text":"","finish_reason":"stop"}],"usage":null}"#, now, &mut record).unwrap();
        take(r#"{"choices":[],"usage":{"completion_tokens":3,"prompt_tokens":4}}"#, now, &mut record)
            .unwrap();
        assert_eq!(record.arrivals, [(now, 2), (now, 1)]);
        assert_eq!((record.prompt_tokens, record.tokens), (4, 3));
    }

    #[test]
    fn an_error_inside_a_stream_is_a_failure() {
        let failed = take(r#"{"error":{"message":"lost"}}"#, Duration::ZERO, &mut Record::default());
        assert!(failed.unwrap_err().contains("lost"));
    }
}
