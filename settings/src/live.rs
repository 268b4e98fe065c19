//! The groups with settings that change while a process runs.

use crate::{
    ConductorSettings, ConnectionSettings, DrainSettings, MetricsSettings, RouterProcessSettings,
    RouterSettings, Settings, TelemetrySettings,
};

/// The settings of a process that can read its settings again while it runs. The methods return the groups with
/// settings that change live.
pub trait LiveGroups: Settings {
    /// Draining of requests before the process ends.
    fn drain(&self) -> &DrainSettings;
    /// Logs and spans.
    fn telemetry(&self) -> &TelemetrySettings;
    /// Names of metrics.
    fn metrics(&self) -> &MetricsSettings;
    /// Connections of each listener.
    fn connections(&self) -> &ConnectionSettings;
    /// The router's limits, API keys and tokenizer threads.
    fn router(&self) -> &RouterSettings;
}

macro_rules! live_groups {
    ($( $type:ident )+) => { $(
        impl LiveGroups for $type {
            fn drain(&self) -> &DrainSettings {
                &self.drain
            }

            fn telemetry(&self) -> &TelemetrySettings {
                &self.telemetry
            }

            fn metrics(&self) -> &MetricsSettings {
                &self.metrics
            }

            fn connections(&self) -> &ConnectionSettings {
                &self.connections
            }

            fn router(&self) -> &RouterSettings {
                &self.router
            }
        }
    )+ };
}

live_groups!(ConductorSettings RouterProcessSettings);
