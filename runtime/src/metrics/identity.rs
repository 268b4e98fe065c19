//! Metrics that say which build and which settings a process runs.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    time::{SystemTime, UNIX_EPOCH},
};

use prometheus_client::encoding::EncodeLabelSet;
use serde::Serialize;
use serde_json::Value;

use super::{
    Metrics,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};
use crate::{Error, VERSION, declare_metrics};

/// Settings that differ between processes of one deployment: their own addresses.
const OWN_ADDRESSES: [&str; 5] = ["http", "grpc", "operations", "cluster_grpc", "worker_listen"];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct BuildLabel {
    process: &'static str,
    version: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct SettingsLabel {
    process: &'static str,
    hash: String,
}

impl Metrics {
    /// Registers gauges of constant value 1 whose labels name the process, its version and the hash of its settings,
    /// and the time at which the settings were read.
    ///
    /// The gauges have the type `gauge`, because parsers of Prometheus's older text format refuse the type `info`.
    ///
    /// # Errors
    /// An internal error if the settings cannot be written as JSON.
    pub fn identify(
        &self,
        process: &'static str,
        settings: &impl Serialize,
    ) -> Result<SettingsMetrics, Error> {
        let own = SettingsMetrics { process, metrics: self.register(OwnMetrics::register) };
        own.metrics.build.get_or_create(&BuildLabel { process, version: VERSION }).set(1);
        own.loaded(settings)?;
        Ok(own)
    }
}

declare_metrics! {
    #[derive(Clone, Debug)]
    struct OwnMetrics {
        build: Family<BuildLabel, Gauge>, "build_info", "1, with the process's name and version";
        config: Family<SettingsLabel, Gauge>, "config_info",
            "1, with a hash of the process's settings other than its own addresses";
        loaded: Gauge, "config_loaded_seconds",
            "Unix time at which the settings were read for the last time without an error";
        failures: Counter, "config_reload_failures", "Settings that were read again and refused";
    }
}

/// Metrics of the settings in force.
#[derive(Clone, Debug)]
pub struct SettingsMetrics {
    process: &'static str,
    metrics: OwnMetrics,
}

impl SettingsMetrics {
    /// Records that these settings are now in force.
    pub fn loaded(&self, settings: &impl Serialize) -> Result<(), Error> {
        let label = SettingsLabel { process: self.process, hash: settings_hash(settings)? };
        self.metrics.config.clear();
        self.metrics.config.get_or_create(&label).set(1);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.metrics.loaded.set(now as i64);
        Ok(())
    }

    /// Counts settings that were refused.
    pub fn refused(&self) {
        self.metrics.failures.inc();
    }
}

/// A hash of settings, in 16 hexadecimal digits. Two processes of one build have equal hashes if their settings differ
/// only in their own addresses. The contents of files that settings name are not hashed.
fn settings_hash(settings: &impl Serialize) -> Result<String, Error> {
    let mut value = serde_json::to_value(settings)
        .map_err(|e| Error::internal(format!("the settings do not serialise: {e}")))?;
    if let Value::Object(fields) = &mut value {
        fields.retain(|name, _| !OWN_ADDRESSES.contains(&name.as_str()));
    }
    let mut hasher = DefaultHasher::new();
    value.to_string().hash(&mut hasher);
    Ok(format!("{:016x}", hasher.finish()))
}

#[cfg(test)]
mod tests;
