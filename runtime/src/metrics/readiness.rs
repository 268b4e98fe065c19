//! Metrics of a process's readiness.

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::gauge::ConstGauge,
};

use super::Metrics;
use crate::health::{Health, State};

impl Metrics {
    /// Registers gauges that tell at each scrape what `/ready` would answer, and if the process drains. A process calls
    /// this once.
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
mod tests {
    use super::*;

    #[test]
    fn readiness_is_that_of_the_scrape() {
        let (metrics, health) = (Metrics::default(), Health::default());
        metrics.follow_readiness(health.clone());
        let shows = |ready: u8, draining: u8| {
            let text = metrics.encode();
            for line in [format!("\ntutti_ready {ready}\n"), format!("\ntutti_draining {draining}\n")] {
                assert!(text.contains(&line), "{line:?} is not in {text}");
            }
        };
        shows(0, 0);
        health.set_ready(State::Ok);
        shows(1, 0);
        health.drain();
        shows(0, 1);
    }
}
