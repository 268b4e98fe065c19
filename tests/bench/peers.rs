//! The servers that are compared on a CPU: ours, and those that tests/bench/peers/setup installs. Each is a process of its
//! own that reads the same checkpoint and answers on loopback.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::File,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use clap::ValueEnum;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use tutti_load::client::Target;

use crate::cluster::{children, free_port, peak_memory};

/// The longest start is a minute.
const START_LIMIT: Duration = Duration::from_secs(300);
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Of requests: a long prompt on a slow machine.
const TIMEOUT: Duration = Duration::from_secs(900);
/// What the peers' prefill is cut into.
const BUDGET: &str = "512";
/// Of what setup installs, a line each.
const VERSIONS: &str = include_str!("peers/versions");
/// Enough for sixteen requests of 512 tokens and what they generate.
pub const KV_POOL_BYTES: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Peer {
    Tutti,
    /// OpenVINO GenAI.
    Openvino,
    /// vLLM's wheel for CPUs.
    Vllm,
    /// Its own server.
    LlamaCpp,
}

/// How weights are stored. Peers that have no fast path for bf16 on this machine run their fastest of as many bits, or f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    Bf16,
    Int8,
}

/// What a server is started for, where that makes a difference to it.
#[derive(Clone, Copy, Debug)]
pub struct Purpose {
    pub weights: Weights,
    pub threads: usize,
    /// Requests that it has at a time, and the most tokens of one.
    pub requests: usize,
    pub context: usize,
    /// Given to us alone: peers have nothing like it.
    pub target_itl_ms: Option<u32>,
    /// Whether Tutti keeps its weights as it lays them out, and maps them.
    pub packed_weights: bool,
}

/// A peer that runs.
pub struct Running {
    process: Child,
    spawned: Instant,
    pub target: Target,
}

impl Peer {
    pub fn name(self) -> &'static str {
        match self {
            Self::Tutti => "tutti",
            Self::Openvino => "openvino",
            Self::Vllm => "vllm",
            Self::LlamaCpp => "llama-cpp",
        }
    }

    /// What says that it takes requests.
    fn ready(self) -> &'static str {
        if self == Self::Tutti { "/ready" } else { "/health" }
    }

    /// The program and what it is told. Every path in it is there.
    fn command(self, purpose: &Purpose, port: u16) -> Result<Vec<OsString>, String> {
        let Purpose { weights, threads, .. } = *purpose;
        let installed = installed()?;
        let here = |name: &str| there(installed.join(name));
        let script =
            |name: &str| there(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bench/peers").join(name));
        let bf16 = weights == Weights::Bf16;
        let (python, server, model, kind) = match self {
            Self::Tutti => return conductor(purpose, port, here("checkpoint")?),
            Self::LlamaCpp => {
                let model = here(if bf16 { sixteen_bits_of_llama_cpp() } else { "model-q8_0.gguf" })?;
                return Ok(llama_server(purpose, port, here("llama-build/bin/llama-server")?, model));
            }
            Self::Openvino if bf16 => ("openvino-venv", "openvino_server.py", "openvino-fp16", "f16"),
            Self::Openvino => ("openvino-venv", "openvino_server.py", "openvino-int8", "default"),
            Self::Vllm if bf16 => ("vllm-venv", "vllm_server.py", "checkpoint", best_of_vllm()),
            Self::Vllm => ("vllm-venv", "vllm_server.py", "w8a8", best_of_vllm()),
        };
        let python = here(python)?.join("bin/python");
        Ok(vec![
            python.into(),
            script(server)?.into(),
            port.to_string().into(),
            here(model)?.into(),
            kind.into(),
            threads.to_string().into(),
            BUDGET.into(),
        ])
    }

    /// Starts it and waits until it takes requests.
    pub async fn start(self, purpose: &Purpose) -> Result<Running, String> {
        let port = free_port()?;
        let command = self.command(purpose, port)?;
        let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{port}.log", self.name()));
        let opened = || File::options().create(true).append(true).open(&log);
        let failed = |e: std::io::Error| format!("{}: {e}", log.display());
        let spawned = Instant::now();
        let process = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::null())
            .stdout(opened().map_err(failed)?)
            .stderr(opened().map_err(failed)?)
            .spawn()
            .map_err(|e| format!("{}: {e}", command[0].display()))?;
        // From here on it is ended by its drop.
        let target = Target::named(&format!("http://127.0.0.1:{port}"), "checkpoint", TIMEOUT)?.greedy();
        let mut running = Running { process, spawned, target };
        while !running.target.answers(self.ready()).await {
            if let Ok(Some(status)) = running.process.try_wait() {
                return Err(format!("ended with {status} at its start: see {}", log.display()));
            }
            if spawned.elapsed() > START_LIMIT {
                return Err(format!("is not ready after {START_LIMIT:?}: see {}", log.display()));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(running)
    }
}

/// Package and version of each peer.
pub fn versions() -> BTreeMap<&'static str, &'static str> {
    VERSIONS.lines().filter_map(|line| line.split_once('=')).collect()
}

/// Where setup has put them.
fn installed() -> Result<PathBuf, String> {
    there(Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("peers"))
}

fn there(path: PathBuf) -> Result<PathBuf, String> {
    let missing = || format!("{} is not there: run tests/bench/peers/setup", path.display());
    if path.exists() { Ok(path.clone()) } else { Err(missing()) }
}

/// Our own server, with its router and its tokenizer.
fn conductor(purpose: &Purpose, port: u16, checkpoint: PathBuf) -> Result<Vec<OsString>, String> {
    let grpc = free_port()?;
    let mut command: Vec<OsString> =
        [env!("CARGO_BIN_EXE_conductor"), "--workers=1", "--device=cpu"].map(Into::into).into();
    command.extend(["--model".into(), checkpoint.into()]);
    command.extend([
        format!("--threads={}", purpose.threads).into(),
        format!("--kv-cache-memory={KV_POOL_BYTES}").into(),
        format!("--http=127.0.0.1:{port}").into(),
        format!("--grpc=127.0.0.1:{grpc}").into(),
    ]);
    if purpose.weights == Weights::Int8 {
        command.push("--quantize=int8".into());
    }
    if purpose.packed_weights {
        let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("packed-weights");
        std::fs::create_dir_all(&kept).map_err(|error| format!("{}: {error}", kept.display()))?;
        command.extend(["--packed-weights".into(), kept.into()]);
    }
    if let Some(target) = purpose.target_itl_ms {
        command.push(format!("--target-itl-ms={target}").into());
    }
    Ok(command)
}

/// With a cache for each request, which is faster than one for all, and nothing kept of earlier prompts: none comes twice.
fn llama_server(purpose: &Purpose, port: u16, program: PathBuf, model: PathBuf) -> Vec<OsString> {
    let Purpose { threads, requests, context, .. } = *purpose;
    let model = ["-m".into(), model.into()];
    let numbers = [
        format!("--port={port}"),
        format!("-t={threads}"),
        format!("-tb={threads}"),
        format!("-np={requests}"),
        format!("-c={}", requests * context),
        format!("-b={BUDGET}"),
        format!("-ub={BUDGET}"),
    ];
    let flags = numbers.iter().flat_map(|flag| flag.split('='));
    let fixed =
        ["--host", "127.0.0.1", "--no-kv-unified", "--no-cache-prompt", "--cache-ram", "0", "--no-ui"];
    [program.into()].into_iter().chain(model).chain(flags.chain(fixed).map(Into::into)).collect()
}

/// It multiplies bf16 fast only where the machine has instructions for it, and f16 everywhere.
fn sixteen_bits_of_llama_cpp() -> &'static str {
    if multiplies_bf16() { "model-bf16.gguf" } else { "model-f16.gguf" }
}

/// Without instructions for bf16 its own is several times slower than f32.
fn best_of_vllm() -> &'static str {
    if multiplies_bf16() { "bfloat16" } else { "float32" }
}

fn multiplies_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    true
}

impl Running {
    /// Seconds from the start of the process to the first token of a short prompt that is sent when it is ready; to be asked
    /// right then.
    pub async fn first_token(&self) -> Result<f64, String> {
        let record = self.target.generate(&[1; 16], 1, 0).await;
        match record.failure {
            Some(why) => Err(why),
            None => Ok(self.spawned.elapsed().as_secs_f64()),
        }
    }

    /// The most memory that its processes have had resident, in bytes.
    pub fn peak_memory(&self) -> Result<u64, String> {
        let own = self.process.id();
        [own].into_iter().chain(children(own)?).map(peak_memory).sum()
    }

    /// Asks it to end, and waits until its memory is free for others.
    pub async fn stop(mut self) -> Result<(), String> {
        let pid = Pid::from_raw(self.process.id() as i32).ok_or("no process id")?;
        kill_process(pid, Signal::TERM).map_err(|e| format!("cannot be ended: {e}"))?;
        let since = Instant::now();
        while since.elapsed() < STOP_LIMIT {
            if self.process.try_wait().map_err(|e| format!("cannot be waited for: {e}"))?.is_some() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // Its drop kills it.
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
