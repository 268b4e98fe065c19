//! The command line: every setting as an optional flag, laid over file and environment.

use std::{net::SocketAddr, path::PathBuf};

use clap::Parser;
use serde::Serialize;
use tutti_runtime::{CpuIsa, telemetry::LogFormat};

use super::{
    Admission, ByteSize, Chunking, DeviceChoice, LoadFormat, PrefillSharing, Quantize, WorkerAddress,
};

/// Serves a model with one conductor, its workers, and a router in front.
///
/// Every setting can also stand in a file (--config) or in an environment variable (TUTTI_MAX_STEP_TOKENS).
#[derive(Debug, Default, Parser, Serialize)]
#[command(name = "conductor", version)]
pub struct ConductorFlags {
    /// Settings from this TOML or YAML file; environment variables and flags go over them
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,

    /// Print the settings in force as JSON and exit
    #[arg(long)]
    #[serde(skip)]
    pub print_config: bool,

    /// Worker processes to spawn, each with a copy of the model unless --tp divides it [default: 1]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    workers: Option<u32>,

    /// Workers that divide one model among them: N/T replicas of T ranks [default: 1]
    #[arg(long, value_name = "T")]
    #[serde(skip_serializing_if = "Option::is_none")]
    tp: Option<u32>,

    /// Which groups of workers there are and what each runs, in a TOML or YAML file, in the place of --workers and --tp
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    topology: Option<PathBuf>,

    /// Seconds that a rank of a group may keep the others waiting before the group is started again [default: 30]
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    collective_timeout: Option<u32>,

    /// A Hugging Face checkpoint's directory, or a hub id [default: the small model in this binary]
    #[arg(long, value_name = "DIR|HUB_ID")]
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,

    /// The model's name for clients [default: the hub id or the directory's name]
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    served_model_name: Option<String>,

    /// Serve at most this many tokens, prompt and output together [default: the model's own limit]
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<u32>,

    /// What the workers run on: auto, cpu, or sim, which only takes a device's time (table sim of the file) [default: auto]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<DeviceChoice>,

    /// Where weights come from [default: auto]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    load_format: Option<LoadFormat>,

    /// In how many bits weights are held; int8 halves bfloat16's memory and reads, and quantises activations too [default: none]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    quantize: Option<Quantize>,

    /// Keep the weights in this directory as the CPU lays them out, a copy of their size: later starts map it in place of
    /// packing them again, and workers beside each other share its memory
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    packed_weights: Option<PathBuf>,

    /// Address of the OpenAI API, health and metrics [default: 127.0.0.1:8000]
    #[arg(long, value_name = "ADDR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    http: Option<SocketAddr>,

    /// Address of the gRPC API, and of the conductor for routers [default: 127.0.0.1:50051]
    #[arg(long, value_name = "ADDR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    grpc: Option<SocketAddr>,

    /// Where workers dial in: unix:/path or ip:port [default: a Unix socket in a private directory]
    #[arg(long, value_name = "ADDR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    worker_listen: Option<WorkerAddress>,

    /// File with the secret that workers show which join by hand; needed for them when workers dial in over TCP
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    join_token_file: Option<PathBuf>,

    /// Serve no text here: routers of their own are in front
    #[arg(long)]
    #[serde(skip_serializing_if = "is_false")]
    no_router: bool,

    /// Settings of the embedded router.
    #[command(flatten)]
    router: RouterFlags,

    /// The most tokens of one step, over all requests in it [default: 512]
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_step_tokens: Option<u32>,

    /// Who cuts long prompts into chunks; the answers are the same [default: scheduler]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    chunking: Option<Chunking>,

    /// The most prompt tokens of one request in one forward [default: max-step-tokens]
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_prefill_chunk_size: Option<u32>,

    /// The same, in steps that other requests take part in, where the scheduler cuts [default: max-prefill-chunk-size]
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    long_prefill_token_threshold: Option<u32>,

    /// How the prompts in a step share what decodes leave of it [default: shortest-first]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_sharing: Option<PrefillSharing>,

    /// Milliseconds between two tokens to keep to: prompts get what decodes leave of that [default: whole steps]
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    target_itl_ms: Option<u32>,

    /// What a request must hold before it runs [default: whole-life]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    admission: Option<Admission>,

    /// Compute every prompt from its start, whatever others have computed
    #[arg(long)]
    #[serde(skip_serializing_if = "is_false")]
    no_prefix_cache: bool,

    /// Requests that a worker runs at a time [default: 128]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_running_requests: Option<u32>,

    /// Requests that may wait beyond those; more are answered 429 [default: 1024]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_queued_requests: Option<u32>,

    /// How often a request is tried again whose worker died, and one that could not be handed over [default: 2]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_replays: Option<u32>,

    /// Seconds that a prefill's worker and the one that decodes may keep each other waiting [default: 30]
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    transfer_timeout: Option<u32>,

    /// Seconds for which a worker may say nothing before it is killed; it has a word each second [default: 5]
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    heartbeat_timeout: Option<u32>,

    /// Seconds for which a worker that has work may make no step before it is killed: more than its longest step takes [default: 120]
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    hang_timeout: Option<u32>,

    /// Memory of each worker's KV pool: 512MiB, 2GB, or bytes [default: what the requests that run can use, at most 2GiB and an eighth of free memory]
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_cache_memory: Option<ByteSize>,

    /// Compute threads of each worker [default: the machine's share]
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<u32>,

    /// Keep each compute thread on a core of its own, those of a worker on one NUMA node as far as they fit
    #[arg(long)]
    #[serde(skip_serializing_if = "is_false")]
    pin_threads: bool,

    /// Instruction path of workers on a CPU; answers on one path are the same to the last bit on unlike CPUs, and auto is the
    /// best path of each machine [default: auto]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_isa: Option<CpuIsa>,

    /// Write a JSON line for each step of each worker to this file, with .rank0 and so on added
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_steps: Option<PathBuf>,

    /// Seconds that running requests have to finish after the first Ctrl-C or SIGTERM [default: 30]
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    drain_timeout: Option<u32>,

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

/// The embedded router's flags; its other settings stand in the file's `router` table.
#[derive(Debug, Default, clap::Args, Serialize)]
struct RouterFlags {
    /// Serve token ids only: the checkpoint's tokenizer and chat template are not read
    #[arg(long)]
    #[serde(skip_serializing_if = "is_false")]
    skip_tokenizer_init: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}
