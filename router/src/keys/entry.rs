//! A request that was admitted with an API key, and the part of the key's limits that it holds.
//!
//! Before a request runs, it reserves its maximum usage: its choices, its prompt tokens and its maximum number of
//! output tokens. At its end, the unused part is given back. So concurrent requests together never exceed their key's
//! limits.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::http::Extensions;
use parking_lot::Mutex;
use tutti_proto::CacheSalt;
use tutti_runtime::Error;

use super::{ApiKey, ClientSalt, RETRY_AFTER, Share, UsageState, salt};

/// Maximum time that a caller is told to wait for tokens. Running requests may give back tokens before the bucket
/// refills.
const LONGEST_RETRY: Duration = Duration::from_secs(60);

/// An admitted request. It counts as running until the last clone is dropped. The default is a request that needs no
/// key.
#[derive(Clone, Default)]
pub struct Entry(Option<Arc<Running>>);

pub(super) struct Running {
    /// The key, with its limits at the time of admission.
    key: Arc<ApiKey>,
    holds: Mutex<Holds>,
}

/// The part of its key's limits that a request holds.
struct Holds {
    choices: u32,
    /// Tokens that were taken from the bucket.
    reserved: u64,
    used: u64,
}

impl Running {
    /// Creates a request that counts as one choice and has reserved no tokens.
    pub fn new(key: Arc<ApiKey>) -> Self {
        Self { key, holds: Mutex::new(Holds { choices: 1, reserved: 0, used: 0 }) }
    }

    fn reserve(&self, choices: u32, tokens: u64) -> Result<(), Error> {
        let ApiKey { line: limits, usage, .. } = &*self.key;
        let now = Instant::now();
        let mut holds = self.holds.lock();
        let mut state = usage.state.lock();
        let others = state.running - holds.choices;
        if let Some(most) = limits.concurrent {
            if choices > most {
                let message = format!("asks for {choices} choices, this API key may run {most} at once");
                return Err(Error::invalid("n", message));
            }
            if others + choices > most {
                self.forget_request(&mut state, now);
                return Err(usage.refuse("concurrent", too_many_run(others, choices, most), RETRY_AFTER));
            }
        }
        if let Some(per_minute) = limits.tokens_per_minute {
            // Replaces the estimate that was reserved before.
            state.tokens.give_back(holds.reserved, per_minute, now);
            if let Err(after) = state.tokens.reserve(tokens, per_minute, now) {
                holds.reserved = 0;
                self.forget_request(&mut state, now);
                let message = format!(
                    "the request may use {tokens} tokens, prompt and max_tokens of all choices; the limit of \
                     {per_minute} tokens per minute leaves too few now"
                );
                return Err(usage.refuse("tokens", message, after.min(LONGEST_RETRY)));
            }
            holds.reserved = tokens;
        }
        state.running = others + choices;
        holds.choices = choices;
        Ok(())
    }

    /// Gives back the unit that a refused request has taken from the limit of requests per minute. A request that one
    /// limit refuses must not use up another limit.
    fn forget_request(&self, state: &mut UsageState, now: Instant) {
        if let Some(per_minute) = self.key.line.requests_per_minute {
            state.requests.give_back(1, per_minute, now);
        }
    }
}

impl Entry {
    pub(super) fn new(running: Running) -> Self {
        Self(Some(Arc::new(running)))
    }

    /// The entry that admission has put into a request's extensions, or the default if there is none.
    pub fn of(extensions: &Extensions) -> Self {
        extensions.get::<Self>().cloned().unwrap_or_default()
    }

    /// The caller's share, by which waiting work is divided fairly.
    pub fn share(&self) -> Share {
        self.0.as_ref().map_or(Share::WITHOUT_KEY, |running| running.key.usage.share)
    }

    /// The salt of the caller's cached prefixes: one of its own for each key, and in it for each salt that the client
    /// gives.
    pub fn cache_salt(&self, client: Option<ClientSalt>) -> CacheSalt {
        let key = self.0.as_ref().map(|running| running.key.usage.name.as_str());
        salt::of_caller(key, client)
    }

    /// Refuses a priority that the key may not use.
    pub fn check_priority(&self, priority: i32) -> Result<(), Error> {
        let least = self.0.as_ref().and_then(|running| running.key.line.most_urgent);
        match least.filter(|&least| priority < least) {
            Some(least) => {
                let message = format!("is {priority}, this API key may use {least} and above");
                Err(Error::invalid("priority", message))
            }
            None => Ok(()),
        }
    }

    /// Reserves the request's maximum usage: its concurrent choices, and its prompt and output tokens. A later call
    /// replaces the earlier reservation. Returns an error if the key's limits leave too little.
    pub fn reserve(&self, choices: u32, tokens: u64) -> Result<(), Error> {
        self.0.as_ref().map_or(Ok(()), |running| running.reserve(choices, tokens))
    }

    /// Counts tokens that the request used.
    pub fn charge(&self, tokens: u64) {
        let Some(running) = &self.0 else { return };
        let usage = &running.key.usage;
        usage.metrics.of_keys.tokens.get_or_create(&usage.label()).inc_by(tokens);
        running.holds.lock().used += tokens;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Holds { choices, reserved, used } = *self.holds.get_mut();
        let ApiKey { line, usage, .. } = &*self.key;
        let mut state = usage.state.lock();
        state.running -= choices;
        if let Some(per_minute) = line.tokens_per_minute {
            let now = Instant::now();
            state.tokens.give_back(reserved.saturating_sub(used), per_minute, now);
            state.tokens.charge(used.saturating_sub(reserved), per_minute, now);
        }
        drop(state);
        usage.metrics.of_keys.running.get_or_create(&usage.label()).dec();
    }
}

/// The error message for a key whose limit of concurrent choices is reached.
pub(super) fn too_many_run(running: u32, choices: u32, most: u32) -> String {
    format!("{running} choices of this API key are running, this request has {choices}, the limit is {most}")
}
