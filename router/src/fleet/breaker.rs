//! A circuit breaker: keeps requests from a conductor that fails them, and finds out when it no longer does.
//!
//! | state     | event                              | next state | what follows                         |
//! |-----------|------------------------------------|------------|--------------------------------------|
//! | Closed    | a fault, the `threshold`th in a row | Open      | the pause is the shortest            |
//! | Open      | its pause is over                  | Open       | one request may go there as a probe  |
//! | Open      | a pick: due, or nobody is left     | Half-open  | that request is the probe            |
//! | Half-open | the probe gets a token             | Closed     |                                      |
//! | Half-open | the probe's fault                  | Open       | the pause doubles, up to the longest |
//! | Half-open | the probe ends without a verdict   | Half-open  | another may go                       |
//!
//! Only faults of the conductor or of the way to it count. A refusal (a bad request, a full queue) shows that it works.
//! What is under way when the breaker opens goes on, and says nothing of it afterwards: only probes do.

use std::time::{Duration, Instant};

/// Faults in a row that open a closed breaker.
const THRESHOLD: u32 = 3;
/// The shortest and the longest pause of an open breaker.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A probe that has said nothing for so long may be waiting in a queue: the next one may go.
const PROBE_PATIENCE: Duration = Duration::from_secs(10);

/// The breaker of one conductor. Pure: every call is told the time.
#[derive(Debug)]
pub struct Breaker {
    state: State,
    probes: u64,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Closed { faults: u32 },
    Open { until: Instant, pause: Duration },
    HalfOpen { probe: Option<(u64, Instant)>, pause: Duration },
}

/// What a request that was sent through the breaker brings back with its verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Which probe it is, if it is one.
    probe: Option<u64>,
}

/// What a request's fate says of the conductor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It gave a token or an ending.
    Good,
    /// Nothing: the request was refused, or taken back.
    None,
    /// It failed the request, or could not be reached.
    Fault,
}

/// A breaker's state without its contents, for metrics and messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// Requests go through.
    Closed,
    /// A probe decides.
    HalfOpen,
    /// Nothing goes through.
    Open,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { state: State::Closed { faults: 0 }, probes: 0 }
    }
}

impl Breaker {
    /// Whether a request may go through.
    pub fn permits(&self, now: Instant) -> bool {
        match self.state {
            State::Closed { .. } => true,
            State::Open { until, .. } => now >= until,
            State::HalfOpen { probe, .. } => {
                probe.is_none_or(|(_, since)| now.saturating_duration_since(since) >= PROBE_PATIENCE)
            }
        }
    }

    /// A request goes through, permitted or because there is no better place for it.
    pub fn pass(&mut self, now: Instant) -> Ticket {
        let pause = match self.state {
            State::Closed { .. } => return Ticket { probe: None },
            State::Open { pause, .. } | State::HalfOpen { pause, .. } => pause,
        };
        self.probes += 1;
        self.state = State::HalfOpen { probe: Some((self.probes, now)), pause };
        Ticket { probe: Some(self.probes) }
    }

    /// Takes what became of a request. Each may give several: a good start, and a fault later.
    pub fn judge(&mut self, ticket: Ticket, verdict: Verdict, now: Instant) {
        self.state = match (self.state, verdict) {
            (State::Closed { .. }, Verdict::Good) => State::Closed { faults: 0 },
            (State::Closed { faults }, Verdict::Fault) if faults + 1 >= THRESHOLD => {
                State::Open { until: now + SHORTEST_PAUSE, pause: SHORTEST_PAUSE }
            }
            (State::Closed { faults }, Verdict::Fault) => State::Closed { faults: faults + 1 },
            (State::HalfOpen { probe: Some((probe, _)), pause }, verdict) if ticket.probe == Some(probe) => {
                match verdict {
                    Verdict::Good => State::Closed { faults: 0 },
                    Verdict::None => State::HalfOpen { probe: None, pause },
                    Verdict::Fault => {
                        let pause = (pause * 2).min(LONGEST_PAUSE);
                        State::Open { until: now + pause, pause }
                    }
                }
            }
            (state, _) => state,
        };
    }

    /// Where it stands.
    pub fn position(&self) -> Position {
        match self.state {
            State::Closed { .. } => Position::Closed,
            State::Open { .. } => Position::Open,
            State::HalfOpen { .. } => Position::HalfOpen,
        }
    }
}

#[cfg(test)]
mod tests;
