//! The lifecycle of a process that serves clients, shared by conductor and router: it reads its settings, binds its
//! ports, serves, and drains.

mod drain;
mod ports;
mod servers;

use std::{ffi::OsString, io::Write, time::Duration};

use serde::{Serialize, de::DeserializeOwned};
use tutti_settings::LiveGroups;

pub use self::{
    drain::{Background, Drain},
    ports::Ports,
    servers::{Front, Servers},
};
use crate::{
    Error, command_line,
    config::{self, Layers, Loaded},
    descriptors, freed_memory,
    live::LiveSettings,
    metrics::Metrics,
    reload::Reload,
    serve::ConnectionMetrics,
    shutdown::{Shutdown, outlive_hangups},
    telemetry::{
        self, Sampling, TelemetryGuard,
        style::{self, LogName},
    },
    watched_files::CHECKED_EVERY,
};

/// Time after which an idle thread for blocking calls ends. A thread that has encoded texts keeps a cache of words,
/// several megabytes, until its end.
const BLOCKING_THREAD_IDLE: Duration = Duration::from_millis(500);
// The check of watched files wakes one idle thread. If threads were idle for longer, that check would keep some of them
// for ever.
const _: () = assert!(BLOCKING_THREAD_IDLE.as_millis() < CHECKED_EVERY.as_millis());

/// An executable that serves clients.
pub struct Executable<S> {
    /// The executable, as `--help` describes it.
    pub process: command_line::Process,
    /// Refuses settings that contradict each other. `--print-config` does not print such settings.
    pub check: fn(&S) -> Result<(), Error>,
    /// Refuses settings with which the process could not serve. Called at the start and at each reload.
    pub validate: fn(&S) -> Result<(), Error>,
    /// The requests whose spans are exported.
    pub sampling: fn(&S) -> Sampling,
}

/// A process that has read its settings. It does not serve yet.
pub struct Started<S> {
    /// The settings at the start.
    pub settings: S,
    /// The settings that change live.
    pub live: LiveSettings,
    /// The metrics of the process.
    pub metrics: Metrics,
    /// The metrics of the process's listeners.
    pub counts: ConnectionMetrics,
    /// Begins when the process receives SIGINT or SIGTERM.
    pub shutdown: Shutdown,
    _telemetry: Option<TelemetryGuard>,
}

impl<S: LiveGroups> Started<S> {
    /// A process with these settings, for tests. It writes no log, handles no signals, and does not read its settings
    /// again.
    pub fn silent(settings: S) -> Self {
        let (mut metrics, live) = (Metrics::default(), LiveSettings::of(&settings));
        if settings.metrics().vllm_metrics {
            metrics = metrics.with_names_of_vllm();
        }
        let counts = metrics.register(ConnectionMetrics::register);
        Self { settings, live, metrics, counts, shutdown: Shutdown::default(), _telemetry: None }
    }
}

impl<S> Executable<S>
where
    S: LiveGroups + Clone + Serialize + DeserializeOwned + Send + 'static,
{
    /// Runs the process. `serve` returns once the process has drained after a signal. `arguments` is the command line,
    /// with the program's name first.
    ///
    /// # Errors
    /// An error of usage or settings, before any port is bound, or the error that keeps the process from serving.
    pub fn run(
        self,
        arguments: impl IntoIterator<Item = OsString>,
        serve: impl AsyncFnOnce(Started<S>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        freed_memory::limit_arenas();
        outlive_hangups()?;
        let Loaded { settings, print, layers } = config::load::<S>(self.process, arguments)?;
        style::set_style(settings.telemetry().log_format, LogName::of(self.process.name));
        (self.check)(&settings)?;
        if print {
            return writeln!(std::io::stdout(), "{}", config::print(&settings)?)
                .map_err(|e| Error::internal(format!("cannot print: {e}")));
        }
        (self.validate)(&settings)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .thread_keep_alive(BLOCKING_THREAD_IDLE)
            .build()
            .map_err(|e| Error::internal(format!("cannot start a runtime: {e}")))?;
        let outcome = runtime.block_on(async { serve(self.start(settings, layers)?).await });
        runtime.shutdown_background();
        outcome
    }

    fn start(self, settings: S, layers: Layers) -> Result<Started<S>, Error> {
        let name = self.process.name;
        let log_name = LogName::of(name);
        let telemetry = telemetry::install(settings.telemetry(), log_name, (self.sampling)(&settings))?;
        let started = Started { shutdown: Shutdown::on_signals()?, ..Started::silent(settings) };
        started.metrics.register(|registry| telemetry.register(registry));
        started.metrics.show_process();
        let reload = Reload {
            settings: started.settings.clone(),
            layers,
            validate: self.validate,
            live: started.live.clone(),
            log: telemetry.log_filter(),
            metrics: started.metrics.identify(name, &started.settings)?,
        };
        reload.start()?;
        descriptors::raise_limit();
        Ok(Started { _telemetry: Some(telemetry), ..started })
    }
}
