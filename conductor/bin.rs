//! The conductor with its workers, and a router in front unless told otherwise.
//!
//! Under the name `worker` the same executable is one of those workers, so that this one file is all a cluster needs.

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
    task::{AbortHandle, JoinSet},
    time::{Instant, timeout, timeout_at},
};
use tonic::service::Routes;
use tutti_conductor::{
    Backend, BackendOptions,
    cluster::{GroupSpec, Limits, MAX_WORKERS, Served},
    config::{self, ConductorFlags, DeviceChoice, Layout},
    listen::WorkerListener,
    random_token,
    service::{ConductorServer, ConductorService},
};
use tutti_router::{CheckedText, FrontDoor, RouterConfig};
use tutti_runtime::{
    Error,
    announce::{Announcement, Prompt},
    checkpoint::{self, Checkpoint, HubOptions, ModelSource, Wanted},
    config::print,
    exit, grpc_health,
    health::{Health, State},
    listen,
    metrics::Metrics,
    operations,
    progress::LoadDisplay,
    serve,
    shutdown::Shutdown,
};
use tutti_worker::{
    config::{Admission, Chunking, DeviceKind, LoadFormat, PrefillSharing, Quantize, WorkerSettings},
    isa,
    lifeline::Lifeline,
};

type Config = config::ConductorConfig<RouterConfig>;

const NAME: &str = "conductor";
/// Itself, even where the file has been replaced since: workers must be of the same build.
const WORKER_PROGRAM: &str = "/proc/self/exe";
/// How long connections may take to close once no request is left.
const CLOSING: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().peekable();
    let name = arguments.peek().and_then(|name| Path::new(name).file_name());
    if name == Some(OsStr::new("worker")) {
        return tutti_worker::spawned(arguments);
    }
    exit::run(NAME, || {
        let flags: ConductorFlags = exit::flags(arguments);
        let config = Config::load(&flags)?;
        config.router.validate()?;
        if flags.print_config {
            return writeln!(std::io::stdout(), "{}", print(&config)?)
                .map_err(|e| Error::internal(format!("cannot print: {e}")));
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .map_err(|e| Error::internal(format!("cannot start a runtime: {e}")))?;
        let outcome = runtime.block_on(run(config));
        runtime.shutdown_background();
        outcome
    })
}

async fn run(config: Config) -> Result<(), Error> {
    let _telemetry = config.telemetry().install(NAME)?;
    let shutdown = Shutdown::on_signals()?;
    let layout = config.layout()?;
    // Workers that join by hand may be on other machines: each of them checks its own.
    if layout.topology.spawned_workers() > 0 {
        isa::resolve(config.cpu_isa)?;
    }
    // Ports before anything that takes long, so that one in use is told at once.
    let http = listen::tcp("http", config.http).await?;
    let grpc = listen::tcp("grpc", config.grpc).await?;
    let workers = WorkerListener::bind(config.worker_listen.as_ref()).await?;
    let display = LoadDisplay::default();
    let checkpoint = tokio::select! {
        checkpoint = resolve(&config, &layout, &display) => Arc::new(checkpoint?),
        () = shutdown.begun() => return Ok(()),
    };

    let metrics = Metrics::default();
    let cluster_health = Health::default();
    let options = backend_options(&config, &layout, &checkpoint, workers, display)?;
    // Either takes a moment, so workers load while the tokenizer is read.
    let text = read_text(&config, &checkpoint);
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
    let model = config.served_model_name.clone().unwrap_or_else(|| checkpoint.name.clone());
    let conductor = ConductorService::new(backend.cluster().clone(), checkpoint).into_server();
    let front = match text {
        None => Front::bare(conductor, cluster_health, metrics),
        Some(text) => Front::with_router(conductor, text, cluster_health, &config.router, &metrics)?,
    };
    let workers = layout.topology.spawned_workers();
    tracing::info!(http = %config.http, grpc = %config.grpc, model, workers, "listening; the workers load the model");
    tokio::spawn(announcement(&config, &http, &grpc).when_ready(front.health.clone()));
    let closing = Shutdown::default();
    let mut servers = front.serve(http, grpc, &closing);

    tokio::select! {
        () = shutdown.begun() => {}
        error = backend.failed() => return Err(error),
        Some(ended) = servers.join_next() => {
            let ended = ended.unwrap_or_else(|e| Err(Error::internal(format!("a server broke: {e}"))));
            return ended.and(Err(Error::internal("a server has stopped serving")));
        }
    }
    front.not_ready("draining");
    let deadline = Instant::now() + config.drain_timeout();
    backend.drain(config.drain_timeout()).await;
    // Clients may still be reading what their requests have brought.
    let _ = timeout_at(deadline, front.idle()).await;
    closing.begin();
    let closed = async { while servers.join_next().await.is_some() {} };
    // Whoever still holds a connection open has had the answers to all requests.
    let (_, ()) = tokio::join!(timeout(CLOSING, closed), backend.stop());
    tracing::info!("drained");
    Ok(())
}

/// The addresses and the example that are announced once the cluster is ready.
fn announcement(config: &Config, http: &TcpListener, grpc: &TcpListener) -> Announcement {
    let prompt = if config.router.skip_tokenizer_init { Prompt::TokenIds } else { Prompt::Text };
    Announcement {
        http: http.local_addr().unwrap_or(config.http),
        grpc: grpc.local_addr().unwrap_or(config.grpc),
        prompt: (!config.no_router).then_some(prompt),
    }
}

/// Ends a cluster that has not served anything yet.
async fn end(backend: Backend) -> Result<(), Error> {
    backend.drain(Duration::ZERO).await;
    backend.stop().await;
    Ok(())
}

/// Begins to read what the router needs of the checkpoint; none where there is no router.
fn read_text(
    config: &Config,
    checkpoint: &Arc<Checkpoint>,
) -> impl Future<Output = Result<Option<CheckedText>, Error>> + use<> {
    let (checkpoint, skip) = (checkpoint.clone(), config.router.skip_tokenizer_init);
    let reading = (!config.no_router)
        .then(|| tokio::task::spawn_blocking(move || tutti_router::check_checkpoint(&checkpoint, skip)));
    async {
        let Some(reading) = reading else { return Ok(None) };
        reading.await.map_err(|e| Error::internal(format!("reading the tokenizer failed: {e}")))?.map(Some)
    }
}

/// Finds the checkpoint.
async fn resolve(config: &Config, layout: &Layout, display: &LoadDisplay) -> Result<Checkpoint, Error> {
    let source = ModelSource::parse(config.model.as_deref())?;
    // A simulated device has no use for them, and where one is, all are.
    let simulated = layout.devices.contains(&DeviceChoice::Sim);
    let wanted = match config.load_format {
        config::LoadFormat::Auto if !simulated => Wanted::Everything,
        config::LoadFormat::Auto | config::LoadFormat::Dummy => Wanted::NoWeights,
    };
    checkpoint::resolve(&source, wanted, &HubOptions::from_env(), display).await
}

fn backend_options(
    config: &Config,
    layout: &Layout,
    checkpoint: &Checkpoint,
    listener: WorkerListener,
    display: LoadDisplay,
) -> Result<BackendOptions, Error> {
    let spawn_token = random_token()?;
    let lifeline = Lifeline {
        parent_pid: process::id(),
        join_token: spawn_token.clone(),
        telemetry: config.telemetry(),
    };
    Ok(BackendOptions {
        limits: Limits {
            topology: layout.topology.clone(),
            max_running_requests: config.max_running_requests,
            max_queued_requests: config.max_queued_requests,
            max_model_len: config.max_model_len,
            prefix_cache: !config.no_prefix_cache,
            max_replays: config.max_replays,
            transfer_timeout: Duration::from_secs(config.transfer_timeout.into()),
            heartbeat_timeout: Duration::from_secs(config.heartbeat_timeout.into()),
            hang_timeout: Duration::from_secs(config.hang_timeout.into()),
        },
        served: Served {
            name: config.served_model_name.clone().unwrap_or_else(|| checkpoint.name.clone()),
            has_tokenizer: checkpoint.dir.join(checkpoint::CheckpointFile::Tokenizer.name()).is_file(),
        },
        listener,
        worker_program: PathBuf::from(WORKER_PROGRAM),
        worker_settings: worker_settings(config, layout, checkpoint)?,
        spawn_token,
        lifeline_line: json(&lifeline)?,
        join_token: config.join_token()?,
        display,
    })
}

/// What the workers of each group are told.
fn worker_settings(config: &Config, layout: &Layout, checkpoint: &Checkpoint) -> Result<Vec<String>, Error> {
    let common = common_settings(config, layout, checkpoint)?;
    let of_group = |(group, device): (&GroupSpec, &DeviceChoice)| {
        let device = match device {
            DeviceChoice::Auto | DeviceChoice::Cpu => DeviceKind::Cpu,
            DeviceChoice::Sim => DeviceKind::Sim,
        };
        let nodes = group.nodes.clone();
        json(&WorkerSettings { tp: group.tp as usize, nodes, device, ..common.clone() })
    };
    layout.topology.groups().iter().zip(&layout.devices).map(of_group).collect()
}

/// The conductor's settings in the words of its workers.
fn common_settings(
    config: &Config,
    layout: &Layout,
    checkpoint: &Checkpoint,
) -> Result<WorkerSettings, Error> {
    // Workers may have another working directory.
    let absolute = |field, path: Option<&Path>| {
        path.map(std::path::absolute).transpose().map_err(|error| {
            Error::invalid(field, format!("is relative to a working directory that is gone: {error}"))
        })
    };
    let trace_steps = absolute("trace_steps", config.trace_steps.as_deref())?;
    let packed_weights = absolute("packed_weights", config.packed_weights.as_deref())?;
    let workers = layout.topology.spawned_workers();
    config.check_cores(workers)?;
    Ok(WorkerSettings {
        model_dir: checkpoint.dir.clone(),
        load_format: match config.load_format {
            config::LoadFormat::Auto => LoadFormat::Auto,
            config::LoadFormat::Dummy => LoadFormat::Dummy,
        },
        quantize: match config.quantize {
            config::Quantize::None => Quantize::None,
            config::Quantize::Int8 => Quantize::Int8,
        },
        packed_weights,
        nodes: None,
        device: DeviceKind::default(),
        sim: config.sim.clone(),
        threads: config.threads_per_worker(workers) as usize,
        pin_threads: config.pin_threads,
        cpu_isa: config.cpu_isa,
        tp: 1,
        collective_timeout_s: config.collective_timeout,
        max_step_tokens: config.max_step_tokens as usize,
        chunking: match config.chunking {
            config::Chunking::Scheduler => Chunking::Scheduler,
            config::Chunking::Engine => Chunking::Engine,
            config::Chunking::Off => Chunking::Off,
        },
        max_prefill_chunk_size: config.max_prefill_chunk_size.map(|tokens| tokens as usize),
        long_prefill_token_threshold: config.long_prefill_token_threshold.map(|tokens| tokens as usize),
        prefill_sharing: match config.prefill_sharing {
            config::PrefillSharing::ShortestFirst => PrefillSharing::ShortestFirst,
            config::PrefillSharing::Fair => PrefillSharing::Fair,
            config::PrefillSharing::FirstCome => PrefillSharing::FirstCome,
        },
        target_itl_ms: config.target_itl_ms,
        admission: match config.admission {
            config::Admission::WholeLife => Admission::WholeLife,
            config::Admission::Optimistic => Admission::Optimistic,
        },
        prefix_cache: !config.no_prefix_cache,
        max_running_requests: config.max_running_requests as usize,
        // All that the conductor admits may come to one worker when the others are gone, those that joined by hand too.
        max_waiting_requests: (config.max_queued_requests + config.max_running_requests * MAX_WORKERS)
            as usize,
        kv_cache_memory: config.kv_cache_memory.map(|size| size.0),
        trace_steps,
    })
}

fn json(value: &impl serde::Serialize) -> Result<String, Error> {
    serde_json::to_string(value).map_err(|e| Error::internal(format!("cannot be written as JSON: {e}")))
}

/// Tells the router when the cluster becomes ready, or is no longer, so that it need not ask often.
async fn hear(cluster: Health, front_door: FrontDoor) {
    let mut changes = cluster.watch_ready();
    while changes.changed().await.is_ok() {
        front_door.ask_again();
    }
}

/// What clients and operators reach.
struct Front {
    routes: axum::Router,
    services: Routes,
    health: Health,
    /// Where there is one, with the task that writes readiness.
    router: Option<(FrontDoor, AbortHandle)>,
}

impl Front {
    /// The conductor alone, for routers of their own.
    fn bare(conductor: ConductorServer<ConductorService>, health: Health, metrics: Metrics) -> Self {
        let services = Routes::new(grpc_health::service::<ConductorServer<ConductorService>>(health.clone()));
        Self {
            routes: operations::routes(health.clone(), metrics),
            services: services.add_service(conductor),
            health,
            router: None,
        }
    }

    /// A router before the conductor, whose gRPC service it calls as it would from another process.
    fn with_router(
        conductor: ConductorServer<ConductorService>,
        text: CheckedText,
        cluster: Health,
        config: &RouterConfig,
        metrics: &Metrics,
    ) -> Result<Self, Error> {
        let front_door = FrontDoor::new(conductor.clone(), Some(text), config, metrics)?;
        let health = Health::default();
        let (follow, hear) = (front_door.clone().follow(health.clone()), hear(cluster, front_door.clone()));
        let follower = tokio::spawn(async { tokio::join!(follow, hear) });
        Ok(Self {
            routes: operations::routes(health.clone(), metrics.clone()).merge(front_door.http_routes()),
            services: front_door.grpc_routes(&health)?.add_service(conductor),
            health,
            router: Some((front_door, follower.abort_handle())),
        })
    }

    /// Serves on both ports, each as a task that ends after `closing` begins.
    fn serve(&self, http: TcpListener, grpc: TcpListener, closing: &Shutdown) -> JoinSet<Result<(), Error>> {
        let mut servers = JoinSet::new();
        servers.spawn(serve::http(http, self.routes.clone(), closing.clone()));
        servers.spawn(serve::grpc(grpc, self.services.clone(), closing.clone()));
        servers
    }

    /// Says so to probes from now on, whatever the router finds.
    fn not_ready(&self, why: &str) {
        if let Some((_, follower)) = &self.router {
            follower.abort();
        }
        self.health.set_ready(State::Not(why.into()));
    }

    /// Completes once no answer is under way to a client.
    async fn idle(&self) {
        if let Some((front_door, _)) = &self.router {
            front_door.idle().await;
        }
    }
}
