//! Logs to stderr, and spans to an OpenTelemetry collector where one is named.

use std::io::IsTerminal;

use clap::ValueEnum;
use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::WithExportConfig;
use opentelemetry_sdk::{Resource, trace::SdkTracerProvider};
use serde::{Deserialize, Serialize};
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

use crate::Error;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// What a process logs and where its spans go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Telemetry {
    /// How log lines look.
    pub log_format: LogFormat,
    /// Which log lines there are, in the syntax of tracing's `EnvFilter` (`info`, `tutti_worker=debug`).
    pub log: String,
    /// OTLP/gRPC endpoint for spans (`http://host:4317`); none are made without it.
    pub otlp_endpoint: Option<String>,
}

impl Default for Telemetry {
    fn default() -> Self {
        Self { log_format: LogFormat::Text, log: "info".into(), otlp_endpoint: None }
    }
}

/// Flushes what is still on its way when dropped at the process's end.
#[derive(Debug)]
pub struct TelemetryGuard {
    tracer: Option<SdkTracerProvider>,
}

impl Drop for TelemetryGuard {
    fn drop(&mut self) {
        if let Some(tracer) = self.tracer.take() {
            // Nobody is left to tell about spans that could not be sent.
            let _ = tracer.shutdown();
        }
    }
}

impl Telemetry {
    /// Installs the subscriber for this process. With an endpoint, must run inside a Tokio runtime.
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
