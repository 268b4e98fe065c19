//! Metrics of a router's conductors.

use prometheus_client::encoding::EncodeLabelSet;
use tutti_runtime::metrics::{
    Metrics,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};

use super::{
    Recovery,
    breaker::Position,
    member::{Member, Standing},
};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ConductorLabel {
    conductor: String,
}

/// Metrics of a fleet. Clones share the metrics.
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
    /// Registers the metrics.
    pub fn register(metrics: &Metrics) -> Self {
        let own = Self::default();
        metrics.register(|registry| {
            let router = registry.sub_registry_with_prefix("router");
            let help = "1 if the router sends requests to the conductor, else 0";
            router.register("conductor_up", help, own.up.clone());
            let help = "State of the conductor's circuit breaker: 0 closed, 1 half-open, 2 open";
            router.register("conductor_breaker", help, own.breaker.clone());
            let help = "Requests running on the conductor, from its last report";
            router.register("conductor_running", help, own.reported_running.clone());
            let help = "Requests waiting on the conductor, from its last report";
            router.register("conductor_waiting", help, own.reported_waiting.clone());
            let help = "Choices sent to the conductor; each attempt counts";
            router.register("conductor_picks", help, own.picks.clone());
            let help = "Choices without tokens that this conductor lost or refused, and that were sent to another conductor";
            router.register("conductor_retries", help, own.retries.clone());
            let help = "Choices with tokens that this conductor lost, and that continued on another conductor";
            router.register("conductor_replays", help, own.replays.clone());
            let help = "Blocks in the index of prompt prefixes";
            router.register("prefix_index_entries", help, own.prefix_entries.clone());
            let help = "Memory of the index of prompt prefixes, in bytes";
            router.register("prefix_index_bytes", help, own.prefix_bytes.clone());
            let help = "Whole prompt blocks of the choices sent to conductors";
            router.register("prefix_blocks", help, own.prefix_blocks.clone());
            let help = "Prompt blocks that had been sent to the same conductor before";
            router.register("prefix_hit_blocks", help, own.prefix_hits.clone());
        });
        own
    }

    /// Counts a choice that is sent to a conductor. The choice's prompt has `blocks` whole blocks, of which the
    /// conductor has cached `held`.
    pub fn picked(&self, member: &Member, blocks: usize, held: usize) {
        self.picks.get_or_create(&label(member)).inc();
        self.prefix_blocks.inc_by(blocks as u64);
        self.prefix_hits.inc_by(held as u64);
    }

    /// Counts a choice that moves from `member` to another conductor.
    pub fn left(&self, member: &Member, recovery: Recovery) {
        if member.is_removed() {
            return;
        }
        let family = match recovery {
            Recovery::Retry => &self.retries,
            Recovery::Replay => &self.replays,
        };
        family.get_or_create(&label(member)).inc();
    }

    /// Sets the size of the prefix index.
    pub fn index(&self, entries: usize, bytes: usize) {
        self.prefix_entries.set(entries as i64);
        self.prefix_bytes.set(bytes as i64);
    }

    /// Sets the gauges of a conductor.
    pub fn standing(&self, member: &Member, standing: &Standing) {
        let label = label(member);
        let position = standing.breaker.position();
        let up = standing.is_ready() && position == Position::Closed;
        self.up.get_or_create(&label).set(up.into());
        self.breaker.get_or_create(&label).set(position as i64);
        self.reported_running.get_or_create(&label).set(standing.reported.running.into());
        self.reported_waiting.get_or_create(&label).set(standing.reported.waiting.into());
        // The first count of a series that did not exist before is no increase to Prometheus.
        for family in [&self.picks, &self.retries, &self.replays] {
            family.get_or_create(&label).inc_by(0);
        }
    }

    /// Removes the metrics of a conductor that left the fleet. Otherwise the number of label values would grow with
    /// every new address.
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
