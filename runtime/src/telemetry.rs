//! Logs to stderr, and traces to an OpenTelemetry collector if one is configured.

use std::io::IsTerminal;

use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::{Resource, trace::SdkTracerProvider};
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};
use tutti_settings::{LogFormat, TelemetrySettings};

use crate::Error;

/// A guard that sends the remaining traces when it is dropped at the end of the process.
#[derive(Debug)]
pub struct TelemetryGuard {
    tracer: Option<SdkTracerProvider>,
}

impl Drop for TelemetryGuard {
    fn drop(&mut self) {
        if let Some(tracer) = self.tracer.take() {
            // The process is ending, so an error here cannot be reported.
            let _ = tracer.shutdown();
        }
    }
}

/// Installs the subscriber of this process. If `otlp_endpoint` is set, this function must be called inside a Tokio
/// runtime.
pub fn install(settings: &TelemetrySettings, process: &'static str) -> Result<TelemetryGuard, Error> {
    let filter = EnvFilter::try_new(&settings.log)
        .map_err(|e| Error::invalid("log", format!("{:?}: {e}", settings.log)))?;
    let stderr = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = match settings.log_format {
        LogFormat::Text => stderr.with_ansi(std::io::stderr().is_terminal()).with_target(false).boxed(),
        LogFormat::Json => stderr.json().flatten_event(true).boxed(),
    };
    let tracer = settings.otlp_endpoint.as_deref().map(|endpoint| otlp(process, endpoint)).transpose()?;
    let traces = tracer.as_ref().map(|t| tracing_opentelemetry::layer().with_tracer(t.tracer(process)));
    tracing_subscriber::registry()
        .with(lines.and_then(traces).with_filter(filter))
        .try_init()
        .map_err(|e| Error::internal(format!("logging was set up twice: {e}")))?;
    Ok(TelemetryGuard { tracer })
}

fn otlp(process: &'static str, endpoint: &str) -> Result<SdkTracerProvider, Error> {
    let exporter = opentelemetry_otlp::SpanExporter::builder()
        .with_tonic()
        .with_endpoint(endpoint)
        .build()
        .map_err(|e| Error::invalid("otlp_endpoint", format!("{endpoint:?}: {e}")))?;
    let resource = Resource::builder().with_service_name(format!("tutti-{process}")).build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
}
