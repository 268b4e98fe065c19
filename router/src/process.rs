//! The router as a process of its own: settings, ports, and an end that lets running streams finish.

use std::{ffi::OsString, io::Write, time::Duration};

use tokio::time::timeout;
use tutti_runtime::{
    Error,
    command_line::Process,
    config::{self, Loaded},
    health::{Health, State},
    listen,
    metrics::Metrics,
    operations, serve,
    shutdown::Shutdown,
    telemetry,
};
use tutti_settings::RouterProcessSettings;

use crate::{Conductors, FrontDoor, fleet::check_conductors};

/// How long connections may take to close once no request is left: a health watch would never.
const CLOSING: Duration = Duration::from_secs(3);

/// The router, as `--help` describes it.
const PROCESS: Process = Process {
    name: "router",
    about: "Serves the OpenAI HTTP API and the gRPC API in front of conductors that run elsewhere.",
    example: ("conductor", "http://10.0.0.1:50051"),
    prints_config: true,
};

/// Runs the process until it is told to end; `arguments` are the command line, the program's name first.
///
/// # Errors
/// Of usage, before any port is bound; or what kept the process from serving.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> Result<(), Error> {
    let Loaded { settings, print } = config::load::<RouterProcessSettings>(PROCESS, arguments)?;
    settings.validate()?;
    if print {
        return writeln!(std::io::stdout(), "{}", config::print(&settings)?)
            .map_err(|e| Error::internal(format!("cannot print: {e}")));
    }
    check_conductors(&settings.conductors.conductor, settings.conductors.discover.as_deref())?;
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::internal(format!("cannot start the async runtime: {e}")))?
        .block_on(run_until_told(settings))
}

async fn run_until_told(settings: RouterProcessSettings) -> Result<(), Error> {
    let RouterProcessSettings { conductors, addresses, drain, telemetry, router, fleet } = settings;
    let _telemetry = telemetry::install(&telemetry, PROCESS.name)?;
    let shutdown = Shutdown::on_signals()?;
    let http = listen::tcp("http", addresses.http).await?;
    let grpc = listen::tcp("grpc", addresses.grpc).await?;
    tracing::info!(http = %addresses.http, grpc = %addresses.grpc, "listening");

    let (health, metrics) = (Health::default(), Metrics::default());
    let conductors = Conductors::new(&conductors.conductor, conductors.discover.as_deref(), &fleet)?;
    let front_door = FrontDoor::before(conductors, fleet, &router, &metrics)?;
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
        let patience = drain.drain_timeout();
        if timeout(patience, front_door.idle()).await.is_err() {
            tracing::warn!(seconds = drain.drain_timeout, "ending with requests unfinished");
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
