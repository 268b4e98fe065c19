//! Metrics of a router's conductors.

use prometheus_client::encoding::EncodeLabelSet;
use tutti_runtime::{
    declare_metrics,
    metrics::metrics::{counter::Counter, family::Family, gauge::Gauge},
    prefix_index::IndexSize,
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

declare_metrics! {
    /// Metrics of a fleet. Clones share the metrics.
    #[derive(Clone)]
    pub struct FleetMetrics {
        up: Family<ConductorLabel, Gauge>, "conductor_up",
            "1 if the router sends requests to the conductor, else 0";
        breaker: Family<ConductorLabel, Gauge>, "conductor_breaker",
            "State of the conductor's circuit breaker: 0 closed, 1 half-open, 2 open";
        reported_running: Family<ConductorLabel, Gauge>, "conductor_running",
            "Requests running on the conductor, from its last report";
        reported_waiting: Family<ConductorLabel, Gauge>, "conductor_waiting",
            "Requests waiting on the conductor, from its last report";
        picks: Family<ConductorLabel, Counter>, "conductor_picks",
            "Choices sent to the conductor; each attempt counts";
        retries: Family<ConductorLabel, Counter>, "conductor_retries",
            "Choices without tokens that this conductor lost or refused, and that were sent to another conductor";
        replays: Family<ConductorLabel, Counter>, "conductor_replays",
            "Choices with tokens that this conductor lost, and that continued on another conductor";
        prefix_entries: Gauge, "prefix_index_entries", "Blocks in the index of prompt prefixes";
        prefix_bytes: Gauge, "prefix_index_bytes", "Memory of the index of prompt prefixes, in bytes";
        prefix_blocks: Counter, "prefix_blocks", "Whole prompt blocks of the choices sent to conductors";
        prefix_hits: Counter, "prefix_hit_blocks",
            "Prompt blocks that had been sent to the same conductor before";
    }
}

impl FleetMetrics {
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
    pub fn index(&self, size: IndexSize) {
        self.prefix_entries.set(size.entries as i64);
        self.prefix_bytes.set(size.bytes as i64);
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
        // Creates every series with the value 0. Prometheus sees no increase in the first sample of a new series.
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
