//! What a router measures of its conductors.

use prometheus_client::encoding::EncodeLabelSet;
use tutti_runtime::metrics::{
    Metrics,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};

use super::{
    breaker::Position,
    member::{Member, Standing},
};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ConductorLabel {
    conductor: String,
}

/// A fleet's metrics; clones share them.
#[derive(Clone, Default)]
pub struct FleetMetrics {
    up: Family<ConductorLabel, Gauge>,
    breaker: Family<ConductorLabel, Gauge>,
    reported_running: Family<ConductorLabel, Gauge>,
    reported_waiting: Family<ConductorLabel, Gauge>,
    picks: Family<ConductorLabel, Counter>,
    retries: Family<ConductorLabel, Counter>,
    replays: Family<ConductorLabel, Counter>,
    prefix_entries: Gauge,
    prefix_bytes: Gauge,
    prefix_blocks: Counter,
    prefix_hits: Counter,
}

impl FleetMetrics {
    /// Registers them.
    pub fn register(metrics: &Metrics) -> Self {
        let own = Self::default();
        metrics.register(|registry| {
            let router = registry.sub_registry_with_prefix("router");
            let help = "1 for a conductor that gets requests, 0 for one that is out";
            router.register("conductor_up", help, own.up.clone());
            let help = "A conductor's circuit breaker: 0 closed, 1 half-open, 2 open";
            router.register("conductor_breaker", help, own.breaker.clone());
            let help = "Requests running there, as the conductor last said";
            router.register("conductor_running", help, own.reported_running.clone());
            let help = "Requests waiting there, as the conductor last said";
            router.register("conductor_waiting", help, own.reported_waiting.clone());
            let help = "Choices sent to a conductor, every try of each counted";
            router.register("conductor_picks", help, own.picks.clone());
            let help = "Choices without a token that this conductor lost or refused, sent on";
            router.register("conductor_retries", help, own.retries.clone());
            let help = "Choices with tokens that this conductor lost, gone on elsewhere";
            router.register("conductor_replays", help, own.replays.clone());
            let help = "Blocks in the index of prompt prefixes";
            router.register("prefix_index_entries", help, own.prefix_entries.clone());
            let help = "What the index of prompt prefixes takes";
            router.register("prefix_index_bytes", help, own.prefix_bytes.clone());
            let help = "Whole prompt blocks of choices that were sent";
            router.register("prefix_blocks", help, own.prefix_blocks.clone());
            let help = "Of these, blocks that their conductor was sent before";
            router.register("prefix_hit_blocks", help, own.prefix_hits.clone());
        });
        own
    }

    /// A choice goes there, of so many blocks, some of them known there.
    pub fn picked(&self, member: &Member, blocks: usize, held: usize) {
        self.picks.get_or_create(&label(member)).inc();
        self.prefix_blocks.inc_by(blocks as u64);
        self.prefix_hits.inc_by(held as u64);
    }

    /// A choice leaves for another conductor before its first token, or `behind` it.
    pub fn left(&self, member: &Member, behind: bool) {
        if member.is_removed() {
            return;
        }
        let family = if behind { &self.replays } else { &self.retries };
        family.get_or_create(&label(member)).inc();
    }

    /// The index is so large now.
    pub fn index(&self, entries: usize, bytes: usize) {
        self.prefix_entries.set(entries as i64);
        self.prefix_bytes.set(bytes as i64);
    }

    /// How a conductor stands now.
    pub fn standing(&self, member: &Member, standing: &Standing) {
        let label = label(member);
        let position = standing.breaker.position();
        let up = standing.is_ready() && position == Position::Closed;
        self.up.get_or_create(&label).set(up.into());
        self.breaker.get_or_create(&label).set(position as i64);
        self.reported_running.get_or_create(&label).set(standing.reported.running.into());
        self.reported_waiting.get_or_create(&label).set(standing.reported.waiting.into());
    }

    /// It is no part of the fleet any more: addresses come and go, and what is shown must not grow for ever.
    pub fn removed(&self, member: &Member) {
        let label = label(member);
        for family in [&self.up, &self.breaker, &self.reported_running, &self.reported_waiting] {
            family.remove(&label);
        }
        for family in [&self.picks, &self.retries, &self.replays] {
            family.remove(&label);
        }
    }
}

fn label(member: &Member) -> ConductorLabel {
    ConductorLabel { conductor: member.name.clone() }
}
