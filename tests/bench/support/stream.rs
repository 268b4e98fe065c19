//! A running request whose tokens can be awaited, and the token times of an ended request.
#![allow(dead_code, reason = "each bench uses some of it")]

use std::time::{Duration, Instant};

use tokio::{sync::watch, task::JoinHandle};
use tutti_load::{
    client::{Record, Target},
    plan::Workload,
};

pub struct Stream {
    began: Instant,
    /// `(accepted, events)`: `accepted` is true once the server has accepted the request, and `events` is the number of
    /// events with tokens so far.
    seen: watch::Receiver<(bool, usize)>,
    task: JoinHandle<Record>,
}

impl Stream {
    pub fn start(target: &Target, prompt: Vec<u32>, max_tokens: u32) -> Self {
        let (tell, seen) = watch::channel((false, 0));
        let target = target.clone();
        let began = Instant::now();
        let task = tokio::spawn(async move {
            let watch = |record: &Record| {
                tell.send_replace((record.accepted.is_some(), record.arrivals.len()));
            };
            target.generate_watched(&prompt, max_tokens, 0, watch).await
        });
        Self { began, seen, task }
    }

    /// Waits until the server has accepted the request.
    pub async fn accepted(&mut self) -> Result<(), String> {
        self.until(|(accepted, _)| accepted).await
    }

    /// Waits until this many events with tokens have arrived.
    pub async fn tokens(&mut self, events: usize) -> Result<(), String> {
        self.until(|(_, seen)| seen >= events).await
    }

    async fn until(&mut self, holds: impl Fn((bool, usize)) -> bool) -> Result<(), String> {
        match self.seen.wait_for(|seen| holds(*seen)).await {
            Ok(_) => Ok(()),
            Err(_) => Err("a stream ended before its time".into()),
        }
    }

    /// Waits for the end of the stream. Fails if the request was not served.
    pub async fn end(self) -> Result<Ended, String> {
        let record = self.task.await.map_err(|e| format!("a client failed: {e}"))?;
        match &record.failure {
            Some(why) => Err(why.clone()),
            None => Ok(Ended { began: self.began, record }),
        }
    }
}

pub struct Ended {
    pub began: Instant,
    pub record: Record,
}

impl Ended {
    pub fn at(&self, since_sent: Duration) -> Instant {
        self.began + since_sent
    }

    /// Arrival time of the first token.
    pub fn first_token(&self) -> Instant {
        self.at(self.record.arrivals.first().map_or(self.record.end, |(at, _)| *at))
    }

    /// Arrival time of the last token.
    pub fn last_token(&self) -> Instant {
        self.at(self.record.arrivals.last().map_or(self.record.end, |(at, _)| *at))
    }

    /// Milliseconds from sending to the first token.
    pub fn ttft_ms(&self) -> f64 {
        (self.first_token() - self.began).as_secs_f64() * 1e3
    }

    /// Number of tokens that arrived after `from`.
    pub fn tokens_after(&self, from: Instant) -> u32 {
        let late = self.record.arrivals.iter().filter(|(at, _)| self.at(*at) > from);
        late.map(|(_, tokens)| tokens).sum()
    }

    /// Milliseconds between adjacent events with tokens. Only gaps that overlap the time from `from` to `until` are
    /// returned.
    pub fn gaps_ms(&self, from: Instant, until: Instant) -> impl Iterator<Item = f64> {
        let pairs = self.record.arrivals.windows(2).map(|pair| (pair[0].0, pair[1].0));
        let inside = pairs.filter(move |(a, b)| self.at(*b) > from && self.at(*a) < until);
        inside.map(|(a, b)| (b - a).as_secs_f64() * 1e3)
    }
}

/// Returns `number` random prompts of `tokens` tokens each. The seed determines them.
pub fn prompts(number: usize, tokens: usize, seed: u64) -> Vec<Vec<u32>> {
    let tokens = tokens as u32;
    let workload = Workload {
        requests: number,
        rate: f64::INFINITY,
        prompt_tokens: (tokens, tokens),
        max_tokens: 1,
        vocab_size: 150_000,
        seed,
    };
    workload.plan().into_iter().map(|planned| planned.prompt).collect()
}
