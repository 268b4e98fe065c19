//! The stand-alone router process: settings, ports, and a shutdown that lets running streams finish.

use std::{ffi::OsString, io::Write, net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;
use serde::{Deserialize, Deserializer, Serialize};
use tokio::time::timeout;
use tutti_runtime::{
    Error,
    announce::{Announcement, Prompt},
    config, exit,
    health::{Health, State},
    listen,
    metrics::Metrics,
    operations, serve,
    shutdown::Shutdown,
    telemetry::{LogFormat, Telemetry},
};

use crate::{Conductors, FleetSettings, FrontDoor, RouterConfig, fleet::check_conductors};

/// Time that connections have to close after the last request. A client's health watch never closes by itself.
const CLOSING: Duration = Duration::from_secs(3);

/// Serves the OpenAI HTTP and gRPC APIs for conductors that run elsewhere.
///
/// Every setting can also be given in a file (--config) or in an environment variable (TUTTI_CONDUCTOR).
#[derive(Debug, Parser, Serialize)]
#[command(name = "router", version)]
struct Flags {
    /// Read settings from this TOML or YAML file; environment variables and flags override it
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    config: Option<PathBuf>,

    /// Print the settings in force as JSON and exit
    #[arg(long)]
    #[serde(skip)]
    print_config: bool,

    /// A conductor's gRPC address, such as http://10.0.0.1:50051; repeat the flag for each conductor
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    conductor: Vec<String>,

    /// A DNS name whose addresses are all conductors; it is looked up periodically
    #[arg(long, value_name = "HOST:PORT")]
    #[serde(skip_serializing_if = "Option::is_none")]
    discover: Option<String>,

    /// Address of the OpenAI API, health and metrics [default: 127.0.0.1:8000]
    #[arg(long, value_name = "ADDR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    http: Option<SocketAddr>,

    /// Address of the gRPC API [default: 127.0.0.1:50051]
    #[arg(long, value_name = "ADDR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    grpc: Option<SocketAddr>,

    #[command(flatten)]
    fleet: FleetFlags,

    #[command(flatten)]
    router: RouterFlags,

    /// Seconds that running requests get to finish after the first Ctrl-C or SIGTERM [default: 30]
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    drain_timeout: Option<u32>,

    /// Format of log lines [default: text]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    log_format: Option<LogFormat>,

    /// Log filter, such as info or tutti_router=debug [default: info]
    #[arg(long, value_name = "FILTER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<String>,

    /// OTLP/gRPC endpoint that receives trace spans
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    otlp_endpoint: Option<String>,
}

/// Flags about conductors. The file's `fleet` table has further settings.
#[derive(Debug, clap::Args, Serialize)]
struct FleetFlags {
    /// Times that a stream may continue on another conductor after its own is lost [default: 2]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_replays: Option<u32>,
}

/// Flags about the front door. The file's `router` table has further settings.
#[derive(Debug, clap::Args, Serialize)]
struct RouterFlags {
    /// Serve token ids only; do not read the checkpoint's tokenizer and chat template
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    skip_tokenizer_init: bool,
}

/// Settings of the process.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    /// URLs of the conductors. A single string may hold several URLs with commas between them, as an environment
    /// variable must.
    #[serde(deserialize_with = "urls")]
    conductor: Vec<String>,
    discover: Option<String>,
    fleet: FleetSettings,
    http: SocketAddr,
    grpc: SocketAddr,
    router: RouterConfig,
    drain_timeout: u32,
    log_format: LogFormat,
    log: String,
    otlp_endpoint: Option<String>,
}

impl Default for Settings {
    fn default() -> Self {
        let Telemetry { log_format, log, otlp_endpoint } = Telemetry::default();
        Self {
            conductor: Vec::new(),
            discover: None,
            fleet: FleetSettings::default(),
            http: SocketAddr::from(([127, 0, 0, 1], 8000)),
            grpc: SocketAddr::from(([127, 0, 0, 1], 50051)),
            router: RouterConfig::default(),
            drain_timeout: 30,
            log_format,
            log,
            otlp_endpoint,
        }
    }
}

fn urls<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Urls {
        Text(String),
        List(Vec<String>),
    }
    Ok(match Urls::deserialize(deserializer)? {
        Urls::Text(text) => text.split(',').map(|url| url.trim().to_owned()).collect(),
        Urls::List(list) => list,
    })
}

/// Runs the process until a signal ends it. `arguments` is the command line, with the program's name first.
///
/// # Errors
/// An error of usage or configuration, before any port is bound, or the error that keeps the process from serving.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> Result<(), Error> {
    let flags: Flags = exit::flags(arguments);
    let settings: Settings = config::layered(flags.config.as_deref(), &flags)?;
    settings.router.validate()?;
    settings.fleet.validate()?;
    if flags.print_config {
        return writeln!(std::io::stdout(), "{}", config::print(&settings)?)
            .map_err(|e| Error::internal(format!("cannot print: {e}")));
    }
    check_conductors(&settings.conductor, settings.discover.as_deref())?;
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::internal(format!("cannot start the async runtime: {e}")))?
        .block_on(run_until_shutdown(settings))
}

async fn run_until_shutdown(settings: Settings) -> Result<(), Error> {
    let Settings { log_format, log, otlp_endpoint, .. } = settings;
    let _telemetry = Telemetry { log_format, log, otlp_endpoint }.install("router")?;
    let shutdown = Shutdown::on_signals()?;
    let http = listen::tcp("http", settings.http).await?;
    let grpc = listen::tcp("grpc", settings.grpc).await?;
    tracing::info!(http = %settings.http, grpc = %settings.grpc, "listening");
    let announcement = Announcement {
        http: http.local_addr().unwrap_or(settings.http),
        grpc: grpc.local_addr().unwrap_or(settings.grpc),
        prompt: Some(if settings.router.skip_tokenizer_init { Prompt::TokenIds } else { Prompt::Text }),
    };

    let (health, metrics) = (Health::default(), Metrics::default());
    let conductors = Conductors::new(&settings.conductor, settings.discover.as_deref(), &settings.fleet)?;
    let front_door = FrontDoor::before(conductors, settings.fleet, &settings.router, &metrics)?;
    let routes = front_door.http_routes().merge(operations::routes(health.clone(), metrics));
    let services = front_door.grpc_routes(&health)?;
    let following = tokio::spawn(front_door.clone().follow(health.clone()));
    tokio::spawn(announcement.when_ready(health.clone()));

    let serving = async {
        tokio::try_join!(
            serve::http(http, routes, shutdown.clone()),
            serve::grpc(grpc, services, shutdown.clone()),
        )
    };
    let drained = async {
        shutdown.begun().await;
        // Readiness has one writer at a time. From here on the drain writes it.
        following.abort();
        health.set_ready(State::Not("draining".into()));
        let patience = Duration::from_secs(settings.drain_timeout.into());
        if timeout(patience, front_door.idle()).await.is_err() {
            tracing::warn!(seconds = settings.drain_timeout, "ending with requests unfinished");
        } else {
            tokio::time::sleep(CLOSING).await;
        }
    };
    tokio::select! {
        served = serving => served.map(drop),
        () = drained => Ok(()),
    }
}

#[cfg(test)]
mod tests;
