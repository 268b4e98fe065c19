//! What a worker is told: by its conductor once it has joined, and by whoever starts it by hand.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Parser;
use serde::{Deserialize, Serialize};
use tutti_engine::EngineSettings;
pub use tutti_engine::{Admission, Chunking, PrefillSharing};
pub use tutti_models::{LoadFormat, Quantize};
use tutti_runtime::{
    CpuIsa, Error, config,
    sim::SimSettings,
    telemetry::{LogFormat, Telemetry},
};

/// A device of this build.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// The CPU.
    #[default]
    Cpu,
    /// A cost model in a device's place.
    Sim,
}

/// What the conductor tells each worker in its Welcome, as JSON. One build serves both ends, so there are no versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerSettings {
    /// The checkpoint's directory.
    pub model_dir: PathBuf,
    /// Where weights come from.
    pub load_format: LoadFormat,
    /// In how many bits they are held.
    pub quantize: Quantize,
    /// Where packed weights are kept for later starts and for other workers.
    pub packed_weights: Option<PathBuf>,
    /// The parts of the model that this worker holds; all without.
    pub nodes: Option<Vec<String>>,
    /// What to compute on.
    pub device: DeviceKind,
    /// The simulated device, where it is that.
    pub sim: SimSettings,
    /// Compute threads, at least 1.
    pub threads: usize,
    /// Whether each of them stays on a core of its own.
    pub pin_threads: bool,
    /// The instruction path of the CPU.
    pub cpu_isa: CpuIsa,
    /// Ranks of a TP group; 1 where each worker holds the whole model.
    pub tp: usize,
    /// How long a rank may keep the others of its group waiting.
    pub collective_timeout_s: u32,
    /// The most tokens of one step.
    pub max_step_tokens: usize,
    /// Who cuts long prefills.
    pub chunking: Chunking,
    /// The most prompt tokens of one request in one forward.
    pub max_prefill_chunk_size: Option<usize>,
    /// The same, in steps that others take part in.
    pub long_prefill_token_threshold: Option<usize>,
    /// How prefills share a step.
    pub prefill_sharing: PrefillSharing,
    /// How long a step that decodes should take at most.
    pub target_itl_ms: Option<u32>,
    /// What a request must hold before it runs.
    pub admission: Admission,
    /// Whether pages are kept for prompts that start alike.
    pub prefix_cache: bool,
    /// Requests that hold KV pages at a time.
    pub max_running_requests: usize,
    /// Requests that may be held beyond those; the conductor sends no more.
    pub max_waiting_requests: usize,
    /// Bytes of the KV pool; the engine's own choice without it.
    pub kv_cache_memory: Option<u64>,
    /// Where to write what each step ran, with the rank added to the name.
    pub trace_steps: Option<PathBuf>,
}

impl WorkerSettings {
    /// The engine's share of the settings.
    pub fn engine(&self) -> EngineSettings {
        EngineSettings {
            max_step_tokens: self.max_step_tokens,
            chunking: self.chunking,
            max_prefill_chunk: self.max_prefill_chunk_size,
            long_prefill_tokens: self.long_prefill_token_threshold,
            prefill_sharing: self.prefill_sharing,
            target_itl: self.target_itl_ms.map(|ms| Duration::from_millis(ms.into())),
            admission: self.admission,
            prefix_cache: self.prefix_cache,
            max_running_requests: self.max_running_requests,
            max_waiting_requests: self.max_waiting_requests,
            kv_cache_memory: self.kv_cache_memory,
        }
    }
}

/// Joins a cluster as one more worker. What it computes, the conductor tells it.
///
/// Every setting can also stand in a file (--config) or in an environment variable (TUTTI_RANK).
#[derive(Debug, Parser, Serialize)]
#[command(name = "worker", version)]
pub struct WorkerFlags {
    /// Settings from this TOML or YAML file; environment variables and flags go over them
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// The conductor's gate for workers: unix:/path or http://host:port
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conductor: Option<String>,

    /// Place in the cluster: one that no other worker has, above those that the conductor spawns
    #[arg(long, value_name = "R")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,

    /// File with the secret that the conductor was given too
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    join_token_file: Option<PathBuf>,

    /// How log lines look [default: text]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    log_format: Option<LogFormat>,

    /// Which log lines there are, as in info or tutti_worker=debug [default: info]
    #[arg(long, value_name = "FILTER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<String>,

    /// OTLP/gRPC endpoint for spans
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    otlp_endpoint: Option<String>,
}

/// The settings of a worker that joins by hand.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkerConfig {
    /// The conductor's gate for workers.
    pub conductor: Option<String>,
    /// Place in the cluster.
    pub rank: Option<u32>,
    /// File with the join secret.
    pub join_token_file: Option<PathBuf>,
    /// How log lines look.
    pub log_format: LogFormat,
    /// Which log lines there are.
    pub log: String,
    /// Where spans go.
    pub otlp_endpoint: Option<String>,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        let Telemetry { log_format, log, otlp_endpoint } = Telemetry::default();
        Self { conductor: None, rank: None, join_token_file: None, log_format, log, otlp_endpoint }
    }
}

impl WorkerConfig {
    /// All layers merged.
    pub fn load(flags: &WorkerFlags) -> Result<Self, Error> {
        config::layered(flags.config.as_deref(), flags)
    }

    /// What this process logs, and where its spans go.
    pub fn telemetry(&self) -> Telemetry {
        let (log_format, log) = (self.log_format, self.log.clone());
        Telemetry { log_format, log, otlp_endpoint: self.otlp_endpoint.clone() }
    }

    /// The join secret; empty where none is given.
    pub fn join_token(&self) -> Result<String, Error> {
        self.join_token_file.as_deref().map_or(Ok(String::new()), read_token)
    }
}

fn read_token(path: &Path) -> Result<String, Error> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Error::invalid("join_token_file", format!("cannot read {}: {e}", path.display())))?;
    Ok(text.trim().to_owned())
}
