//! The servers that are compared on a CPU: Tutti, and the peers that `tests/bench/peers/setup` installs. Each server is
//! a process that answers on loopback. All of them read the same checkpoint.

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

use super::{
    cluster::{children, free_port, peak_memory},
    shape::Shape,
};

/// Maximum duration of a server's start. The slowest server takes a minute.
const START_LIMIT: Duration = Duration::from_secs(300);
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Timeout of a request, long enough for a long prompt on a slow machine.
const TIMEOUT: Duration = Duration::from_secs(900);
/// Prefill budget of the peers, in tokens per step.
const BUDGET: &str = "512";
/// Versions that `setup` installs, one per line.
const VERSIONS: &str = include_str!("../peers/versions");
/// Bytes of Tutti's KV pool, enough for 16 requests of 512 tokens and their output.
pub const KV_POOL_BYTES: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Peer {
    Tutti,
    /// OpenVINO GenAI.
    Openvino,
    /// vLLM's wheel for CPUs.
    Vllm,
    /// llama.cpp's own server.
    LlamaCpp,
}

/// Type of the weights. For `Bf16`, a peer that has no fast path for bf16 on this machine runs its fastest 16-bit type,
/// or f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    Bf16,
    Int8,
    Int4,
    /// The types of a GGUF file, which Tutti and llama.cpp serve.
    Gguf(GgufTypes),
}

/// Types of the matrices in a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufTypes {
    /// All Q4_0.
    Q4,
    /// The mixture that llama.cpp names Q4_K_M.
    Q4KMedium,
    /// All Q8_0.
    Q8,
}

impl GgufTypes {
    /// Name of the model file that `setup` makes.
    fn file(self) -> &'static str {
        match self {
            Self::Q4 => "model-q4_0.gguf",
            Self::Q4KMedium => "model-q4_k_m.gguf",
            Self::Q8 => "model-q8_0.gguf",
        }
    }
}

/// Settings of a server that depend on the measurement.
#[derive(Clone, Copy, Debug)]
pub struct Purpose {
    pub shape: Shape,
    pub weights: Weights,
    pub threads: usize,
    /// Maximum number of concurrent requests.
    pub requests: usize,
    /// Maximum number of tokens of a request.
    pub context: usize,
    /// ITL target of Tutti. The peers have no such setting.
    pub target_itl_ms: Option<u32>,
    /// True if Tutti runs with `--packed-weights`.
    pub packed_weights: bool,
}

/// A running server.
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

    /// URL path that returns success once the server takes requests.
    fn ready(self) -> &'static str {
        if self == Self::Tutti { "/ready" } else { "/health" }
    }

    /// Returns the server's program and arguments. Fails if a file that they name is missing.
    fn command(self, purpose: &Purpose, port: u16) -> Result<Vec<OsString>, String> {
        let Purpose { weights, threads, .. } = *purpose;
        let installed = installed()?;
        let here = |name: &str| existing(installed.join(name));
        let models = match purpose.shape {
            Shape::Qwen3 => installed.clone(),
            other => installed.join(other.name()),
        };
        let made = |name: &str| existing(models.join(name));
        let script =
            |name: &str| existing(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bench/peers").join(name));
        let (python, server, model, kind) = match (self, weights) {
            (Self::Tutti, Weights::Gguf(types)) => return conductor(purpose, port, made(types.file())?),
            (Self::Tutti, _) => return conductor(purpose, port, made("checkpoint")?),
            (Self::LlamaCpp, _) => {
                let file = match weights {
                    Weights::Bf16 => llama_cpp_model(),
                    Weights::Int8 => GgufTypes::Q8.file(),
                    Weights::Int4 => GgufTypes::Q4.file(),
                    Weights::Gguf(types) => types.file(),
                };
                eprintln!("{}: model {file}", self.name());
                let model = made(file)?;
                return Ok(llama_server(purpose, port, here("llama-build/bin/llama-server")?, model));
            }
            (_, Weights::Gguf(types)) => return Err(format!("reads no {}", types.file())),
            (Self::Openvino, Weights::Bf16) => {
                ("openvino-venv", "openvino_server.py", "openvino-fp16", openvino_types())
            }
            (Self::Openvino, Weights::Int8) => {
                ("openvino-venv", "openvino_server.py", "openvino-int8", "default")
            }
            (Self::Openvino, Weights::Int4) => {
                ("openvino-venv", "openvino_server.py", "openvino-int4", "default")
            }
            (Self::Vllm, Weights::Bf16) => ("vllm-venv", "vllm_server.py", "checkpoint", vllm_dtype()),
            (Self::Vllm, Weights::Int8) => ("vllm-venv", "vllm_server.py", "w8a8", vllm_dtype()),
            (Self::Vllm, Weights::Int4) => {
                return Err("has no checkpoint of four bits here".to_owned());
            }
        };
        let python = here(python)?.join("bin/python");
        eprintln!("{}: model {model}, data type {kind}", self.name());
        Ok(vec![
            python.into(),
            script(server)?.into(),
            port.to_string().into(),
            made(model)?.into(),
            kind.into(),
            threads.to_string().into(),
            BUDGET.into(),
        ])
    }

    /// Starts the server and waits until it takes requests.
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
        // From here on, an error drops `running`, which ends the process.
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

/// Returns the version of each package that `setup` installs.
pub fn versions() -> BTreeMap<&'static str, &'static str> {
    VERSIONS.lines().filter_map(|line| line.split_once('=')).collect()
}

/// Directory of the installed peers.
fn installed() -> Result<PathBuf, String> {
    existing(Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("peers"))
}

fn existing(path: PathBuf) -> Result<PathBuf, String> {
    let missing = || format!("{} is not there: run tests/bench/peers/setup", path.display());
    if path.exists() { Ok(path.clone()) } else { Err(missing()) }
}

/// Command of Tutti, with router and tokenizer.
fn conductor(purpose: &Purpose, port: u16, checkpoint: PathBuf) -> Result<Vec<OsString>, String> {
    let grpc = free_port()?;
    let mut command: Vec<OsString> =
        [env!("CARGO_BIN_EXE_conductor"), "--workers=1", "--device=cpu", "--served-model-name=checkpoint"]
            .map(Into::into)
            .into();
    command.extend(["--model".into(), checkpoint.into()]);
    command.extend([
        format!("--threads={}", purpose.threads).into(),
        format!("--kv-cache-memory={KV_POOL_BYTES}").into(),
        format!("--http=127.0.0.1:{port}").into(),
        format!("--grpc=127.0.0.1:{grpc}").into(),
    ]);
    match purpose.weights {
        Weights::Int8 => command.push("--quantize=int8".into()),
        Weights::Int4 => command.push("--quantize=int4".into()),
        Weights::Bf16 | Weights::Gguf(_) => {}
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

/// Command of llama.cpp. Each request has its own KV cache, because a shared one is slower. Earlier prompts are not
/// kept, because no prompt repeats.
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

/// Model file of llama.cpp. llama.cpp multiplies f16 fast on every machine, but bf16 only with bf16 instructions.
fn llama_cpp_model() -> &'static str {
    if multiplies_bf16() { "model-bf16.gguf" } else { "model-f16.gguf" }
}

/// Compute type and KV cache type of OpenVINO, as `COMPUTE:KV`. On machines with AVX-512 but no bf16 instructions,
/// OpenVINO does not start with bf16 compute and an f16 KV cache. Its fastest compute type there is f32.
fn openvino_types() -> &'static str {
    if has_avx512() && !multiplies_bf16() { "f32:f16" } else { "bf16:f16" }
}

/// Data type of vLLM. Without bf16 instructions, vLLM is several times slower with bf16 than with f32.
fn vllm_dtype() -> &'static str {
    if multiplies_bf16() { "bfloat16" } else { "float32" }
}

fn has_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

fn multiplies_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    true
}

impl Running {
    /// Seconds from the start of the process to the first token of a short prompt. Call it as soon as the server is
    /// ready.
    pub async fn first_token(&self) -> Result<f64, String> {
        let record = self.target.generate(&[1; 16], 1, 0).await;
        match record.failure {
            Some(why) => Err(why),
            None => Ok(self.spawned.elapsed().as_secs_f64()),
        }
    }

    /// Sum of the peak resident memory of all processes of the server, in bytes.
    pub fn peak_memory(&self) -> Result<u64, String> {
        let own = self.process.id();
        [own].into_iter().chain(children(own)?).map(peak_memory).sum()
    }

    /// Sends SIGTERM and waits until the process has ended and its memory is free.
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
        // The process has not ended in time, so the drop of `self` kills it.
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
