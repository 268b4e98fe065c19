//! The stand-alone router process.

use std::ffi::OsString;

use tutti_runtime::{
    Error,
    announce::Prompt,
    command_line::processes::ROUTER,
    freed_memory,
    health::Health,
    process::{Background, Drain, Executable, Ports, Servers, Started},
    telemetry::Sampling,
    tls::ClusterTransport,
    token::Token,
};
use tutti_settings::RouterProcessSettings;

use crate::{
    Access, Conductors, FrontDoor, check_api_keys,
    fleet::{check_conductors, check_reach},
};

/// Runs the process until a signal ends it. `arguments` is the command line, with the program's name first.
///
/// # Errors
/// An error of usage or configuration, before any port is bound, or the error that keeps the process from serving.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> Result<(), Error> {
    let router = Executable {
        process: ROUTER,
        check: |settings: &RouterProcessSettings| Ok(settings.validate()?),
        validate,
        sampling: |_| Sampling::OfClients,
    };
    router.run(arguments, serve)
}

/// Refuses invalid settings, and settings without a valid conductor address.
fn validate(settings: &RouterProcessSettings) -> Result<(), Error> {
    settings.validate()?;
    check_conductors(&settings.conductors.conductor, settings.conductors.discover.as_deref())
}

async fn serve(process: Started<RouterProcessSettings>) -> Result<(), Error> {
    let RouterProcessSettings { conductors, addresses, tls, cluster_tls, router, fleet, .. } =
        &process.settings;
    check_api_keys(router)?;
    let (known, discover) = (&conductors.conductor, conductors.discover.as_deref());
    let transport = ClusterTransport::read(cluster_tls)?;
    check_reach(known, discover, &transport)?;
    let ports = Ports::bind(addresses, tls)?;
    tracing::info!(http = %addresses.http, grpc = %addresses.grpc, "listening");
    let token = conductors.cluster_token_file.as_deref();
    let token = token.map(|path| Token::read("cluster_token_file", path)).transpose()?;
    tokio::spawn(transport.clone().follow(process.metrics.reloads()));
    let conductors = Conductors::new(known, discover, Access { token, transport }, fleet)?;
    let front_door =
        FrontDoor::before(conductors, fleet.clone(), process.live.router.clone(), &process.metrics)?;
    front_door.warn_if_open(&ports.of_clients());
    let requests = front_door.clone();
    tokio::spawn(freed_memory::give_back(move || requests.is_idle()));
    let health = Health::default();
    tokio::spawn(front_door.clone().follow(health.clone()));
    tokio::spawn(ports.announcement(Some(Prompt::of(router))).when_ready(health.clone()));
    let servers = Servers::start(&process, ports, front_door.front(health)?)?;
    servers.run(&process.shutdown, RemoteConductors(front_door)).await
}

/// Conductors in other processes. They keep running when the router ends. Requests that are unfinished after the drain
/// end with the router.
struct RemoteConductors(FrontDoor);

impl Background for RemoteConductors {
    async fn drain(&mut self, Drain { patience, .. }: Drain) {
        if !self.0.is_idle() {
            tracing::warn!(after_s = patience.as_secs_f64(), "ending with requests unfinished");
        }
    }
}

#[cfg(test)]
mod tests;
