//! A server under the load of the `control_plane` bench, with the CPU time of its processes.

use std::{collections::BTreeMap, path::Path, time::Duration};

use tutti_load::client::Target;

use super::{
    backends::Backends,
    baseline::Baseline,
    cluster::{Cluster, cpu_seconds},
};

/// Number of workers of Tutti, and of backends of the baseline.
pub const WORKERS: usize = 8;
/// Context length, large enough for the largest bodies.
const CONTEXT: u32 = 262_144;

pub enum Contender {
    /// Conductor, embedded router and simulated workers.
    Tutti(Cluster),
    /// sglang-router in front of backends.
    SglangRouter(Baseline),
    /// A backend without a router. Its figures show the cost of client and connection.
    Nothing(Backends),
}

/// Kind of a contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Tutti,
    SglangRouter,
    Nothing,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Tutti => "tutti",
            Self::SglangRouter => "sglang-router",
            Self::Nothing => "no router",
        }
    }
}

impl Contender {
    /// Starts a contender whose simulated devices take the time `step` for every step.
    pub async fn start(kind: Kind, step: Duration) -> Result<Self, String> {
        Ok(match kind {
            Kind::Tutti => Self::Tutti(tutti(step).await?),
            Kind::SglangRouter => {
                Self::SglangRouter(Baseline::start(Backends::start(WORKERS, step).await?).await?)
            }
            Kind::Nothing => Self::Nothing(Backends::start(1, step).await?),
        })
    }

    pub fn target(&self) -> &Target {
        match self {
            Self::Tutti(cluster) => &cluster.target,
            Self::SglangRouter(baseline) => &baseline.target,
            Self::Nothing(backends) => &backends.target,
        }
    }

    /// CPU seconds so far, by group of processes. One of the groups is this process, the load generator.
    pub fn cpu(&self) -> Result<Cpu, String> {
        let mut spent = Cpu::from([("load generator", cpu_seconds(std::process::id())?)]);
        match self {
            Self::Tutti(cluster) => {
                spent.insert("conductor with router", cpu_seconds(cluster.conductor())?);
                let workers = cluster.workers()?.into_iter().map(cpu_seconds).sum::<Result<_, _>>()?;
                spent.insert("workers", workers);
            }
            Self::SglangRouter(baseline) => {
                spent.insert("router", cpu_seconds(baseline.router())?);
                spent.insert("backends", cpu_seconds(baseline.backends.process())?);
            }
            Self::Nothing(backends) => {
                spent.insert("backends", cpu_seconds(backends.process())?);
            }
        }
        Ok(spent)
    }

    pub fn stop(self) -> Result<(), String> {
        match self {
            Self::Tutti(cluster) => cluster.stop(),
            Self::SglangRouter(_) | Self::Nothing(_) => Ok(()),
        }
    }
}

pub type Cpu = BTreeMap<&'static str, f64>;

/// Returns the CPU microseconds between two readings, divided by `number`, which counts tokens or requests.
pub fn cpu_us_per(number: f64, before: &Cpu, after: &Cpu) -> Cpu {
    after.iter().map(|(name, after)| (*name, (after - before[name]) / number * 1e6)).collect()
}

/// Starts Tutti with simulated devices, the shipped model's tokenizer and a longer context.
async fn tutti(step: Duration) -> Result<Cluster, String> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("control-plane");
    let failed = |e: std::io::Error| format!("{}: {e}", dir.display());
    std::fs::create_dir_all(&dir).map_err(failed)?;
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tutti-tiny/checkpoint");
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(shipped.join(file), dir.join(file)).map_err(failed)?;
    }
    let config = std::fs::read_to_string(shipped.join("config.json")).map_err(failed)?;
    let context = r#""max_position_embeddings": "#;
    let longer = config.replacen(&format!("{context}4096"), &format!("{context}{CONTEXT}"), 1);
    std::fs::write(dir.join("config.json"), longer).map_err(failed)?;
    let settings = dir.join(format!("settings-{}us.toml", step.as_micros()));
    std::fs::write(&settings, settings_with(step)).map_err(failed)?;
    let [model, settings] = [&dir, &settings].map(|path| path.as_os_str().to_owned());
    Cluster::start(&["--model".into(), model, "--config".into(), settings]).await
}

fn settings_with(step: Duration) -> String {
    let step_us = step.as_micros();
    format!(
        r#"workers = {WORKERS}
device = "sim"
max_step_tokens = {CONTEXT}
max_queued_requests = 4096
kv_cache_memory = "64MiB"

[sim]
profile = "instant"
fixed_us = {step_us}

[router]
max_concurrent_choices = 4096
tokenizer_queue = 4096
"#
    )
}
