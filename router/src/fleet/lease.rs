//! A choice's lease on the conductor that the choice is sent to. The lease counts as load of the conductor, and reports
//! the choice's result to the conductor's circuit breaker.

use std::{sync::Arc, time::Instant};

use tutti_runtime::prefix_index::Holder;

use super::{
    breaker::{Ticket, Verdict},
    failure::Failure,
    load::Booking,
    member::Member,
    metrics::FleetMetrics,
};

/// The conductor that a choice was sent to, with the breaker's ticket.
pub struct Hold {
    /// The conductor.
    pub member: Arc<Member>,
    /// Id that the conductor's process had in the prefix index when the choice was sent.
    pub holder: Holder,
    /// Ticket from the conductor's breaker.
    pub ticket: Ticket,
}

/// A choice's lease on a conductor. Dropping the lease removes the choice from the conductor's load.
pub struct Lease {
    hold: Hold,
    booking: Booking,
    block_tokens: usize,
    metrics: FleetMetrics,
    /// True once the lease has reported a verdict to the breaker.
    judged: bool,
}

impl Lease {
    pub(super) fn new(hold: Hold, booking: Booking, block_tokens: usize, metrics: FleetMetrics) -> Self {
        Self { hold, booking, block_tokens, metrics, judged: false }
    }

    /// The conductor.
    pub fn member(&self) -> &Arc<Member> {
        &self.hold.member
    }

    /// Records that the choice has this many tokens, prompt and output together.
    pub fn holds(&mut self, tokens: usize) {
        self.booking.decodes(tokens.div_ceil(self.block_tokens));
        if !self.judged {
            self.judge(Verdict::Good);
        }
    }

    /// Ends the lease of a failed attempt.
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
        // If the conductor's id has changed, the conductor may have restarted. The verdict then says nothing about the
        // new process, so the verdict is ignored.
        if standing.holder != *holder {
            return;
        }
        let before = standing.breaker.position();
        standing.breaker.judge(*ticket, verdict, Instant::now());
        let after = standing.breaker.position();
        if before != after {
            tracing::info!(conductor = %member.name, from = ?before, to = ?after, "circuit breaker changed state");
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
