//! The stand-alone router process: settings, ports, and a shutdown that lets running streams finish.

use std::{ffi::OsString, io::Write, time::Duration};

use tokio::time::timeout;
use tutti_runtime::{
    Error,
    announce::{Announcement, Prompt},
    command_line::processes::ROUTER,
    config::{self, Layers, Loaded},
    descriptors,
    health::Health,
    listen,
    live::LiveSettings,
    metrics::Metrics,
    operations,
    reload::Reload,
    serve::{self, ConnectionMetrics, Purpose},
    shutdown::{Shutdown, outlive_hangups},
    telemetry::{self, Sampling},
    tls::{ClusterTransport, PublicTls},
    token::Token,
};
use tutti_settings::RouterProcessSettings;

use crate::{
    Access, Conductors, FrontDoor, check_api_keys,
    fleet::{check_conductors, check_reach},
};

/// Time for which the process waits, after the last request, for connections to close. The wait is bounded because a
/// client's health watch never closes by itself.
const CLOSING: Duration = Duration::from_secs(3);

/// Runs the process until a signal ends it. `arguments` is the command line, with the program's name first.
///
/// # Errors
/// An error of usage or configuration, before any port is bound, or the error that keeps the process from serving.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> Result<(), Error> {
    outlive_hangups()?;
    let Loaded { settings, print, layers } = config::load::<RouterProcessSettings>(ROUTER, arguments)?;
    settings.validate()?;
    if print {
        return writeln!(std::io::stdout(), "{}", config::print(&settings)?)
            .map_err(|e| Error::internal(format!("cannot print: {e}")));
    }
    validate(&settings)?;
    check_api_keys(&settings.router)?;
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|e| Error::internal(format!("cannot start the async runtime: {e}")))?
        .block_on(run_until_shutdown(settings, layers))
}

/// Refuses settings under which nothing could be served.
fn validate(settings: &RouterProcessSettings) -> Result<(), Error> {
    settings.validate()?;
    check_conductors(&settings.conductors.conductor, settings.conductors.discover.as_deref())
}

async fn run_until_shutdown(settings: RouterProcessSettings, layers: Layers) -> Result<(), Error> {
    let metrics = Metrics::default();
    let identity = metrics.identify(ROUTER.name, &settings)?;
    let installed = telemetry::install(&settings.telemetry, ROUTER.name, Sampling::OfClients)?;
    let live = LiveSettings::of(&settings);
    let reload = Reload {
        settings: settings.clone(),
        layers,
        validate,
        live: live.clone(),
        log: installed.log_filter(),
        metrics: identity,
    };
    reload.start()?;
    let RouterProcessSettings { conductors, addresses, tls, cluster_tls, router, fleet, .. } = settings;
    descriptors::raise_limit();
    let shutdown = Shutdown::on_signals()?;
    let tls = PublicTls::read(&tls)?;
    let transport = ClusterTransport::read(&cluster_tls)?;
    check_reach(&conductors.conductor, conductors.discover.as_deref(), &transport)?;
    let http = listen::tcp("http", addresses.http)?;
    let grpc = listen::tcp("grpc", addresses.grpc)?;
    let probes = addresses.operations.map(|address| listen::tcp("operations", address)).transpose()?;
    tracing::info!(http = %addresses.http, grpc = %addresses.grpc, "listening");
    let announcement = Announcement {
        http: http.local_addr().unwrap_or(addresses.http),
        grpc: grpc.local_addr().unwrap_or(addresses.grpc),
        prompt: Some(if router.skip_tokenizer_init { Prompt::TokenIds } else { Prompt::Text }),
        is_encrypted: tls.is_some(),
    };
    let health = Health::default();
    metrics.follow_readiness(health.clone());
    let (http, grpc) = serve::encrypted(http, grpc, tls);
    let counts = metrics.register(ConnectionMetrics::register);
    let (http, grpc) = (http.counted(&counts, Purpose::Http), grpc.counted(&counts, Purpose::Grpc));
    let token = conductors.cluster_token_file.as_deref();
    let token = token.map(|path| Token::read("cluster_token_file", path)).transpose()?;
    tokio::spawn(transport.clone().follow());
    let access = Access { token, transport };
    let conductors = Conductors::new(&conductors.conductor, conductors.discover.as_deref(), access, &fleet)?;
    let front_door = FrontDoor::before(conductors, fleet, live.router, &metrics)?;
    front_door.warn_if_open(&[addresses.http, addresses.grpc]);
    let operations = operations::routes(health.clone(), metrics);
    let routes = front_door.http_routes().merge(operations.clone());
    let routes = operations::moving_clients(routes, health.clone());
    let services = front_door.grpc_routes(&health)?;
    tokio::spawn(front_door.clone().follow(health.clone()));
    tokio::spawn(announcement.when_ready(health.clone()));

    let closing = Shutdown::default();
    let connections = live.connections;
    let probes = probes.map(|listener| serve::Listener::from(listener).counted(&counts, Purpose::Operations));
    let serving = async {
        tokio::try_join!(
            serve::optional_http(probes, operations, connections.clone(), closing.clone()),
            serve::http(http, routes, connections.clone(), closing.clone()),
            serve::grpc(grpc, services, serve::Windows::default(), connections, closing.clone()),
        )
    };
    let drained = async {
        shutdown.begun().await;
        health.drain();
        let lame_duck = live.drain.get().lame_duck(&addresses);
        tokio::time::sleep(lame_duck).await;
        // A lame-duck time says that clients come from elsewhere and must lose no request.
        if lame_duck.is_zero() {
            closing.begin()
        } else {
            closing.begin_gently()
        }
        let patience = live.drain.get().drain_timeout();
        if timeout(patience, at_rest(&front_door)).await.is_err() && !front_door.is_idle() {
            tracing::warn!(after = ?patience, "ending with requests unfinished");
        }
    };
    tokio::select! {
        served = serving => served.map(drop),
        () = drained => Ok(()),
    }
}

/// Completes once no generation has been running for [`CLOSING`]. Requests are served meanwhile: a client whose stream ends
/// may send its next request over the same connection, and learns only from that answer to use another one.
async fn at_rest(front_door: &FrontDoor) {
    const CHECK: Duration = Duration::from_millis(100);
    let mut rest = Duration::ZERO;
    while rest < CLOSING {
        tokio::time::sleep(CHECK).await;
        rest = if front_door.is_idle() { rest + CHECK } else { Duration::ZERO };
    }
}

#[cfg(test)]
mod tests;
