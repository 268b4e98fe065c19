//! The conductor with its workers and, unless `no_router` is set, an embedded router.
//!
//! Started under the name `worker`, the same executable runs as one of the workers, so a cluster needs only this one
//! file. `conductor kernels` compiles GPU kernels, and `conductor quantize` writes a quantised checkpoint. `conductor
//! status`, `drain` and `trace` call a running conductor. These commands serve nothing.

// A test counts the blocks of glibc's allocator (tests/cluster/lib/live_heap.c).
#[cfg(all(feature = "jemalloc", not(feature = "media-test-model")))]
#[path = "../runtime/executable/allocator.rs"]
mod allocator;
#[path = "bin/backend.rs"]
mod backend;
#[path = "bin/front.rs"]
mod front;

use std::{ffi::OsStr, path::Path, process::ExitCode, sync::Arc};

use tutti_conductor::{
    Backend,
    commands::Command,
    config,
    listen::{Callers, ClusterListener},
    running::Note,
    service::{ConductorService, cluster_routes},
    state_directory::StateDirectory,
};
use tutti_runtime::{
    Error,
    announce::Prompt,
    command_line::processes::{CONDUCTOR, WORKER},
    exit, freed_memory,
    health::Health,
    process::{Background, Executable, Ports, Servers, Started},
    progress::LoadDisplay,
    telemetry::Sampling,
    tls::ClusterTransport,
};
use tutti_settings::{ConductorSettings, MembershipSettings};
use tutti_worker::{isa, kernels, quantize};

/// Maximum number of requests in progress on one router's connection. The limit is high because routers have shown a
/// token and limit their own requests.
const ROUTER_STREAMS: u32 = 1 << 16;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().peekable();
    let command = std::env::args_os().nth(1);
    let command = command.as_deref().and_then(OsStr::to_str);
    if command == Some("kernels") {
        return kernels::compile(std::iter::once(kernels::NAME.into()).chain(arguments.skip(2)));
    }
    if command == Some("quantize") {
        return quantize::quantise(std::iter::once(quantize::NAME.into()).chain(arguments.skip(2)));
    }
    if let Some(command) = command.and_then(Command::named) {
        return command.run(arguments.skip(2));
    }
    let name = arguments.peek().and_then(|name| Path::new(name).file_name());
    if name == Some(OsStr::new(WORKER.name)) {
        return tutti_worker::spawned(arguments);
    }
    let (check, validate) = (config::validate, config::validate);
    let conductor = Executable { process: CONDUCTOR, check, validate, sampling };
    exit::run(CONDUCTOR.name, || conductor.run(arguments, serve))
}

/// With an embedded router, the conductor takes clients' requests. Without an embedded router, its requests come from
/// other routers.
fn sampling(settings: &ConductorSettings) -> Sampling {
    if settings.membership.no_router { Sampling::OfSampled } else { Sampling::OfClients }
}

async fn serve(process: Started<ConductorSettings>) -> Result<(), Error> {
    let settings = &process.settings;
    let layout = config::layout(settings)?;
    // Spawned workers run on this machine, so an instruction path that this machine lacks is refused at once. A worker
    // that joins by hand may run on another machine, and checks the instruction path itself.
    if layout.topology.spawned_workers() > 0 {
        isa::resolve(settings.device.cpu_isa)?;
    }
    if !settings.membership.no_router {
        tutti_router::check_api_keys(&settings.router)?;
    }
    let state = settings.membership.state_directory.as_deref().map(StateDirectory::open).transpose()?;
    let state = state.map(Arc::new);
    let (source, display) = (backend::source(settings)?, LoadDisplay::default());
    // A checkpoint on this machine is read before a port is bound. A download waits for the ports, so that a port in
    // use is reported at once.
    let local = match source.is_local() {
        true => Some(backend::find(&source, settings, &layout, &display, state.as_ref()).await?),
        false => None,
    };
    let ports = Ports::bind(&settings.addresses, &settings.tls)?;
    let transport = ClusterTransport::read(&settings.cluster_tls)?;
    tokio::spawn(transport.clone().follow(process.metrics.reloads()));
    let MembershipSettings { worker_listen, cluster_grpc, no_router, .. } = &settings.membership;
    let state_home = state.as_deref();
    let workers =
        ClusterListener::bind(Callers::Workers, worker_listen.as_ref(), state_home, &transport).await?;
    let routers =
        ClusterListener::bind(Callers::Routers, cluster_grpc.as_ref(), state_home, &transport).await?;
    let cluster_token = config::cluster_token(settings)?;
    let found = async {
        let found = match local {
            Some(found) => found,
            None => backend::find(&source, settings, &layout, &display, state.as_ref()).await?,
        };
        match &state {
            Some(state) => backend::take_over(found, settings, &layout, state).await,
            None => Ok(found),
        }
    };
    let found = tokio::select! {
        found = found => found?,
        () = process.shutdown.begun() => return Ok(()),
    };

    let health = Health::default();
    let checkpoint = found.checkpoint.clone();
    let options = backend::options(&process, &layout, found, workers, display)?;
    // Reading the tokenizer and loading the model both take time, so they run at the same time.
    let text = front::read_text(settings, &checkpoint);
    let model = options.served.names.join(", ");
    process.metrics.serve_model(options.served.names.first().map_or("", String::as_str));
    tracing::info!(%model, workers = layout.topology.spawned_workers(), "the workers load the model");
    let mut backend = Backend::start(options, &process.metrics, health.clone())?;
    let cluster = backend.cluster().clone();
    tokio::spawn(freed_memory::give_back(move || cluster.is_idle()));
    let text = tokio::select! {
        text = text => text,
        error = backend.failed() => return Err(error),
        () = process.shutdown.begun() => return backend::end(backend).await,
    };
    let text = match text {
        Ok(text) => text,
        Err(error) => {
            backend::end(backend).await?;
            return Err(error);
        }
    };
    let conductor =
        ConductorService::new(backend.cluster().clone(), checkpoint, process.shutdown.clone()).into_server();
    let cluster_routes = cluster_routes(conductor.clone(), cluster_token, health.clone());
    let front = match text {
        None => front::bare(health),
        Some(text) => front::with_router(conductor, text, health, &process, &ports)?,
    };
    let [http, grpc] = ports.of_clients();
    tracing::info!(%http, %grpc, cluster = routers.local_url()?, "listening");
    let prompt = (!no_router).then(|| Prompt::of(&settings.router));
    let cluster = routers.local_url()?;
    let token_file = settings.membership.cluster_token_file.as_deref();
    // Commands find this process by the note, which is there before anyone hears that it is ready. Without it they need
    // --conductor, so a failure to leave it is no error.
    let note = Note {
        cluster,
        cluster_token_file: config::absolute("cluster_token_file", token_file)?,
        model,
        pid: std::process::id(),
    };
    let _note = note.leave().inspect_err(|error| tracing::warn!(%error, "commands need --conductor")).ok();
    tokio::spawn(ports.announcement(prompt).when_ready(front.health.clone()));
    let mut servers = Servers::start(&process, ports, front)?;
    let (routers, _routers_directory) = routers.into_parts();
    servers.serve_cluster(routers, cluster_routes, ROUTER_STREAMS);
    servers.run(&process.shutdown, backend).await
}
