//! A choice's hold on the conductor that it was sent to: counted as load, and its fate told to the breaker.

use std::{sync::Arc, time::Instant};

use super::{
    breaker::{Ticket, Verdict},
    failure::Failure,
    load::Booking,
    member::Member,
    metrics::FleetMetrics,
};

/// Dropped, it is no load any more.
pub struct Lease {
    member: Arc<Member>,
    booking: Booking,
    ticket: Ticket,
    block_tokens: usize,
    metrics: FleetMetrics,
    /// Whether the conductor has shown that it works, or that it does not.
    judged: bool,
}

impl Lease {
    pub(super) fn new(
        member: Arc<Member>,
        booking: Booking,
        ticket: Ticket,
        block_tokens: usize,
        metrics: FleetMetrics,
    ) -> Self {
        Self { member, booking, ticket, block_tokens, metrics, judged: false }
    }

    /// Where it is.
    pub fn member(&self) -> &Arc<Member> {
        &self.member
    }

    /// The choice has so many tokens there, prompt and output together.
    pub fn holds(&mut self, tokens: usize) {
        self.booking.decodes(tokens.div_ceil(self.block_tokens));
        if !self.judged {
            self.judge(Verdict::Good);
        }
    }

    /// The try came to nothing.
    pub fn fails(mut self, failure: &Failure) {
        self.judge(failure.verdict());
    }

    fn judge(&mut self, verdict: Verdict) {
        self.judged = true;
        let mut standing = self.member.standing.lock();
        let before = standing.breaker.position();
        standing.breaker.judge(self.ticket, verdict, Instant::now());
        let after = standing.breaker.position();
        if before != after {
            tracing::info!(conductor = %self.member.name, from = ?before, to = ?after, "its breaker turned");
            if !self.member.is_removed() {
                self.metrics.standing(&self.member, &standing);
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.judged {
            self.judge(Verdict::None);
        }
    }
}
