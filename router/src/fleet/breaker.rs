//! A circuit breaker: keeps requests away from a conductor that fails them, and probes whether it has recovered.
//!
//! | state     | event                                          | next state | effect                               |
//! |-----------|------------------------------------------------|------------|--------------------------------------|
//! | Closed    | `THRESHOLD` faults in a row                    | Open       | the pause is `SHORTEST_PAUSE`        |
//! | Open      | the pause is over                              | Open       | one request may be sent as a probe   |
//! | Open      | a pick after the pause, or without alternative | Half-open  | the picked request is the probe      |
//! | Half-open | the probe gets a token                         | Closed     |                                      |
//! | Half-open | the probe meets a fault                        | Open       | doubled pause, up to `LONGEST_PAUSE` |
//! | Half-open | the probe ends without a verdict               | Half-open  | another probe may be sent            |
//!
//! Only faults of the conductor or of its connection count. A refusal (a bad request, a full queue) shows that the
//! conductor works. Requests that run when the breaker opens continue. From then on only the probe's verdict counts.

use std::time::{Duration, Instant};

/// Faults in a row that open a closed breaker.
const THRESHOLD: u32 = 3;
/// Shortest pause of an open breaker.
const SHORTEST_PAUSE: Duration = Duration::from_secs(1);
/// Longest pause of an open breaker.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A probe without a verdict after this time probably waits in a queue. Another probe may then be sent.
const PROBE_PATIENCE: Duration = Duration::from_secs(10);

/// The breaker of one conductor. Pure: the caller passes the time.
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

/// Identifies a request that the breaker let pass. The caller hands the ticket back to [`Breaker::judge`] with the
/// request's verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Serial number of the probe; `None` if the request is not a probe.
    probe: Option<u64>,
}

/// Evidence that a request gives about the conductor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The conductor sent a token or a terminal event.
    Good,
    /// No evidence: the request was refused or cancelled.
    None,
    /// The conductor failed the request, or could not be reached.
    Fault,
}

/// A breaker's state, without counts and times, for metrics and messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// Requests pass.
    Closed,
    /// The verdict of a probe decides whether the breaker closes or opens.
    HalfOpen,
    /// No request passes until the pause is over. The exception is a request for which no better conductor exists.
    Open,
}

impl Default for Breaker {
    fn default() -> Self {
        Self { state: State::Closed { faults: 0 }, probes: 0 }
    }
}

impl Breaker {
    /// True if a request may pass.
    pub fn permits(&self, now: Instant) -> bool {
        match self.state {
            State::Closed { .. } => true,
            State::Open { until, .. } => now >= until,
            State::HalfOpen { probe, .. } => {
                probe.is_none_or(|(_, since)| now.saturating_duration_since(since) >= PROBE_PATIENCE)
            }
        }
    }

    /// Lets a request pass, because it is permitted or because no better conductor exists.
    pub fn pass(&mut self, now: Instant) -> Ticket {
        let pause = match self.state {
            State::Closed { .. } => return Ticket { probe: None },
            State::Open { pause, .. } | State::HalfOpen { pause, .. } => pause,
        };
        self.probes += 1;
        self.state = State::HalfOpen { probe: Some((self.probes, now)), pause };
        Ticket { probe: Some(self.probes) }
    }

    /// Applies the verdict of a request. A request may give several verdicts, such as a good one and later a fault.
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

    /// The state, without counts and times.
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
