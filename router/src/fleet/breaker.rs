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
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn opened(now: Instant) -> Breaker {
        let mut breaker = Breaker::default();
        for _ in 0..THRESHOLD {
            let ticket = breaker.pass(now);
            breaker.judge(ticket, Verdict::Fault, now);
        }
        assert_eq!(breaker.position(), Position::Open);
        breaker
    }

    #[test]
    fn faults_in_a_row_open_it_and_a_good_one_between_starts_the_count_again() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        for verdict in [Verdict::Fault, Verdict::Fault, Verdict::Good, Verdict::Fault, Verdict::Fault] {
            let ticket = breaker.pass(now);
            breaker.judge(ticket, verdict, now);
        }
        assert_eq!(breaker.position(), Position::Closed);
        let ticket = breaker.pass(now);
        breaker.judge(ticket, Verdict::Fault, now);
        assert_eq!((breaker.position(), breaker.permits(now)), (Position::Open, false));
    }

    #[test]
    fn refusals_never_open_it() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        for _ in 0..100 {
            let ticket = breaker.pass(now);
            breaker.judge(ticket, Verdict::None, now);
        }
        assert_eq!(breaker.position(), Position::Closed);
    }

    #[test]
    fn one_probe_at_a_time_decides() {
        let start = Instant::now();
        let mut breaker = opened(start);
        let later = start + SECOND;
        assert!(!breaker.permits(start) && breaker.permits(later));
        let probe = breaker.pass(later);
        assert!(!breaker.permits(later), "one probe is out");
        // A stream from before the fault says nothing.
        breaker.judge(Ticket { probe: None }, Verdict::Good, later);
        assert_eq!(breaker.position(), Position::HalfOpen);
        breaker.judge(probe, Verdict::Good, later);
        assert_eq!(breaker.position(), Position::Closed);
    }

    #[test]
    fn a_probe_without_a_verdict_makes_room_for_the_next() {
        let start = Instant::now();
        let mut breaker = opened(start);
        let silent = breaker.pass(start + SECOND);
        assert!(breaker.permits(start + SECOND + PROBE_PATIENCE));
        let refused = breaker.pass(start + SECOND + PROBE_PATIENCE);
        breaker.judge(silent, Verdict::Fault, start);
        assert_eq!(breaker.position(), Position::HalfOpen, "the probe after it decides");
        breaker.judge(refused, Verdict::None, start);
        assert!(breaker.permits(start));
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut now = Instant::now();
        let mut breaker = opened(now);
        for pause in [2, 4, 8, 16, 30, 30] {
            now += LONGEST_PAUSE;
            let probe = breaker.pass(now);
            breaker.judge(probe, Verdict::Fault, now);
            let pause = pause * SECOND;
            assert!(!breaker.permits(now + pause - Duration::from_millis(1)) && breaker.permits(now + pause));
        }
    }

    proptest! {
        /// Whatever happens, it can be asked and passed, and time alone makes it permit again.
        #[test]
        fn it_never_closes_a_conductor_off_for_good(
            events in prop::collection::vec((0usize..4, 0u8..3, 0u64..20_000), 0..60),
        ) {
            let (mut breaker, mut now) = (Breaker::default(), Instant::now());
            let mut tickets = vec![Ticket { probe: None }];
            for (which, verdict, millis) in events {
                now += Duration::from_millis(millis);
                if which == 0 {
                    tickets.push(breaker.pass(now));
                }
                let verdict = [Verdict::Good, Verdict::None, Verdict::Fault][usize::from(verdict)];
                breaker.judge(tickets[which * 7 % tickets.len()], verdict, now);
            }
            prop_assert!(breaker.permits(now + LONGEST_PAUSE));
            let probe = breaker.pass(now + LONGEST_PAUSE);
            breaker.judge(probe, Verdict::Good, now + LONGEST_PAUSE);
            prop_assert_eq!(breaker.position(), Position::Closed);
        }
    }
}
