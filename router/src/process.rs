//! The router as a process of its own: settings, ports, and an end that lets running streams finish.

use std::{ffi::OsString, io::Write, net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;
use serde::{Deserialize, Deserializer, Serialize};
use tokio::time::timeout;
use tutti_runtime::{
    Error, config, exit,
    health::{Health, State},
    listen,
    metrics::Metrics,
    operations, serve,
    shutdown::Shutdown,
    telemetry::{LogFormat, Telemetry},
};

use crate::{Conductors, FleetSettings, FrontDoor, RouterConfig, fleet::check_conductors};

/// How long connections may take to close once no request is left: a health watch would never.
const CLOSING: Duration = Duration::from_secs(3);

/// Serves the OpenAI HTTP and gRPC surfaces in front of conductors that run elsewhere.
///
/// Every setting can also stand in a file (--config) or in an environment variable (TUTTI_CONDUCTOR).
#[derive(Debug, Parser, Serialize)]
#[command(name = "router", version)]
struct Flags {
    /// Settings from this TOML or YAML file; environment variables and flags go over them
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    config: Option<PathBuf>,

    /// Print the settings in force as JSON and exit
    #[arg(long)]
    #[serde(skip)]
    print_config: bool,

    /// A conductor's gRPC address, such as http://10.0.0.1:50051; once for each conductor
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    conductor: Vec<String>,

    /// A name whose every address is a conductor's, looked up again and again
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

    /// Seconds that running requests have to finish after the first Ctrl-C or SIGTERM [default: 30]
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    drain_timeout: Option<u32>,

    /// How log lines look [default: text]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    log_format: Option<LogFormat>,

    /// Which log lines there are, as in info or tutti_router=debug [default: info]
    #[arg(long, value_name = "FILTER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<String>,

    /// OTLP/gRPC endpoint for spans
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    otlp_endpoint: Option<String>,
}

/// The flags about conductors; their other settings stand in the file's `fleet` table.
#[derive(Debug, clap::Args, Serialize)]
struct FleetFlags {
    /// How often a stream goes on at another conductor when its own is lost [default: 2]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_replays: Option<u32>,
}

/// The front door's flags; its other settings stand in the file's `router` table.
#[derive(Debug, clap::Args, Serialize)]
struct RouterFlags {
    /// Serve token ids only: the checkpoint's tokenizer and chat template are not read
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    skip_tokenizer_init: bool,
}

/// The process's settings.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Settings {
    /// One, or a list; a text may have several with commas between, as an environment variable must.
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

/// Runs the process until it is told to end; `arguments` are the command line, the program's name first.
///
/// # Errors
/// Of usage, before any port is bound; or what kept the process from serving.
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
        .block_on(run_until_told(settings))
}

async fn run_until_told(settings: Settings) -> Result<(), Error> {
    let Settings { log_format, log, otlp_endpoint, .. } = settings;
    let _telemetry = Telemetry { log_format, log, otlp_endpoint }.install("router")?;
    let shutdown = Shutdown::on_signals()?;
    let http = listen::tcp("http", settings.http).await?;
    let grpc = listen::tcp("grpc", settings.grpc).await?;
    tracing::info!(http = %settings.http, grpc = %settings.grpc, "listening");

    let (health, metrics) = (Health::default(), Metrics::default());
    let conductors = Conductors::new(&settings.conductor, settings.discover.as_deref(), &settings.fleet)?;
    let front_door = FrontDoor::before(conductors, settings.fleet, &settings.router, &metrics)?;
    let routes = front_door.http_routes().merge(operations::routes(health.clone(), metrics));
    let services = front_door.grpc_routes(&health)?;
    let following = tokio::spawn(front_door.clone().follow(health.clone()));

    let serving = async {
        tokio::try_join!(
            serve::http(http, routes, shutdown.clone()),
            serve::grpc(grpc, services, shutdown.clone()),
        )
    };
    let drained = async {
        shutdown.begun().await;
        // Readiness has one writer at a time: from here on it is the drain.
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
mod tests {
    use super::*;

    fn refused(arguments: &[&str]) -> Option<String> {
        let arguments = ["router"].iter().chain(arguments).map(OsString::from);
        run(arguments).unwrap_err().field().map(str::to_owned)
    }

    #[test]
    fn bad_usage_is_named_before_anything_binds() {
        assert_eq!(refused(&[]).as_deref(), Some("conductor"));
        assert_eq!(refused(&["--conductor", "10.0.0.1:1"]).as_deref(), Some("conductor"));
        assert_eq!(refused(&["--conductor", "http://x y"]).as_deref(), Some("conductor"));
        assert_eq!(
            refused(&["--conductor", "http://a:1", "--conductor", "b:1"]).as_deref(),
            Some("conductor")
        );
        assert_eq!(refused(&["--discover", "nowhere"]).as_deref(), Some("discover"));
        assert_eq!(refused(&["--config", "nowhere.toml"]).as_deref(), Some("config"));
    }
}
