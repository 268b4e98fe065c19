//! The router, embedded or as a process of its own.

use std::{path::PathBuf, time::Duration};

use crate::{
    AddressSettings, ClusterTlsSettings, ConnectionSettings, DrainSettings, Invalid, MetricsSettings,
    Settings, TelemetrySettings, TlsSettings,
};

settings! {
    /// The router's limits, API keys and tokenizer threads.
    pub struct RouterSettings, table "router", errors "" {
        "Model" => {
            /// Serve token ids only, without the checkpoint's tokenizer and chat template
            skip_tokenizer_init: bool = false, also a flag;
            /// Format in which the model writes tool calls: a name from docs/tools.md, or auto, the one whose markers
            /// the chat template has
            tool_parser: String = "auto".into(), unit "NAME", also a flag;
            /// Markers between which the model reasons: a name from docs/tools.md, none, or auto, those that the chat
            /// template has
            reasoning_parser: String = "auto".into(), unit "NAME", also a flag;
        }
        "Router" => {
            /// Size of the largest HTTP body or gRPC message. A larger one is refused before it is read.
            max_body_bytes: usize = 32 << 20, unit "BYTES", at least 1;
            /// File with the names, hashes, limits and rights of API keys; without it, every caller is let in
            api_key_file: Option<PathBuf> = None, unit "FILE", also a flag;
            /// Keys while api_key_file is gone or cannot be read
            api_key_file_gone: KeyFileGone = KeyFileGone::Deny;
            /// Running requests of a key that has left api_key_file
            revoked_requests: RevokedRequests = RevokedRequests::Finish, changes live;
            /// Requests with a wrong key that one address may send in a minute. Further requests are refused before
            /// their key is looked at, unless the address has sent a right key in the last ten minutes.
            max_wrong_keys_per_minute: u32 = 60, unit "N", at least 1, changes live;
            /// Origins (scheme, host and port) whose web pages may send requests although there are no API keys, and
            /// read answers (CORS).
            allowed_origins: Vec<String> = Vec::new(), unit "ORIGIN";
            /// Requests that get a line in the log when they end, with the caller's key, times and tokens
            access_log: AccessLog = AccessLog::Errors, changes live, also a flag;
            /// Choices of one priority class (urgent, normal, low) that wait for their first tokens.
            max_queued_choices: Option<u32> = None, unit "N", default "those that may be in progress", at least 1, changes live;
            /// Tokens in the prompts of the choices that wait, estimated before a prompt is tokenised.
            max_queued_tokens: usize = 8 << 20, unit "TOKENS", at least 1, changes live;
            /// Time that a body may take to arrive.
            upload_timeout_s: u32 = 120, unit "SECONDS", at least 1, changes live;
            /// Least rate at which a body must arrive, after its first ten seconds.
            upload_bytes_per_second: u32 = 4096, unit "BYTES", at least 1, changes live;
            /// Time for which the reader of an answer may take nothing. After it, the request ends.
            reader_timeout_ms: u32 = 30_000, unit "MS", at least 1;
            /// Least rate at which a reader must take an answer, in bytes per second. The request of a slower reader
            /// ends.
            reader_bytes_per_second: u32 = 256, unit "BYTES", at least 1;
            /// Bytes of tokens and logprobs that are not written yet, such as those of answers that are not streamed;
            /// beyond it, the request with most of them ends. Also bytes of large answers (over 64 KiB) that are
            /// written or wait for their readers; beyond it, others wait.
            max_unread_bytes: usize = 256 << 20, unit "BYTES", at least 1;
            /// Special tokens in the text of a chat's messages and template variables
            chat_special_tokens: ChatSpecialTokens = ChatSpecialTokens::Text, changes live;
            /// Logprobs of prompts in one answer: tokens of the prompt times `n`, times one more than the alternatives.
            max_prompt_logprobs: usize = 1 << 20, unit "N", at least 1, changes live;
            /// Logprobs of output tokens in one answer: `max_tokens` of all choices, times one more than the
            /// alternatives.
            max_output_logprobs: usize = 4 << 20, unit "N", at least 1, changes live;
            /// Choices in progress at once: `n` times the prompts of each request. A request that alone has more is
            /// refused for good, any other may be sent again later.
            max_concurrent_choices: u32 = 1024, unit "N", at least 1;
            /// Threads that tokenise texts and render chat templates.
            tokenizer_threads: usize = default_tokenizer_threads(), unit "N", default "half of the cores, 1 to 8", at least 1;
            /// Texts that may wait for a thread that tokenises.
            tokenizer_queue: usize = 512, unit "N", at least 1;
            /// Pictures, recordings and videos of one request.
            max_media_items: usize = 64, unit "N", at least 1, changes live;
            /// Bytes of a request's media once they are decoded and resized: 3 per pixel, 4 per sample at 16 kHz. Media
            /// and the rest of a request must fit in one message of 64 MiB to a conductor.
            max_media_bytes: usize = 48 << 20, unit "BYTES", at least 1, changes live;
            /// Pixels of a picture or a frame before it is resized.
            max_media_pixels: usize = 32 << 20, unit "N", at least 1, changes live;
            /// Origins (scheme, host and port) from which pictures and recordings are fetched if a request names their
            /// URL. Without any, no URL is fetched.
            media_origins: Vec<String> = Vec::new(), unit "ORIGIN";
            /// Time that fetching all files of a request may take.
            media_fetch_timeout_ms: u32 = 10_000, unit "MS", at least 1, changes live;
            /// Time that decoding one item may take.
            media_timeout_ms: u32 = 5_000, unit "MS", at least 1, changes live;
            /// Memory for media that are decoded, and for decoded media of requests in progress. A request that finds
            /// no room in it is refused for now.
            max_media_memory: usize = 1 << 30, unit "BYTES", at least 1;
            /// Threads that decode media. Texts never wait for them.
            media_threads: usize = default_tokenizer_threads(), unit "N", default "half of the cores, 1 to 8", at least 1;
            /// Requests whose media may wait for a thread that decodes.
            media_queue: usize = 64, unit "N", at least 1;
        }
    }
}

choices! {
    /// Treatment of API keys while their file is gone.
    pub enum KeyFileGone {
        /// No key is accepted until the file is back.
        Deny = "deny",
        /// The keys stay as they were.
        Keep = "keep",
    }
}

choices! {
    /// The requests that get a line in the log when they end.
    pub enum AccessLog {
        /// Requests that were refused, failed, or were left by their clients.
        Errors = "errors",
        /// All requests.
        All = "all",
        /// None.
        Off = "off",
    }
}

choices! {
    /// Special tokens in the text of a chat's messages and template variables.
    pub enum ChatSpecialTokens {
        /// They are text. Only the chat template writes control tokens.
        Text = "text",
        /// They are control tokens, as in a completion's prompt.
        Tokens = "tokens",
    }
}

choices! {
    /// Treatment of the running requests of an API key that is no longer accepted.
    pub enum RevokedRequests {
        /// The requests run to their ends.
        Finish = "finish",
        /// The requests end with an error.
        End = "end",
    }
}

/// Half of the cores, from 1 to 8. Tokenising on more cores would slow the streams that already run.
fn default_tokenizer_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 2).clamp(1, 8)
}

impl RouterSettings {
    /// `reader_timeout_ms` as a duration.
    pub fn reader_timeout(&self) -> Duration {
        Duration::from_millis(self.reader_timeout_ms.into())
    }

    /// `media_fetch_timeout_ms` as a duration.
    pub fn media_fetch_timeout(&self) -> Duration {
        Duration::from_millis(self.media_fetch_timeout_ms.into())
    }

    /// `upload_timeout_s` as a duration.
    pub fn upload_timeout(&self) -> Duration {
        Duration::from_secs(self.upload_timeout_s.into())
    }

    /// Refuses values outside of their ranges, and origins that no browser sends or that no file is fetched from.
    pub fn validate(&self) -> Result<(), Invalid> {
        self.check_ranges()?;
        let is_fetched = |origin: &str| {
            is_origin(origin) && (origin.starts_with("http://") || origin.starts_with("https://"))
        };
        if let Some(origin) = self.media_origins.iter().find(|origin| !is_fetched(origin)) {
            let message = format!(
                "has {origin:?}, but an origin is like https://pictures.example.com or http://10.0.0.1:3000: in lower \
                 case, without a path and without the scheme's own port"
            );
            return Err(Invalid::new("media_origins", message));
        }
        match self.allowed_origins.iter().find(|origin| !is_origin(origin)) {
            Some(origin) => Err(Invalid::new(
                "allowed_origins",
                format!(
                    "has {origin:?}, but an origin is like https://chat.example.com or http://localhost:3000: in lower \
                     case, without a path, and none stands for all"
                ),
            )),
            None => Ok(()),
        }
    }
}

/// True if a browser may send such an origin (RFC 6454, section 6.1). A `/` at the end is allowed.
fn is_origin(text: &str) -> bool {
    let Some((scheme, host)) = text.split_once("://") else { return false };
    let host = host.strip_suffix('/').unwrap_or(host);
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "+-.".contains(c);
    let is_part = |c: char| is_plain(c) || "_:[]".contains(c);
    // Browsers leave out the default port of a scheme.
    let has_default_port =
        (scheme == "http" && host.ends_with(":80")) || (scheme == "https" && host.ends_with(":443"));
    let is_whole = !scheme.is_empty() && !host.is_empty();
    is_whole && scheme.chars().all(is_plain) && host.chars().all(is_part) && !has_default_port
}

settings! {
    /// Retries, polling and prefix index of a router that is a process of its own.
    pub struct FleetSettings, table "fleet", errors "fleet." {
        "Faults" => {
            /// Times that a choice without tokens is sent to another conductor.
            max_retries: u32 = 2, unit "N";
            /// Times that a stream may continue on another conductor after its own is lost
            max_replays: u32 = 2, unit "N", also a flag;
        }
        "Fleet" => {
            /// Time that a choice waits for another conductor after its own is lost.
            recovery_ms: u32 = 30_000, unit "MS";
            /// Time that a conductor has to answer a poll. Without an answer it counts as lost.
            answer_timeout_ms: u32 = 5_000, unit "MS", at least 1;
            /// Time that a conductor has to accept or refuse a request. Without an answer it counts as lost.
            accept_timeout_ms: u32 = 15_000, unit "MS", at least 1;
            /// Interval of connection probes. A connection that does not answer a probe within the same time is broken,
            /// and its streams continue on other conductors.
            keep_alive_ms: u32 = 5_000, unit "MS", at least 1;
            /// Interval at which a ready conductor is polled for its load.
            poll_ms: u32 = 1_000, unit "MS", at least 1;
            /// Interval at which the name in `discover` is looked up.
            discover_ms: u32 = 5_000, unit "MS", at least 1;
            /// Size of the index of prompt prefixes; 0 turns the index off.
            prefix_index_bytes: usize = 64 << 20, unit "BYTES";
            /// Time after which an unused prefix is removed from the index.
            prefix_index_age_s: u32 = 900, unit "SECONDS";
        }
    }
}

impl FleetSettings {
    /// Settings of an embedded router. Its only conductor runs in the same process and replays requests by itself, so
    /// the conductor's errors are final.
    pub fn embedded() -> Self {
        Self { max_retries: 0, max_replays: 0, accept_timeout_ms: u32::MAX, ..Self::default() }
    }

    /// `answer_timeout_ms` as a duration.
    pub fn answer_timeout(&self) -> Duration {
        Duration::from_millis(self.answer_timeout_ms.into())
    }

    /// `accept_timeout_ms` as a duration.
    pub fn accept_timeout(&self) -> Duration {
        Duration::from_millis(self.accept_timeout_ms.into())
    }

    /// `keep_alive_ms` as a duration.
    pub fn keep_alive(&self) -> Duration {
        Duration::from_millis(self.keep_alive_ms.into())
    }

    /// `poll_ms` as a duration.
    pub fn poll(&self) -> Duration {
        Duration::from_millis(self.poll_ms.into())
    }

    /// `discover_ms` as a duration.
    pub fn discover(&self) -> Duration {
        Duration::from_millis(self.discover_ms.into())
    }

    /// `prefix_index_age_s` as a duration.
    pub fn prefix_index_age(&self) -> Duration {
        Duration::from_secs(self.prefix_index_age_s.into())
    }

    /// `recovery_ms` as a duration.
    pub fn recovery(&self) -> Duration {
        Duration::from_millis(self.recovery_ms.into())
    }

    /// Refuses values outside of their ranges.
    pub fn validate(&self) -> Result<(), Invalid> {
        self.check_ranges()
    }
}

settings! {
    /// The addresses of conductors.
    pub struct ConductorsSettings {
        "Cluster" => {
            /// A conductor's --cluster-grpc, such as http://10.0.0.1:50052 or unix:/path; repeat it for each
            conductor: Vec<String> = Vec::new(), unit "URL";
            /// DNS name whose addresses are all conductors; it is looked up periodically
            discover: Option<String> = None, unit "HOST:PORT";
            /// File with the conductors' secret for routers
            cluster_token_file: Option<PathBuf> = None, unit "FILE";
        }
    }
}

process! {
    /// Settings of a router that is a process of its own.
    pub struct RouterProcessSettings {
        /// Addresses of conductors.
        conductors: ConductorsSettings,
        /// Addresses that clients and operators reach.
        addresses: AddressSettings,
        /// Encryption of the ports that clients reach.
        tls: TlsSettings,
        /// Encryption inside the cluster.
        cluster_tls: ClusterTlsSettings,
        /// Draining of requests before the process ends.
        drain: DrainSettings,
        /// Logs and spans.
        telemetry: TelemetrySettings,
        /// Names of metrics.
        metrics: MetricsSettings,
        tables:
        /// Connections of each listener.
        connections: ConnectionSettings,
        /// The router's limits, API keys and tokenizer threads.
        router: RouterSettings,
        /// Retries, polling and prefix index.
        fleet: FleetSettings,
    }
}

impl RouterProcessSettings {
    /// Refuses values outside of their ranges, and incomplete sets of TLS files.
    pub fn validate(&self) -> Result<(), Invalid> {
        self.check_ranges()?;
        self.tls.files()?;
        self.cluster_tls.files().map(drop)
    }
}

#[cfg(test)]
mod tests;
