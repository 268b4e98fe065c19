//! The process's metrics, in the OpenMetrics text format of Prometheus.

use std::sync::Arc;

use parking_lot::RwLock;
pub use prometheus_client::{
    collector::Collector,
    encoding, metrics,
    registry::{Registry, Unit},
};

/// The content type of `/metrics`.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics of one process. Clones share them.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<RwLock<Registry>>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self { registry: Arc::new(RwLock::new(Registry::with_prefix("tutti"))) }
    }
}

impl Metrics {
    /// Registers a component's metrics, once, when it starts. Names get the prefix `tutti_`.
    pub fn register(&self, add: impl FnOnce(&mut Registry)) {
        add(&mut self.registry.write());
    }

    /// The text of all metrics.
    pub fn encode(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail, so an error comes from a collector. The text then ends at that collector and
        // lacks all later ones.
        if prometheus_client::encoding::text::encode(&mut text, &self.registry.read()).is_err() {
            tracing::error!("a metrics collector failed; /metrics is incomplete");
        }
        text
    }
}
