//! A choice's hold on the conductor that it was sent to: counted as load, and its fate told to the breaker.

use std::{sync::Arc, time::Instant};

use tutti_runtime::prefix_index::Holder;

use super::{
    breaker::{Ticket, Verdict},
    failure::Failure,
    load::Booking,
    member::Member,
    metrics::FleetMetrics,
};

/// One life of a conductor, and the way through its breaker.
pub struct Hold {
    /// The conductor.
    pub member: Arc<Member>,
    /// Its life.
    pub holder: Holder,
    /// What its breaker gave the choice.
    pub ticket: Ticket,
}

/// Dropped, it is no load any more.
pub struct Lease {
    hold: Hold,
    booking: Booking,
    block_tokens: usize,
    metrics: FleetMetrics,
    /// Whether the conductor has shown that it works, or that it does not.
    judged: bool,
}

impl Lease {
    pub(super) fn new(hold: Hold, booking: Booking, block_tokens: usize, metrics: FleetMetrics) -> Self {
        Self { hold, booking, block_tokens, metrics, judged: false }
    }

    /// Where it is.
    pub fn member(&self) -> &Arc<Member> {
        &self.hold.member
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
        if failure.is_transport() {
            self.hold.member.doubt();
        }
    }

    fn judge(&mut self, verdict: Verdict) {
        self.judged = true;
        let Hold { member, holder, ticket } = &self.hold;
        let mut standing = member.standing.lock();
        // What an earlier life of it did says nothing of this one.
        if standing.holder != *holder {
            return;
        }
        let before = standing.breaker.position();
        standing.breaker.judge(*ticket, verdict, Instant::now());
        let after = standing.breaker.position();
        if before != after {
            tracing::info!(conductor = %member.name, from = ?before, to = ?after, "its breaker turned");
            if !member.is_removed() {
                self.metrics.standing(member, &standing);
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
