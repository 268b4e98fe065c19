//! Admission before work: requests that have no token yet are counted, in choices and in tokens of their prompts,
//! before a prompt is tokenised. Each priority class has bounds of its own, so requests of low priority never fill the
//! room of urgent ones.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use tutti_runtime::{
    Error,
    command_line::processes::ROUTER,
    declare_metrics,
    live::Live,
    metrics::{
        Metrics,
        metrics::{family::Family, gauge::Gauge},
    },
};
use tutti_settings::RouterSettings;

/// Names of the classes in metrics and errors, by index.
const CLASSES: [&str; 3] = ["urgent", "normal", "low"];
/// Weight of the last request in the average waiting time.
const RECENT: f64 = 0.1;
/// Maximum time after which a client is told to send its request again, in seconds.
const LONGEST_RETRY: f64 = 60.0;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ClassLabel {
    class: &'static str,
}

declare_metrics! {
    struct QueueMetrics {
        choices: Family<ClassLabel, Gauge>, "queued_choices", "Choices without a token, by priority class";
        tokens: Family<ClassLabel, Gauge>, "queued_tokens",
            "Tokens in the prompts of choices without a token, by priority class";
    }
}

/// The requests without a token, by priority class.
pub struct Admission {
    queues: [Mutex<Queue>; CLASSES.len()],
    limits: Live<RouterSettings>,
    metrics: QueueMetrics,
}

#[derive(Default)]
struct Queue {
    choices: u64,
    tokens: u64,
    /// Average time in seconds from admission to the first token.
    waited: f64,
}

/// A request without a token. Dropping it makes room for others.
pub struct Queued {
    admission: Arc<Admission>,
    class: usize,
    choices: u64,
    tokens: u64,
    since: Instant,
}

impl Admission {
    /// Creates empty queues, and registers their metrics.
    pub fn new(limits: impl Into<Live<RouterSettings>>, metrics: &Metrics) -> Arc<Self> {
        let metrics = metrics.register_of(ROUTER.name, QueueMetrics::register);
        Arc::new(Self { queues: Default::default(), limits: limits.into(), metrics })
    }

    /// Admits a request, or refuses it because its class is full. `tokens` is the number of tokens of all its prompts,
    /// each counted once per choice, exact or estimated.
    pub fn enter(self: &Arc<Self>, priority: i32, choices: u64, tokens: u64) -> Result<Queued, Error> {
        let class = class_of(priority);
        let limits = self.limits.get();
        let max_choices = u64::from(limits.max_queued_choices.unwrap_or(limits.max_concurrent_choices));
        let max_tokens = limits.max_queued_tokens as u64;
        let mut queue = self.queues[class].lock();
        // A request that exceeds the bound by itself is admitted to an empty queue, because otherwise it could never be
        // served.
        let full = queue.choices + choices > max_choices || queue.tokens + tokens > max_tokens;
        if queue.choices > 0 && full {
            let message = format!(
                "the queue of {} requests has {} choices with {} tokens; this request has {choices} with {tokens}, \
                 the limits are {max_choices} and {max_tokens}",
                CLASSES[class], queue.choices, queue.tokens
            );
            return Err(Error::overloaded(message, queue.retry_after()));
        }
        queue.choices += choices;
        queue.tokens += tokens;
        drop(queue);
        self.show(class, choices as i64, tokens as i64);
        Ok(Queued { admission: self.clone(), class, choices, tokens, since: Instant::now() })
    }

    fn show(&self, class: usize, choices: i64, tokens: i64) {
        let label = ClassLabel { class: CLASSES[class] };
        self.metrics.choices.get_or_create(&label).inc_by(choices);
        self.metrics.tokens.get_or_create(&label).inc_by(tokens);
    }
}

impl Queue {
    /// Estimated time until there is room again: the average time that the last requests of the class have waited.
    fn retry_after(&self) -> Duration {
        Duration::from_secs_f64(self.waited.ceil().clamp(1.0, LONGEST_RETRY))
    }
}

impl Queued {
    /// Replaces an estimate by the exact number of tokens.
    pub fn recount(&mut self, tokens: u64) {
        {
            let mut queue = self.admission.queues[self.class].lock();
            queue.tokens = queue.tokens - self.tokens + tokens;
        }
        self.admission.show(self.class, 0, tokens as i64 - self.tokens as i64);
        self.tokens = tokens;
    }

    /// Ends the waiting with the request's first token.
    pub fn has_token(self) {
        let waited = self.since.elapsed().as_secs_f64();
        let mut queue = self.admission.queues[self.class].lock();
        queue.waited += RECENT * (waited - queue.waited);
        // The queue is locked again when `self` is dropped.
        drop(queue);
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        {
            let mut queue = self.admission.queues[self.class].lock();
            queue.choices -= self.choices;
            queue.tokens -= self.tokens;
        }
        self.admission.show(self.class, -(self.choices as i64), -(self.tokens as i64));
    }
}

/// The class of a priority. Lower priorities run earlier.
fn class_of(priority: i32) -> usize {
    match priority {
        ..0 => 0,
        0 => 1,
        1.. => 2,
    }
}

#[cfg(test)]
mod tests;
