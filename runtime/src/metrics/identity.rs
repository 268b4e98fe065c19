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
use crate::{Error, VERSION};

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
        let build = Family::<BuildLabel, Gauge>::default();
        let own = SettingsMetrics {
            process,
            config: Family::default(),
            loaded: Gauge::default(),
            failures: Counter::default(),
        };
        own.loaded(settings)?;
        build.get_or_create(&BuildLabel { process, version: VERSION }).set(1);
        self.register(|registry| {
            registry.register("build_info", "1, with the process's name and version", build);
            let help = "1, with a hash of the process's settings other than its own addresses";
            registry.register("config_info", help, own.config.clone());
            let help = "Unix time at which the settings were read for the last time without an error";
            registry.register("config_loaded_seconds", help, own.loaded.clone());
            let help = "Settings that were read again and refused";
            registry.register("config_reload_failures", help, own.failures.clone());
        });
        Ok(own)
    }
}

/// Metrics of the settings in force.
#[derive(Clone, Debug)]
pub struct SettingsMetrics {
    process: &'static str,
    config: Family<SettingsLabel, Gauge>,
    loaded: Gauge,
    failures: Counter,
}

impl SettingsMetrics {
    /// Notes that these settings are in force since now.
    pub fn loaded(&self, settings: &impl Serialize) -> Result<(), Error> {
        let label = SettingsLabel { process: self.process, hash: settings_hash(settings)? };
        self.config.clear();
        self.config.get_or_create(&label).set(1);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        self.loaded.set(now as i64);
        Ok(())
    }

    /// Counts settings that were refused.
    pub fn refused(&self) {
        self.failures.inc();
    }
}

/// A hash of settings, in 16 hexadecimal digits. Two processes of one build have the same hash if their settings are
/// the same other than their own addresses. The contents of files that settings name do not count.
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
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_hash_of_settings_leaves_out_own_addresses_alone() {
        let hash = |settings: Value| settings_hash(&settings).expect("a hash");
        let one = hash(json!({ "http": "10.0.0.1:80", "grpc": "10.0.0.1:90", "drain_timeout": 30 }));
        assert_eq!(one, hash(json!({ "http": "10.0.0.2:80", "grpc": "10.0.0.2:90", "drain_timeout": 30 })));
        assert_ne!(one, hash(json!({ "http": "10.0.0.1:80", "grpc": "10.0.0.1:90", "drain_timeout": 31 })));
        // A field of a table is no address of the process, whatever its name.
        assert_ne!(hash(json!({ "fleet": { "http": 1 } })), hash(json!({ "fleet": { "http": 2 } })));
    }

    #[test]
    fn a_process_names_its_build_and_settings_once() {
        let metrics = Metrics::default();
        let settings =
            metrics.identify("router", &json!({ "log": "warn" })).expect("settings that serialise");
        let hashes = || metrics.encode().lines().filter(|line| line.contains("hash=")).collect::<String>();
        let before = hashes();
        settings.loaded(&json!({ "log": "info" })).expect("settings that serialise");
        assert_ne!(before, hashes());
        let text = metrics.encode();
        let build = format!("tutti_build_info{{process=\"router\",version=\"{VERSION}\"}} 1");
        assert!(text.lines().any(|line| line == build), "{text}");
        let configs =
            text.lines().filter(|line| line.starts_with("tutti_config_info{process=\"router\",hash=\""));
        assert_eq!(configs.count(), 1, "{text}");
        assert!(!text.contains(" info\n"), "a type that old parsers refuse: {text}");
    }
}
