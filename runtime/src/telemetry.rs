//! Logs to stderr through a queue, and spans of sampled requests to an OpenTelemetry collector if one is configured.

mod line;
pub mod style;

use std::{io::IsTerminal, time::Duration};

use opentelemetry::trace::TracerProvider;
use tracing::{Metadata, level_filters::LevelFilter};
use tracing_subscriber::{
    EnvFilter, Layer, Registry,
    filter::FilterFn,
    fmt::{MakeWriter, format::JsonFields},
    layer::SubscriberExt,
    reload,
    util::SubscriberInitExt,
};
use tutti_settings::{LogFormat, TelemetrySettings};

use self::{
    line::{JsonLines, TextLines},
    style::LogName,
};
use crate::{
    Error,
    log_queue::{self, LogQueue},
    metrics,
    trace::{self, SpanExport, TRACE_ID},
};

pub use crate::trace::Sampling;

/// Maximum time for which an ending process waits until the collector has received the last spans.
const FLUSH: Duration = Duration::from_secs(1);

/// A guard that sends the remaining spans and log lines when it is dropped at the end of the process.
#[derive(Debug)]
pub struct TelemetryGuard {
    export: Option<SpanExport>,
    filter: LogFilter,
    lines: LogQueue,
}

impl TelemetryGuard {
    /// The filter of log lines.
    pub fn log_filter(&self) -> LogFilter {
        self.filter.clone()
    }

    /// Registers the metrics of logging.
    pub fn register(&self, registry: &mut metrics::Registry) {
        self.lines.register(registry);
    }
}

/// The filter of this process's log lines. Clones share it.
#[derive(Clone, Debug)]
pub struct LogFilter(reload::Handle<EnvFilter, Registry>);

impl LogFilter {
    /// Replaces the filter.
    ///
    /// # Errors
    /// An internal error if logging has ended.
    pub fn replace(&self, filter: EnvFilter) -> Result<(), Error> {
        self.0.reload(filter).map_err(|e| Error::internal(format!("the log filter cannot change: {e}")))
    }
}

/// Parses the setting `log`.
pub fn log_filter(settings: &TelemetrySettings) -> Result<EnvFilter, Error> {
    EnvFilter::try_new(&settings.log).map_err(|e| Error::invalid("log", format!("{:?}: {e}", settings.log)))
}

impl Drop for TelemetryGuard {
    fn drop(&mut self) {
        if let Some(export) = self.export.take() {
            export.shut_down(FLUSH);
        }
        log_queue::flush();
    }
}

/// Installs the subscriber of this process, and the export of spans if a collector is configured.
pub fn install(
    settings: &TelemetrySettings,
    name: LogName,
    sampling: Sampling,
) -> Result<TelemetryGuard, Error> {
    style::set_style(settings.log_format, name);
    let process = name.process;
    let (filter, handle) = reload::Layer::new(log_filter(settings)?);
    let lines = LogQueue::of_process()
        .map_err(|e| Error::internal(format!("cannot start the thread of the log: {e}")))?;
    let export = SpanExport::start(settings.otlp_endpoint.as_deref(), process, sampling)?;
    let spans = export.as_ref().map(|export| {
        tracing_opentelemetry::layer::<_>()
            .with_tracer(export.provider().tracer(process))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(FilterFn::new(is_traced).with_max_level_hint(LevelFilter::INFO))
    });
    tracing_subscriber::registry()
        .with(self::lines(settings.log_format, name, lines.clone()).with_filter(filter))
        .with(spans)
        .try_init()
        .map_err(|e| Error::internal(format!("logging was set up twice: {e}")))?;
    if let Some(export) = &export {
        trace::set_tracer(export.provider().tracer(process));
    }
    log_queue::log_panics();
    Ok(TelemetryGuard { export, filter: LogFilter(handle), lines })
}

/// Number of log lines of this process that were lost because the reader of stderr was too slow.
pub fn log_lines_lost() -> u64 {
    log_queue::lost()
}

/// The layer that writes log lines.
fn lines<W>(format: LogFormat, name: LogName, writer: W) -> Box<dyn Layer<Registry> + Send + Sync>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let layer = tracing_subscriber::fmt::layer().with_writer(writer);
    match format {
        LogFormat::Text => {
            layer.with_ansi(std::io::stderr().is_terminal()).event_format(TextLines::new(name)).boxed()
        }
        LogFormat::Json => {
            layer.fmt_fields(JsonFields::new()).with_ansi(false).event_format(JsonLines { name }).boxed()
        }
    }
}

/// True for spans and events that traces include whatever the log filter says. These are spans with the field
/// [`TRACE_ID`], and events inside such spans.
fn is_traced(metadata: &Metadata<'_>) -> bool {
    *metadata.level() <= tracing::Level::INFO
        && (metadata.is_event() || metadata.fields().field(TRACE_ID).is_some())
}
