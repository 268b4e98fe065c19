//! Admission of requests before their prompts are tokenised. Counts the choices and the prompt tokens of all requests
//! that have no output token yet. Each priority class has its own limits, so requests of low priority never take the
//! room of urgent requests. Within a class, no single request and no single key can take all of the room (see `bound`).

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

use crate::{
    bound::{Bound, Held},
    keys::Share,
};

/// Names of the priority classes in metrics and errors, by class index from 0.
const CLASSES: [&str; 3] = ["urgent", "normal", "low"];
/// Weight of the last request in the average waiting time.
const RECENT: f64 = 0.1;
/// Maximum time that a refused client is told to wait, in seconds.
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

/// The requests without an output token, by priority class.
pub struct Admission {
    queues: [Mutex<Queue>; CLASSES.len()],
    limits: Live<RouterSettings>,
    metrics: QueueMetrics,
}

#[derive(Default)]
struct Queue {
    choices: Bound,
    tokens: Bound,
    /// Average time in seconds from admission to the first token.
    waited: f64,
}

/// A request that has no output token yet. Dropping it removes the request from its class's counts.
pub struct Queued {
    admission: Arc<Admission>,
    class: usize,
    choices: u64,
    tokens: u64,
    /// The choices and tokens that count against the limits of the request's class.
    held: Option<HeldOfClass>,
    since: Instant,
}

struct HeldOfClass {
    choices: Held,
    tokens: Held,
}

/// The amounts that a request adds to its queue.
#[derive(Clone, Copy, Debug)]
pub struct QueueCost {
    /// Number of choices: prompts times `n`.
    pub choices: u64,
    /// Sum of the prompt tokens of all choices. The number may be an estimate until [`Queued::recount`] is called.
    pub tokens: u64,
}

impl Admission {
    /// Creates empty queues, and registers their metrics.
    pub fn new(limits: impl Into<Live<RouterSettings>>, metrics: &Metrics) -> Arc<Self> {
        let metrics = metrics.register_of(ROUTER.name, QueueMetrics::register);
        Arc::new(Self { queues: Default::default(), limits: limits.into(), metrics })
    }

    /// Admits a request, or refuses it because its class is full.
    pub fn enter(self: &Arc<Self>, priority: i32, share: Share, cost: QueueCost) -> Result<Queued, Error> {
        let class = class_of(priority);
        let QueueCost { choices, tokens } = cost;
        let (max_choices, max_tokens) = self.limits();
        let mut queue = self.queues[class].lock();
        let Some(held) = queue.enter((max_choices, max_tokens), share, cost) else {
            let message = format!(
                "the queue of {} requests has {} choices with {} tokens; this request has {choices} with {tokens}, \
                 the limits are {max_choices} and {max_tokens}, of which a quarter is kept from large requests and \
                 from a key that has much already",
                CLASSES[class],
                queue.choices.held(),
                queue.tokens.held()
            );
            return Err(Error::overloaded(message, queue.retry_after()));
        };
        drop(queue);
        self.show(class, choices as i64, tokens as i64);
        let since = Instant::now();
        Ok(Queued { admission: self.clone(), class, choices, tokens, held: Some(held), since })
    }

    /// The limits of one class: number of choices, and number of tokens in their prompts.
    fn limits(&self) -> (u64, u64) {
        let limits = self.limits.get();
        let choices = limits.max_queued_choices.unwrap_or(limits.max_concurrent_choices);
        (choices.into(), limits.max_queued_tokens as u64)
    }

    fn show(&self, class: usize, choices: i64, tokens: i64) {
        let label = ClassLabel { class: CLASSES[class] };
        self.metrics.choices.get_or_create(&label).inc_by(choices);
        self.metrics.tokens.get_or_create(&label).inc_by(tokens);
    }
}

impl Queue {
    fn enter(&mut self, limits: (u64, u64), share: Share, cost: QueueCost) -> Option<HeldOfClass> {
        let choices = self.choices.enter(limits.0, share, cost.choices)?;
        match self.tokens.enter(limits.1, share, cost.tokens) {
            Some(tokens) => Some(HeldOfClass { choices, tokens }),
            None => {
                self.choices.leave(choices);
                None
            }
        }
    }

    /// Estimated time until there is room again: the average time that the last requests of the class have waited.
    fn retry_after(&self) -> Duration {
        Duration::from_secs_f64(self.waited.ceil().clamp(1.0, LONGEST_RETRY))
    }
}

impl Queued {
    /// Replaces an estimate by the exact number of tokens.
    pub fn recount(&mut self, tokens: u64) {
        if let Some(HeldOfClass { choices, tokens: held }) = self.held.take() {
            let (_, limit) = self.admission.limits();
            let tokens = self.admission.queues[self.class].lock().tokens.replace(limit, held, tokens);
            self.held = Some(HeldOfClass { choices, tokens });
        }
        self.admission.show(self.class, 0, tokens as i64 - self.tokens as i64);
        self.tokens = tokens;
    }

    /// Records the time until the request's first output token, and removes the request from its class's counts.
    pub fn has_token(self) {
        let waited = self.since.elapsed().as_secs_f64();
        let mut queue = self.admission.queues[self.class].lock();
        queue.waited += RECENT * (waited - queue.waited);
        // Unlocks the queue here, because dropping `self` locks it again.
        drop(queue);
    }
}

impl Drop for Queued {
    fn drop(&mut self) {
        if let Some(HeldOfClass { choices, tokens }) = self.held.take() {
            let mut queue = self.admission.queues[self.class].lock();
            queue.choices.leave(choices);
            queue.tokens.leave(tokens);
        }
        self.admission.show(self.class, -(self.choices as i64), -(self.tokens as i64));
    }
}

/// The class of a priority. Lower numbers are more urgent.
fn class_of(priority: i32) -> usize {
    match priority {
        ..0 => 0,
        0 => 1,
        1.. => 2,
    }
}

#[cfg(test)]
mod tests;
