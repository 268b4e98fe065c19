//! What an operator may set, checked as a whole before any port is bound or process spawned.

mod byte_size;
mod device;
mod flags;
mod load_format;
mod quantize;
mod scheduling;
mod topology;
mod worker_address;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tutti_runtime::{
    CpuIsa, Error, config,
    sim::SimSettings,
    telemetry::{LogFormat, Telemetry},
};

pub use self::{
    byte_size::ByteSize,
    device::DeviceChoice,
    flags::ConductorFlags,
    load_format::LoadFormat,
    quantize::Quantize,
    scheduling::{Admission, Chunking, PrefillSharing},
    topology::Layout,
    worker_address::WorkerAddress,
};

/// The most workers one conductor spawns.
const MAX_WORKERS: u32 = 256;

/// A conductor's settings. `R` are those of the embedded router, which this crate does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ConductorConfig<R: Default> {
    /// Worker processes to spawn.
    pub workers: u32,
    /// Workers that divide one model among them.
    pub tp: u32,
    /// Who runs what, where that is not the same for all workers: a file in the place of `workers` and `tp`.
    pub topology: Option<PathBuf>,
    /// Seconds that one of them may keep the others waiting.
    pub collective_timeout: u32,
    /// A checkpoint's directory or a hub id; the shipped model without it.
    pub model: Option<String>,
    /// The model's name for clients; the checkpoint's own without it.
    pub served_model_name: Option<String>,
    /// The most tokens of a request where that is fewer than the model's own limit.
    pub max_model_len: Option<u32>,
    /// What the workers run on.
    pub device: DeviceChoice,
    /// The simulated device, where that is what they run on.
    pub sim: SimSettings,
    /// Where weights come from.
    pub load_format: LoadFormat,
    /// In how many bits they are held.
    pub quantize: Quantize,
    /// Where packed weights are kept for later starts.
    pub packed_weights: Option<PathBuf>,
    /// The OpenAI API, health and metrics.
    pub http: SocketAddr,
    /// The gRPC API, and the conductor's own for routers.
    pub grpc: SocketAddr,
    /// Where workers dial in; a Unix socket in a private directory without it.
    pub worker_listen: Option<WorkerAddress>,
    /// File with the secret of workers that join by hand.
    pub join_token_file: Option<PathBuf>,
    /// Serve no text here.
    pub no_router: bool,
    /// The embedded router's settings.
    pub router: R,
    /// The most tokens of one step.
    pub max_step_tokens: u32,
    /// Who cuts long prefills.
    pub chunking: Chunking,
    /// The most prompt tokens of one request in one forward; `max_step_tokens` without it.
    pub max_prefill_chunk_size: Option<u32>,
    /// The same, in steps that others take part in.
    pub long_prefill_token_threshold: Option<u32>,
    /// How prefills share a step.
    pub prefill_sharing: PrefillSharing,
    /// How long a step that decodes should take at most; as long as it takes without it.
    pub target_itl_ms: Option<u32>,
    /// What a request must hold before it runs.
    pub admission: Admission,
    /// Compute every prompt from its start.
    pub no_prefix_cache: bool,
    /// Requests that a worker runs at a time.
    pub max_running_requests: u32,
    /// Requests that may wait beyond those, over all workers.
    pub max_queued_requests: u32,
    /// How often a request is tried again whose worker died, and one that could not be handed over.
    pub max_replays: u32,
    /// Seconds that the two sides of a hand-over may keep each other waiting.
    pub transfer_timeout: u32,
    /// Seconds for which a worker may say nothing before it is taken for dead.
    pub heartbeat_timeout: u32,
    /// Seconds for which a worker that has work may make no step before it is taken for dead.
    pub hang_timeout: u32,
    /// Memory of each worker's KV pool; the worker's own choice without it.
    pub kv_cache_memory: Option<ByteSize>,
    /// Compute threads of each worker; the machine's share without it.
    pub threads: Option<u32>,
    /// Whether each of them stays on a core of its own.
    pub pin_threads: bool,
    /// The instruction path of workers on a CPU.
    pub cpu_isa: CpuIsa,
    /// Where workers write what each step ran; each adds its rank to the name.
    pub trace_steps: Option<PathBuf>,
    /// Seconds that running requests have to finish once a drain begins.
    pub drain_timeout: u32,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Which log lines there are.
    pub log: String,
    /// Where spans go.
    pub otlp_endpoint: Option<String>,
}

impl<R: Default> Default for ConductorConfig<R> {
    fn default() -> Self {
        let Telemetry { log_format, log, otlp_endpoint } = Telemetry::default();
        Self {
            workers: 1,
            tp: 1,
            topology: None,
            collective_timeout: 30,
            model: None,
            served_model_name: None,
            max_model_len: None,
            device: DeviceChoice::Auto,
            sim: SimSettings::default(),
            load_format: LoadFormat::Auto,
            quantize: Quantize::None,
            packed_weights: None,
            http: SocketAddr::from(([127, 0, 0, 1], 8000)),
            grpc: SocketAddr::from(([127, 0, 0, 1], 50051)),
            worker_listen: None,
            join_token_file: None,
            no_router: false,
            router: R::default(),
            max_step_tokens: 512,
            chunking: Chunking::default(),
            max_prefill_chunk_size: None,
            long_prefill_token_threshold: None,
            prefill_sharing: PrefillSharing::default(),
            target_itl_ms: None,
            admission: Admission::default(),
            no_prefix_cache: false,
            max_running_requests: 128,
            max_queued_requests: 1024,
            max_replays: 2,
            transfer_timeout: 30,
            heartbeat_timeout: 5,
            hang_timeout: 120,
            kv_cache_memory: None,
            threads: None,
            pin_threads: false,
            cpu_isa: CpuIsa::Auto,
            trace_steps: None,
            drain_timeout: 30,
            log_format,
            log,
            otlp_endpoint,
        }
    }
}

impl<R> ConductorConfig<R>
where
    R: Default + Serialize + DeserializeOwned,
{
    /// All layers merged and checked; an error names the setting at fault.
    pub fn load(flags: &ConductorFlags) -> Result<Self, Error> {
        let config: Self = config::layered(flags.config.as_deref(), flags)?;
        config.validate()?;
        Ok(config)
    }
}

impl<R: Default> ConductorConfig<R> {
    /// Refuses settings under which nothing could be served. The embedded router's are checked by the router.
    pub fn validate(&self) -> Result<(), Error> {
        if self.workers > MAX_WORKERS {
            return Err(Error::invalid(
                "workers",
                format!("is {}, the limit is {MAX_WORKERS}", self.workers),
            ));
        }
        at_least_1("workers", Some(self.workers))?;
        at_least_1("tp", Some(self.tp))?;
        if !self.workers.is_multiple_of(self.tp) {
            let (workers, tp) = (self.workers, self.tp);
            return Err(Error::invalid(
                "tp",
                format!("is {tp}, which does not divide the {workers} workers"),
            ));
        }
        if self.topology.is_some() && (self.workers, self.tp) != (1, 1) {
            let field = if self.workers == 1 { "tp" } else { "workers" };
            return Err(Error::invalid(field, "is for the topology file to say, where there is one"));
        }
        let simulated = self.layout()?.devices.contains(&DeviceChoice::Sim);
        if simulated && self.quantize != Quantize::None {
            return Err(Error::invalid("quantize", "is int8, but device sim holds no weights to quantise"));
        }
        if simulated && self.cpu_isa != CpuIsa::Auto {
            return Err(Error::invalid("cpu_isa", "names instructions of a CPU, but device sim runs none"));
        }
        if let Some(dir) = &self.packed_weights {
            let refused =
                |why: &str| Err(Error::invalid("packed_weights", format!("is {}, but {why}", dir.display())));
            if simulated {
                return refused("device sim holds no weights");
            }
            if self.load_format == LoadFormat::Dummy {
                return refused("dummy weights are made anew at each start");
            }
            if !dir.is_dir() {
                return refused("that is no directory");
            }
        }
        at_least_1("collective_timeout", Some(self.collective_timeout))?;
        at_most("collective_timeout", self.collective_timeout, 3600)?;
        at_least_1("max_model_len", self.max_model_len)?;
        at_least_1("max_step_tokens", Some(self.max_step_tokens))?;
        at_least_1("max_prefill_chunk_size", self.max_prefill_chunk_size)?;
        at_least_1("long_prefill_token_threshold", self.long_prefill_token_threshold)?;
        at_least_1("target_itl_ms", self.target_itl_ms)?;
        at_least_1("max_running_requests", Some(self.max_running_requests))?;
        at_least_1("threads", self.threads)?;
        at_most("max_step_tokens", self.max_step_tokens, 1 << 20)?;
        at_most("max_running_requests", self.max_running_requests, 1 << 16)?;
        at_most("max_queued_requests", self.max_queued_requests, 1 << 20)?;
        at_most("max_replays", self.max_replays, 100)?;
        at_least("heartbeat_timeout", self.heartbeat_timeout, 2)?;
        at_least_1("hang_timeout", Some(self.hang_timeout))?;
        at_least_1("transfer_timeout", Some(self.transfer_timeout))?;
        at_most("transfer_timeout", self.transfer_timeout, 3600)?;
        at_most("threads", self.threads.unwrap_or(1), 1024)?;
        if self.kv_cache_memory == Some(ByteSize(0)) {
            return Err(Error::invalid("kv_cache_memory", "is 0, but requests need some"));
        }
        if self.served_model_name.as_deref() == Some("") {
            return Err(Error::invalid("served_model_name", "is empty"));
        }
        self.sim.validate()?;
        self.trace_steps.as_deref().map_or(Ok(()), check_trace_file)?;
        self.check_addresses()
    }

    /// Two services cannot share a port; port 0 is a free one each time.
    fn check_addresses(&self) -> Result<(), Error> {
        let workers = match self.worker_listen {
            Some(WorkerAddress::Tcp(address)) => Some(address),
            _ => None,
        };
        let named = [("http", Some(self.http)), ("grpc", Some(self.grpc)), ("worker_listen", workers)];
        for (place, (field, address)) in named.iter().enumerate() {
            let taken = named[..place]
                .iter()
                .find(|(_, other)| other.zip(*address).is_some_and(|(a, b)| clash(a, b)));
            if let (Some((other, _)), Some(address)) = (taken, address) {
                return Err(Error::invalid(*field, format!("{address} is also the address of {other}")));
            }
        }
        Ok(())
    }

    /// What this process and its workers log, and where their spans go.
    pub fn telemetry(&self) -> Telemetry {
        let (log_format, log) = (self.log_format, self.log.clone());
        Telemetry { log_format, log, otlp_endpoint: self.otlp_endpoint.clone() }
    }

    /// Who runs what: as the topology file says, or as many whole models as `workers` and `tp` make.
    pub fn layout(&self) -> Result<Layout, Error> {
        match &self.topology {
            Some(path) => Layout::read(path, self.device),
            None => Ok(Layout::all_in_one(self.workers, self.tp, self.device)),
        }
    }

    /// Compute threads of each of so many workers: as told, or its share of the machine.
    pub fn threads_per_worker(&self, workers: u32) -> u32 {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        self.threads.unwrap_or_else(|| (cores / workers.max(1)).max(1))
    }

    /// Refuses to give each thread of so many workers a core of its own where there are too few.
    pub fn check_cores(&self, workers: u32) -> Result<(), Error> {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        let threads = self.threads_per_worker(workers);
        if !self.pin_threads || workers.saturating_mul(threads) <= cores {
            return Ok(());
        }
        let why = format!(
            "{workers} workers of {threads} threads want {} cores, there are {cores}",
            workers * threads
        );
        Err(Error::invalid("pin_threads", why))
    }

    /// How long running requests have once a drain begins.
    pub fn drain_timeout(&self) -> Duration {
        Duration::from_secs(self.drain_timeout.into())
    }

    /// The secret of workers that join by hand, if there is one.
    pub fn join_token(&self) -> Result<Option<String>, Error> {
        self.join_token_file.as_deref().map(read_token).transpose()
    }
}

fn read_token(path: &Path) -> Result<String, Error> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Error::invalid("join_token_file", format!("cannot read {}: {e}", path.display())))?;
    match text.trim() {
        "" => Err(Error::invalid("join_token_file", format!("{} is empty", path.display()))),
        token => Ok(token.to_owned()),
    }
}

/// The directory must be there; what happens to it later costs the trace and nothing else.
fn check_trace_file(path: &Path) -> Result<(), Error> {
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    if path.file_name().is_none() || !directory.is_dir() {
        let message = format!("{} is no file in a directory that exists", path.display());
        return Err(Error::invalid("trace_steps", message));
    }
    Ok(())
}

fn clash(a: SocketAddr, b: SocketAddr) -> bool {
    a.port() != 0
        && a.port() == b.port()
        && (a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified())
}

fn at_least_1(field: &str, value: Option<u32>) -> Result<(), Error> {
    match value {
        Some(0) => Err(Error::invalid(field, "is 0, but must be at least 1")),
        _ => Ok(()),
    }
}

fn at_least(field: &str, value: u32, limit: u32) -> Result<(), Error> {
    if value >= limit {
        return Ok(());
    }
    Err(Error::invalid(field, format!("is {value}, but must be at least {limit}")))
}

fn at_most(field: &str, value: u32, limit: u32) -> Result<(), Error> {
    if value <= limit {
        return Ok(());
    }
    Err(Error::invalid(field, format!("is {value}, the limit is {limit}")))
}

#[cfg(test)]
mod tests;
