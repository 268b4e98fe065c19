//! The log line of a process that has become ready, with its addresses, and on a terminal a command to try.

use std::{
    io::{Write, stderr},
    net::SocketAddr,
};

use tutti_settings::RouterSettings;

use crate::{
    health::{Health, State},
    listen::reachable,
    telemetry::style,
};

/// The prompt in the command to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// A prompt of text, for a process that takes text.
    Text,
    /// A prompt of token ids, for a process that takes nothing else.
    TokenIds,
}

impl Prompt {
    /// A prompt that a front door with these settings takes.
    pub fn of(router: &RouterSettings) -> Self {
        if router.skip_tokenizer_init { Self::TokenIds } else { Self::Text }
    }
}

/// Addresses of a process that serves clients.
#[derive(Clone, Copy, Debug)]
pub struct Announcement {
    /// Bound address of HTTP.
    pub http: SocketAddr,
    /// Bound address of gRPC.
    pub grpc: SocketAddr,
    /// The prompt in the command to try. `None` for a process without completions over HTTP.
    pub prompt: Option<Prompt>,
    /// True if the addresses speak TLS.
    pub is_encrypted: bool,
}

impl Announcement {
    /// Waits until the process is ready for the first time, and announces it.
    pub async fn when_ready(self, health: Health) {
        let mut ready = health.watch_ready();
        // Waiting fails only if no `Health` is left. The process is then ending, so there is nothing to announce.
        if ready.wait_for(|state| *state == State::Ok).await.is_err() {
            return;
        }
        let (http, grpc) = (reachable(self.http), reachable(self.grpc));
        tracing::info!(http = %format!("{}://{http}", self.scheme()), grpc = %grpc, "ready for requests");
        if let Some(command) = self.command().filter(|_| style::is_for_people()) {
            // Errors are ignored, because the command is only a hint, and the terminal may be closed.
            let _ = writeln!(stderr(), "Try it:\n  {command}");
        }
    }

    fn scheme(&self) -> &'static str {
        if self.is_encrypted { "https" } else { "http" }
    }

    /// A command that sends a completion.
    fn command(&self) -> Option<String> {
        let prompt = match self.prompt? {
            Prompt::Text => r#""The capital of France is""#,
            Prompt::TokenIds => "[1, 2, 3]",
        };
        let body = format!(r#"{{"prompt": {prompt}, "max_tokens": 16}}"#);
        let (scheme, http) = (self.scheme(), reachable(self.http));
        Some(format!("curl {scheme}://{http}/v1/completions -H 'Content-Type: application/json' -d '{body}'"))
    }
}

#[cfg(test)]
mod tests;
