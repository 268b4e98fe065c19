//! The export of spans over OTLP/gRPC in batches, on separate threads.

mod reported;

use std::{env, time::Duration};

use http::Uri;
use opentelemetry::KeyValue;
use opentelemetry_otlp::{
    OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_PROTOCOL, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, WithExportConfig,
};
use opentelemetry_sdk::{
    Resource,
    trace::{Sampler, SdkTracerProvider},
};
use tokio::runtime::{self, Runtime};

use self::reported::Reported;
use crate::{Error, VERSION};

/// Variable of the OpenTelemetry specification that names the exporter of spans.
const OTEL_TRACES_EXPORTER: &str = "OTEL_TRACES_EXPORTER";
/// Variable of the OpenTelemetry specification that turns all telemetry off.
const OTEL_SDK_DISABLED: &str = "OTEL_SDK_DISABLED";
const OTEL_SERVICE_NAME: &str = "OTEL_SERVICE_NAME";
const OTEL_TRACES_SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const OTEL_TRACES_SAMPLER_ARG: &str = "OTEL_TRACES_SAMPLER_ARG";
/// The samplers of the specification that need no further service.
const SAMPLERS: [&str; 6] = [
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
];

/// The requests for which a process records spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sampling {
    /// The process takes requests from clients. The sampler of `OTEL_TRACES_SAMPLER` chooses among them.
    OfClients,
    /// The process begins spans only for messages that carry the context of a sampled span, and records all of them.
    OfSampled,
}

/// The exporter, and the threads on which it runs.
#[derive(Debug)]
pub(crate) struct SpanExport {
    provider: SdkTracerProvider,
    /// The connection to the collector runs on a separate thread, so that it takes no time from the process's tasks and
    /// works until after these have ended.
    runtime: Runtime,
}

impl SpanExport {
    /// Starts the export. Returns `None` if no collector is configured, neither by `endpoint` (the setting
    /// `otlp_endpoint`) nor by OpenTelemetry's variables. The first batch of spans opens the connection.
    pub fn start(
        endpoint: Option<&str>,
        process: &'static str,
        sampling: Sampling,
    ) -> Result<Option<Self>, Error> {
        let Some(collector) = Collector::configured(endpoint)? else { return Ok(None) };
        if variable(OTEL_SDK_DISABLED).is_some_and(|value| value.eq_ignore_ascii_case("true")) {
            return Ok(None);
        }
        match variable(OTEL_TRACES_EXPORTER).as_deref() {
            None | Some("otlp") => {}
            Some("none") => return Ok(None),
            Some(other) => {
                let message = format!("is {other:?}, but must be \"otlp\" or \"none\"");
                return Err(Error::invalid(OTEL_TRACES_EXPORTER, message));
            }
        }
        check_protocol()?;
        check_sampler()?;
        let broken = |e: std::io::Error| Error::internal(format!("cannot start the thread of spans: {e}"));
        let mut builder = runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).thread_name("spans").enable_all().build().map_err(broken)?;
        let exporter = {
            let _inside = runtime.enter();
            let builder =
                opentelemetry_otlp::SpanExporter::builder().with_tonic().with_endpoint(&collector.url);
            builder.build().map_err(|e| Error::invalid(collector.field, e.to_string()))?
        };
        let exporter = Reported::new(exporter, collector.url);
        let mut resource = Resource::builder()
            .with_attribute(KeyValue::new("service.version", VERSION))
            .with_attribute(KeyValue::new("process.pid", i64::from(std::process::id())));
        if variable(OTEL_SERVICE_NAME).is_none() {
            resource = resource.with_service_name(format!("tutti-{process}"));
        }
        let mut provider =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource.build());
        if sampling == Sampling::OfSampled {
            provider = provider.with_sampler(Sampler::AlwaysOn);
        }
        Ok(Some(Self { provider: provider.build(), runtime }))
    }

    pub fn provider(&self) -> &SdkTracerProvider {
        &self.provider
    }

    /// Sends the remaining spans, for at most `limit`, and ends the threads.
    pub fn shut_down(self, limit: Duration) {
        // The process is ending, so an error here cannot be reported.
        let _ = self.provider.shutdown_with_timeout(limit);
        self.runtime.shutdown_background();
    }
}

/// The collector that is configured.
struct Collector {
    /// Setting or variable with the URL.
    field: &'static str,
    url: String,
}

impl Collector {
    /// Reads the setting, or else the variables. The variable for traces overrides the general one.
    ///
    /// # Errors
    /// The value is not the URL of a collector.
    fn configured(setting: Option<&str>) -> Result<Option<Self>, Error> {
        let of_variable = |field| variable(field).map(|url| Self { field, url });
        let collector = match setting {
            Some(url) => Some(Self { field: "otlp_endpoint", url: url.to_owned() }),
            None => of_variable(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)
                .or_else(|| of_variable(OTEL_EXPORTER_OTLP_ENDPOINT)),
        };
        collector.iter().try_for_each(Self::check)?;
        Ok(collector)
    }

    fn check(&self) -> Result<(), Error> {
        let refused = |why| {
            let message = format!(
                "{:?} {why}: give http://HOST:PORT of a collector that takes OTLP over gRPC",
                self.url
            );
            Err(Error::invalid(self.field, message))
        };
        match self.url.parse::<Uri>() {
            Ok(url) if url.host().is_none_or(str::is_empty) => refused("has no host"),
            Ok(url) => match url.scheme_str() {
                Some("http") => Ok(()),
                Some("https") => refused("asks for TLS, and spans are sent without"),
                Some(_) => refused("has another scheme"),
                None => refused("has no scheme"),
            },
            Err(_) => refused("is no URL"),
        }
    }
}

/// The value of a variable. As in the specification, an empty variable counts as unset.
fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn check_protocol() -> Result<(), Error> {
    for name in [OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_PROTOCOL] {
        // The variable for traces overrides the general variable.
        match variable(name) {
            None => {}
            Some(protocol) if protocol == "grpc" => return Ok(()),
            Some(protocol) => {
                return Err(Error::invalid(name, format!("is {protocol:?}, but spans are sent by \"grpc\"")));
            }
        }
    }
    Ok(())
}

/// Refuses an unknown sampler. The library would only warn of a misspelt name, and sample all requests.
fn check_sampler() -> Result<(), Error> {
    let Some(sampler) = variable(OTEL_TRACES_SAMPLER) else { return Ok(()) };
    if !SAMPLERS.contains(&sampler.as_str()) {
        let known = SAMPLERS.join(", ");
        return Err(Error::invalid(
            OTEL_TRACES_SAMPLER,
            format!("is {sampler:?}, but must be one of {known}"),
        ));
    }
    if !sampler.ends_with("traceidratio") {
        return Ok(());
    }
    let ratio = variable(OTEL_TRACES_SAMPLER_ARG).unwrap_or_default();
    if ratio.parse().is_ok_and(|ratio: f64| (0.0..=1.0).contains(&ratio)) {
        return Ok(());
    }
    let message = format!("is {ratio:?}, but {sampler} needs a number from 0 to 1");
    Err(Error::invalid(OTEL_TRACES_SAMPLER_ARG, message))
}

#[cfg(test)]
mod tests;
