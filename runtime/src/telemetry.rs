//! Logs to stderr, and traces to an OpenTelemetry collector if one is configured.

use std::io::IsTerminal;

use clap::ValueEnum;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::{Resource, trace::SdkTracerProvider};
use serde::{Deserialize, Serialize};
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

use crate::Error;

/// The format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For human readers.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// The settings of a process's logs and traces.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Telemetry {
    /// Format of log lines.
    pub log_format: LogFormat,
    /// Filter of log lines, in the syntax of tracing's `EnvFilter` (`info`, `tutti_worker=debug`).
    pub log: String,
    /// OTLP/gRPC endpoint for traces (`http://host:4317`). Without it there are none.
    pub otlp_endpoint: Option<String>,
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { log_format: LogFormat::Text, log: "info".into(), otlp_endpoint: None }
    }
}

/// A guard that sends the remaining traces when it is dropped at the end of the process.
#[derive(Debug)]
pub struct TelemetryGuard {
    tracer: Option<SdkTracerProvider>,
}

impl Drop for TelemetryGuard {
    fn drop(&mut self) {
        if let Some(tracer) = self.tracer.take() {
            // An error here cannot be reported: the process ends.
            let _ = tracer.shutdown();
        }
    }
}

impl Telemetry {
    /// Installs the subscriber for this process. With an endpoint, it must be called inside a Tokio runtime.
    pub fn install(&self, process: &'static str) -> Result<TelemetryGuard, Error> {
        let filter = EnvFilter::try_new(&self.log)
            .map_err(|e| Error::invalid("log", format!("{:?}: {e}", self.log)))?;
        let stderr = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
        let lines = match self.log_format {
            LogFormat::Text => stderr.with_ansi(std::io::stderr().is_terminal()).with_target(false).boxed(),
            LogFormat::Json => stderr.json().flatten_event(true).boxed(),
        };
        let tracer = self.otlp_endpoint.as_deref().map(|endpoint| otlp(process, endpoint)).transpose()?;
        let spans = tracer.as_ref().map(|t| tracing_opentelemetry::layer().with_tracer(t.tracer(process)));
        tracing_subscriber::registry()
            .with(lines.and_then(spans).with_filter(filter))
            .try_init()
            .map_err(|e| Error::internal(format!("logging was set up twice: {e}")))?;
        Ok(TelemetryGuard { tracer })
    }
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
