//! Metrics of a process's readiness.

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::gauge::ConstGauge,
};

use super::Metrics;
use crate::health::{Health, State};

impl Metrics {
    /// Registers gauges of readiness, as `/ready` reports it, and of draining. A process calls this once.
    pub fn follow_readiness(&self, health: Health) {
        self.register(|registry| registry.register_collector(Box::new(Readiness(health))));
    }
}

#[derive(Debug)]
struct Readiness(Health);

impl Collector for Readiness {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), std::fmt::Error> {
        let gauges = [
            ("ready", "1 if a request sent now would be served, else 0", self.0.ready() == State::Ok),
            ("draining", "1 once the process drains, else 0", self.0.is_draining()),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(i64::from(value));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
