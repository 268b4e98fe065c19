//! Settings that are read again without a restart: on SIGHUP, and when the file with settings changes.
//!
//! All layers are read and validated as at the start. Settings that are declared with `changes live` then take their
//! new values. All other settings keep their old values, and one warning names those that differ. If the new settings
//! are refused, nothing changes.

use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    task::spawn_blocking,
};
use tutti_settings::{Changes, LiveGroups};

use crate::{
    Error,
    config::Layers,
    live::LiveSettings,
    metrics::SettingsMetrics,
    telemetry::{self, LogFilter},
};

/// A process's settings in force, and the data with which they are read again.
#[derive(Debug)]
pub struct Reload<S> {
    /// The settings in force.
    pub settings: S,
    /// The layers that the settings were read from.
    pub layers: Layers,
    /// Refuses settings with which the process would not start.
    pub validate: fn(&S) -> Result<(), Error>,
    /// The values that the process uses.
    pub live: LiveSettings,
    /// The filter of log lines.
    pub log: LogFilter,
    /// Metrics of the settings.
    pub metrics: SettingsMetrics,
}

impl<S> Reload<S>
where
    S: LiveGroups + Clone + Serialize + DeserializeOwned + Send + 'static,
{
    /// Starts a task that reads the settings again on SIGHUP and when the file changes. Must be called inside a Tokio
    /// runtime.
    pub fn start(self) -> Result<(), Error> {
        let hangups = signal(SignalKind::hangup())
            .map_err(|e| Error::internal(format!("cannot listen for SIGHUP: {e}")))?;
        tokio::spawn(self.follow(hangups));
        Ok(())
    }

    async fn follow(mut self, mut hangups: Signal) {
        loop {
            tokio::select! {
                _ = hangups.recv() => {}
                () = self.layers.watched.changed() => {}
            }
            let read = move || {
                // The file's stamp is taken before the read, so that a change during the read is noticed.
                self.layers.watched.look();
                self.read_again();
                self
            };
            match spawn_blocking(read).await {
                Ok(reload) => self = reload,
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                Err(_) => return, // The Tokio runtime is shutting down.
            }
        }
    }

    fn read_again(&mut self) {
        if let Err(error) = self.apply() {
            self.metrics.refused();
            // A TOML error has several lines. The log gets one.
            let error = error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
            tracing::error!(error, "the settings stay as they were");
        }
    }

    fn apply(&mut self) -> Result<(), Error> {
        let new: S = self.layers.read()?;
        (self.validate)(&new)?;
        let filter = telemetry::log_filter(new.telemetry())?;
        let (mut settings, mut changes) = (self.settings.clone(), Changes::default());
        settings.change_to(&new, &mut changes);
        // The changes are logged under the old filter or the new one, whichever lets INFO pass.
        let is_logged = tracing::enabled!(tracing::Level::INFO);
        if is_logged {
            report(&changes);
        }
        if settings.telemetry().log != self.settings.telemetry().log {
            self.log.replace(filter)?;
        }
        if !is_logged {
            report(&changes);
        }
        self.live.replace(&settings);
        self.metrics.loaded(&settings)?;
        self.settings = settings;
        Ok(())
    }
}

fn report(changes: &Changes) {
    let changed: Vec<String> = changes.live.iter().map(ToString::to_string).collect();
    if changed.is_empty() {
        tracing::info!("read the settings again: none has changed live");
    } else {
        tracing::info!(changed = %changed.join(", "), "read the settings again");
    }
    if !changes.restart.is_empty() {
        tracing::warn!(settings = %changes.restart.join(", "), "settings that need a restart have changed and keep their values");
    }
}
