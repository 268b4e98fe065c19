//! The conductor with its workers and, unless `no_router` is set, a router in front.
//!
//! Started under the name `worker`, the same executable runs as one of the workers, so a cluster needs only this one
//! file. `conductor kernels` compiles the kernels of GPUs, and `conductor status`, `drain` and `trace` call a running
//! conductor; they serve nothing.

use std::{
    ffi::OsStr,
    io::Write,
    path::{Path, PathBuf},
    process::{self, ExitCode},
    sync::Arc,
    time::Duration,
};

use tokio::{
    net::TcpListener,
    task::JoinSet,
    time::{Instant, sleep, timeout, timeout_at},
};
use tonic::service::Routes;
use tutti_conductor::{
    Backend, BackendOptions,
    cluster::{Limits, Served},
    commands::Command,
    config::{self, Layout},
    listen::{Callers, ClusterListener},
    random_token,
    service::{ConductorServer, ConductorService, cluster_routes},
};
use tutti_router::{CheckedText, FrontDoor};
use tutti_runtime::{
    Error,
    announce::{Announcement, Prompt},
    checkpoint::{self, Checkpoint, HubOptions, ModelSource, Wanted},
    config::{Layers, Loaded, print as print_settings},
    descriptors, exit, grpc_health,
    health::Health,
    listen,
    live::{Live, LiveSettings},
    metrics::Metrics,
    operations,
    progress::LoadDisplay,
    reload::Reload,
    serve::{self, ConnectionLimits, ConnectionMetrics, Purpose},
    shutdown::{Shutdown, outlive_hangups},
    telemetry::{self, Sampling},
    tls::{ClusterTransport, PublicTls},
    token::Token,
};
use tutti_settings::{
    AddressSettings, ConductorSettings, ConnectionSettings, DeviceChoice, LoadFormat, MembershipSettings,
    RouterSettings,
};
use tutti_worker::{isa, kernels, lifeline::Lifeline};

const NAME: &str = "conductor";
/// Path of the executable of this process, even if the file has been replaced since the start. Workers run it, because
/// they must be of the same build as the conductor.
const WORKER_PROGRAM: &str = "/proc/self/exe";
/// Requests in progress on one router's connection. Calls have shown a token, and a router bounds its requests.
const ROUTER_STREAMS: u32 = 1 << 16;
/// Maximum time for connections to close once no request is left.
const CLOSING: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().peekable();
    let command = std::env::args_os().nth(1);
    let command = command.as_deref().and_then(OsStr::to_str);
    if command == Some("kernels") {
        return kernels::compile(std::iter::once(kernels::NAME.into()).chain(arguments.skip(2)));
    }
    if let Some(command) = command.and_then(Command::named) {
        return command.run(arguments.skip(2));
    }
    let name = arguments.peek().and_then(|name| Path::new(name).file_name());
    if name == Some(OsStr::new("worker")) {
        return tutti_worker::spawned(arguments);
    }
    exit::run(NAME, || {
        outlive_hangups()?;
        let Loaded { settings, print, layers } = config::load(arguments)?;
        if print {
            return writeln!(std::io::stdout(), "{}", print_settings(&settings)?)
                .map_err(|e| Error::internal(format!("cannot print: {e}")));
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .map_err(|e| Error::internal(format!("cannot start a runtime: {e}")))?;
        let outcome = runtime.block_on(run(settings, layers));
        runtime.shutdown_background();
        outcome
    })
}

/// A conductor with an embedded router takes clients' requests. Without it, requests come from routers.
fn sampling(settings: &ConductorSettings) -> Sampling {
    if settings.membership.no_router { Sampling::OfSampled } else { Sampling::OfClients }
}

async fn run(settings: ConductorSettings, layers: Layers) -> Result<(), Error> {
    let telemetry = telemetry::install(&settings.telemetry, NAME, sampling(&settings))?;
    let metrics = Metrics::default();
    let live = LiveSettings::of(&settings);
    let reload = Reload {
        settings: settings.clone(),
        layers,
        validate: config::validate,
        live: live.clone(),
        log: telemetry.log_filter(),
        metrics: metrics.identify(NAME, &settings)?,
    };
    reload.start()?;
    descriptors::raise_limit();
    let shutdown = Shutdown::on_signals()?;
    let layout = config::layout(&settings)?;
    // Spawned workers run on this machine, so an instruction path that it lacks is refused at once. A worker that joins
    // by hand may run on another machine, and checks its own.
    if layout.topology.spawned_workers() > 0 {
        isa::resolve(settings.device.cpu_isa)?;
    }
    if !settings.membership.no_router {
        tutti_router::check_api_keys(&settings.router)?;
    }
    let tls = PublicTls::read(&settings.tls)?;
    // Ports are bound before anything that takes long, so that a port in use is reported at once.
    let http = listen::tcp("http", settings.addresses.http)?;
    let grpc = listen::tcp("grpc", settings.addresses.grpc)?;
    let probes =
        settings.addresses.operations.map(|address| listen::tcp("operations", address)).transpose()?;
    let transport = ClusterTransport::read(&settings.cluster_tls)?;
    tokio::spawn(transport.clone().follow());
    let MembershipSettings { worker_listen, cluster_grpc, .. } = &settings.membership;
    let workers = ClusterListener::bind(Callers::Workers, worker_listen.as_ref(), &transport).await?;
    let routers = ClusterListener::bind(Callers::Routers, cluster_grpc.as_ref(), &transport).await?;
    let cluster_token = config::cluster_token(&settings)?;
    let display = LoadDisplay::default();
    let checkpoint = tokio::select! {
        checkpoint = resolve(&settings, &layout, &display) => Arc::new(checkpoint?),
        () = shutdown.begun() => return Ok(()),
    };

    let counts = metrics.register(ConnectionMetrics::register);
    let cluster_health = Health::default();
    let listening = (workers, live.connections.clone().into(), counts.clone());
    let options = backend_options(&settings, &layout, &checkpoint, listening, display)?;
    // Reading the tokenizer and loading the model both take time, so they run at the same time.
    let text = read_text(&settings, &checkpoint);
    let model = &options.served.name;
    tracing::info!(%model, workers = layout.topology.spawned_workers(), "the workers load the model");
    let mut backend = Backend::start(options, &metrics, cluster_health.clone())?;
    let text = tokio::select! {
        text = text => text,
        error = backend.failed() => return Err(error),
        () = shutdown.begun() => return end(backend).await,
    };
    let text = match text {
        Ok(text) => text,
        Err(error) => {
            end(backend).await?;
            return Err(error);
        }
    };
    let conductor =
        ConductorService::new(backend.cluster().clone(), checkpoint, shutdown.clone()).into_server();
    let cluster_routes = cluster_routes(conductor.clone(), cluster_token, cluster_health.clone());
    let front = match text {
        None => Front::bare(cluster_health, metrics),
        Some(text) => Front::with_router(conductor, text, cluster_health, live.router.clone(), &metrics)?,
    };
    if let Some(front_door) = &front.router {
        front_door.warn_if_open(&[settings.addresses.http, settings.addresses.grpc]);
    }
    let AddressSettings { http: http_address, grpc: grpc_address, .. } = settings.addresses;
    tracing::info!(http = %http_address, grpc = %grpc_address, cluster = routers.local_url()?, "listening");
    tokio::spawn(announcement(&settings, &http, &grpc).when_ready(front.health.clone()));
    let (http, grpc) = serve::encrypted(http, grpc, tls);
    let (http, grpc) = (http.counted(&counts, Purpose::Http), grpc.counted(&counts, Purpose::Grpc));
    let closing = Shutdown::default();
    let mut servers = front.serve(http, grpc, &live.connections, &closing);
    if let Some(probes) = probes {
        let probes = serve::Listener::from(probes).counted(&counts, Purpose::Operations);
        let (routes, connections) = (front.operations.clone(), live.connections.clone());
        servers.spawn(serve::http(probes, routes, connections, closing.clone()));
    }
    let (routers, _routers_directory) = routers.into_parts();
    let connections = ConnectionLimits::from(live.connections.clone()).with_streams(ROUTER_STREAMS);
    servers.spawn(serve::grpc(
        routers.counted(&counts, Purpose::Cluster),
        cluster_routes,
        serve::Windows::default(),
        connections,
        closing.clone(),
    ));

    tokio::select! {
        () = shutdown.begun() => {}
        error = backend.failed() => return Err(error),
        Some(ended) = servers.join_next() => {
            let ended = ended.unwrap_or_else(|e| Err(Error::internal(format!("a server broke: {e}"))));
            return ended.and(Err(Error::internal("a server has stopped serving")));
        }
    }
    front.health.drain();
    tokio::select! {
        () = sleep(live.drain.get().lame_duck(&settings.addresses)) => {}
        error = backend.failed() => return Err(error),
    }
    let patience = live.drain.get().drain_timeout();
    let deadline = Instant::now() + patience;
    backend.drain(patience).await;
    // Clients may still be reading the output of ended requests, so the router gets the rest of the drain timeout.
    let _ = timeout_at(deadline, front.idle()).await;
    closing.begin();
    let closed = async { while servers.join_next().await.is_some() {} };
    // A client may keep its connection open after the last answer, so the time for closing is limited.
    let (_, ()) = tokio::join!(timeout(CLOSING, closed), backend.stop());
    tracing::info!("drained");
    Ok(())
}

/// Returns the announcement that is printed once the cluster is ready: the addresses, and the kind of prompt of the
/// example.
fn announcement(settings: &ConductorSettings, http: &TcpListener, grpc: &TcpListener) -> Announcement {
    let prompt = if settings.router.skip_tokenizer_init { Prompt::TokenIds } else { Prompt::Text };
    Announcement {
        http: http.local_addr().unwrap_or(settings.addresses.http),
        grpc: grpc.local_addr().unwrap_or(settings.addresses.grpc),
        prompt: (!settings.membership.no_router).then_some(prompt),
        is_encrypted: settings.tls.tls_cert.is_some(),
    }
}

/// Ends a cluster that has not served anything yet.
async fn end(backend: Backend) -> Result<(), Error> {
    backend.drain(Duration::ZERO).await;
    backend.stop().await;
    Ok(())
}

/// Starts to read those files of the checkpoint that an embedded router needs. The future returns `None` if there is no
/// embedded router.
fn read_text(
    settings: &ConductorSettings,
    checkpoint: &Arc<Checkpoint>,
) -> impl Future<Output = Result<Option<CheckedText>, Error>> + use<> {
    let (checkpoint, skip) = (checkpoint.clone(), settings.router.skip_tokenizer_init);
    let reading = (!settings.membership.no_router)
        .then(|| tokio::task::spawn_blocking(move || tutti_router::check_checkpoint(&checkpoint, skip)));
    async {
        let Some(reading) = reading else { return Ok(None) };
        reading.await.map_err(|e| Error::internal(format!("reading the tokenizer failed: {e}")))?.map(Some)
    }
}

/// Finds the checkpoint on this machine or downloads it.
async fn resolve(
    settings: &ConductorSettings,
    layout: &Layout,
    display: &LoadDisplay,
) -> Result<Checkpoint, Error> {
    let source = ModelSource::parse(settings.model.model.as_deref())?;
    // Simulated devices need no weights. If any device is simulated, all devices are.
    let simulated = layout.devices.contains(&DeviceChoice::Sim);
    let wanted = match settings.weights.load_format {
        LoadFormat::Auto if !simulated => Wanted::Everything,
        LoadFormat::Auto | LoadFormat::Dummy => Wanted::NoWeights,
    };
    checkpoint::resolve(&source, wanted, &HubOptions::from_env(), display).await
}

fn backend_options(
    settings: &ConductorSettings,
    layout: &Layout,
    checkpoint: &Checkpoint,
    (listener, connections, connection_metrics): (ClusterListener, ConnectionLimits, ConnectionMetrics),
    display: LoadDisplay,
) -> Result<BackendOptions, Error> {
    let worker_settings = config::worker_settings(settings, layout, &checkpoint.dir)?;
    let spawn_token = random_token()?;
    let lifeline = Lifeline {
        parent_pid: process::id(),
        join_token: spawn_token.clone(),
        telemetry: settings.telemetry.clone(),
        cluster_tls: settings.cluster_tls.clone(),
    };
    Ok(BackendOptions {
        limits: Limits {
            topology: layout.topology.clone(),
            model: settings.model.clone(),
            engine: settings.engine.clone(),
            faults: settings.faults.clone(),
        },
        served: Served {
            name: settings.model.served_model_name.clone().unwrap_or_else(|| checkpoint.name.clone()),
            has_tokenizer: checkpoint.dir.join(checkpoint::CheckpointFile::Tokenizer.name()).is_file(),
        },
        listener,
        connections,
        connection_metrics,
        worker_program: PathBuf::from(WORKER_PROGRAM),
        worker_settings: worker_settings.iter().map(json).collect::<Result<_, _>>()?,
        spawn_token: Token::new("join_token", &spawn_token)?,
        lifeline_line: json(&lifeline)?,
        join_token: config::join_token(settings)?,
        display,
    })
}

fn json(value: &impl serde::Serialize) -> Result<String, Error> {
    serde_json::to_string(value).map_err(|e| Error::internal(format!("cannot be written as JSON: {e}")))
}

/// Makes the router poll the conductor whenever the cluster's readiness changes, so that the router's poll interval may
/// be long.
async fn hear(cluster: Health, front_door: FrontDoor) {
    let mut changes = cluster.watch_ready();
    while changes.changed().await.is_ok() {
        front_door.ask_again();
    }
}

/// The services that clients and operators reach.
struct Front {
    routes: axum::Router,
    /// The routes of operators and probes, which `routes` has too.
    operations: axum::Router,
    services: Routes,
    health: Health,
    /// The embedded router, if there is one.
    router: Option<FrontDoor>,
}

impl Front {
    /// Creates the services of a conductor without an embedded router: those of operators and probes.
    fn bare(health: Health, metrics: Metrics) -> Self {
        metrics.follow_readiness(health.clone());
        let services = Routes::new(grpc_health::service::<ConductorServer<ConductorService>>(health.clone()));
        let operations = operations::routes(health.clone(), metrics);
        Self { routes: operations.clone(), operations, services, health, router: None }
    }

    /// Creates the services of a conductor with an embedded router. The router calls the conductor's gRPC service as a
    /// router in another process would. Clients cannot reach that service.
    fn with_router(
        conductor: ConductorServer<ConductorService>,
        text: CheckedText,
        cluster: Health,
        config: Live<RouterSettings>,
        metrics: &Metrics,
    ) -> Result<Self, Error> {
        let front_door = FrontDoor::new(conductor, Some(text), config, metrics)?;
        let health = cluster.of_same_process();
        metrics.follow_readiness(health.clone());
        let (follow, hear) = (front_door.clone().follow(health.clone()), hear(cluster, front_door.clone()));
        tokio::spawn(async { tokio::join!(follow, hear) });
        let operations = operations::routes(health.clone(), metrics.clone());
        Ok(Self {
            routes: operations.clone().merge(front_door.http_routes()),
            operations,
            services: front_door.grpc_routes(&health)?,
            health,
            router: Some(front_door),
        })
    }

    /// Serves on both ports, with one task per port. The tasks end after `closing` begins.
    fn serve(
        &self,
        http: serve::Listener,
        grpc: serve::Listener,
        connections: &Live<ConnectionSettings>,
        closing: &Shutdown,
    ) -> JoinSet<Result<(), Error>> {
        let mut servers = JoinSet::new();
        let routes = operations::moving_clients(self.routes.clone(), self.health.clone());
        servers.spawn(serve::http(http, routes, connections.clone(), closing.clone()));
        let services = self.services.clone();
        let windows = serve::Windows::default();
        servers.spawn(serve::grpc(grpc, services, windows, connections.clone(), closing.clone()));
        servers
    }

    /// Completes once no answer is being sent to a client.
    async fn idle(&self) {
        if let Some(front_door) = &self.router {
            front_door.idle().await;
        }
    }
}
