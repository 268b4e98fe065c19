//! Values derived from a conductor's settings: the groups of workers, and the settings that each worker receives.
//! [`validate`] checks the settings before a port is bound or a process is spawned.

mod topology;

use std::path::{Path, PathBuf};

use tutti_runtime::{Error, memory, token::Token};
use tutti_settings::{
    ByteSize, CpuIsa, DeviceSettings, KvCacheDtype, LoadFormat, MAX_RANKS, Quantize, TensorParallelSettings,
    WorkerSettings,
};
pub use tutti_settings::{ConductorSettings, DeviceChoice};

pub use self::topology::Layout;
use crate::cluster::GroupSpec;

/// Refuses settings under which the conductor cannot serve.
pub fn validate(settings: &ConductorSettings) -> Result<(), Error> {
    settings.validate()?;
    check_activations(settings)?;
    if layout(settings)?.devices.contains(&DeviceChoice::Sim) {
        check_simulated(settings)?;
    }
    settings.weights.packed_weights.as_deref().map_or(Ok(()), |dir| check_packed_weights(settings, dir))?;
    settings.trace.trace_steps.as_deref().map_or(Ok(()), check_trace_file)
}

/// Refuses activations in f32 with weights that are quantised to eight bits, whose products are sums of integers.
/// Whether a checkpoint has weights of four bits is checked when its headers are read.
fn check_activations(settings: &ConductorSettings) -> Result<(), Error> {
    let quantize = settings.weights.quantize;
    if settings.weights.no_quantized_activations && quantize == Quantize::Int8 {
        let message = format!("needs weights of four bits, but quantize is {quantize}");
        return Err(Error::invalid("no_quantized_activations", message));
    }
    Ok(())
}

/// Refuses settings of weights and of CPU instructions if devices are simulated: a simulated device has no weights and
/// runs no CPU kernels.
fn check_simulated(settings: &ConductorSettings) -> Result<(), Error> {
    let quantize = settings.weights.quantize;
    if quantize != Quantize::None {
        let message = format!("is {quantize}, but device sim holds no weights to quantise");
        return Err(Error::invalid("quantize", message));
    }
    if settings.engine.kv_cache_dtype != KvCacheDtype::Auto {
        let message =
            format!("is {}, but device sim holds no keys and values", settings.engine.kv_cache_dtype);
        return Err(Error::invalid("kv_cache_dtype", message));
    }
    if settings.device.cpu_isa != CpuIsa::Auto {
        return Err(Error::invalid("cpu_isa", "names instructions of a CPU, but device sim runs none"));
    }
    match &settings.weights.packed_weights {
        Some(dir) => Err(refused_packed_weights(dir, "device sim holds no weights")),
        None => Ok(()),
    }
}

fn check_packed_weights(settings: &ConductorSettings, dir: &Path) -> Result<(), Error> {
    if settings.weights.load_format == LoadFormat::Dummy {
        return Err(refused_packed_weights(dir, "dummy weights are made anew at each start"));
    }
    if !dir.is_dir() {
        return Err(refused_packed_weights(dir, "that is no directory"));
    }
    Ok(())
}

fn refused_packed_weights(dir: &Path, why: &str) -> Error {
    Error::invalid("packed_weights", format!("is {}, but {why}", dir.display()))
}

/// Refuses a trace file whose directory does not exist. A later error of the trace file loses the trace, but does not
/// stop the conductor.
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

/// Returns the groups of workers: the groups of the topology file if there is one, otherwise one group of `workers`
/// workers that run whole requests, with `tp` workers per replica.
pub fn layout(settings: &ConductorSettings) -> Result<Layout, Error> {
    let device = settings.device.device;
    match &settings.membership.topology {
        Some(path) => Layout::read(path, device),
        None => Ok(Layout::all_in_one(settings.workers(), settings.tensor_parallel.tp, device)),
    }
}

/// Returns the secret of workers that join by hand; `None` if no file is set.
pub fn join_token(settings: &ConductorSettings) -> Result<Option<Token>, Error> {
    let file = settings.membership.join_token_file.as_deref();
    file.map(|path| Token::read("join_token_file", path)).transpose()
}

/// Returns the secret of routers and operators; `None` if no file is set.
pub fn cluster_token(settings: &ConductorSettings) -> Result<Option<Token>, Error> {
    let file = settings.membership.cluster_token_file.as_deref();
    file.map(|path| Token::read("cluster_token_file", path)).transpose()
}

/// Returns the settings for the workers of each group, in the order of the groups.
pub fn worker_settings(
    settings: &ConductorSettings,
    layout: &Layout,
    checkpoint: &Path,
) -> Result<Vec<WorkerSettings>, Error> {
    let common = common_settings(settings, layout, checkpoint)?;
    let of_group = |(group, device): (&GroupSpec, &DeviceChoice)| WorkerSettings {
        nodes: group.nodes.clone(),
        device: DeviceSettings { device: *device, ..common.device.clone() },
        tensor_parallel: TensorParallelSettings { tp: group.tp, ..common.tensor_parallel.clone() },
        memory_share: common.memory_share.filter(|_| group.spawned),
        ..common.clone()
    };
    Ok(layout.topology.groups().iter().zip(&layout.devices).map(of_group).collect())
}

/// Returns the settings that all workers share, whatever their group.
fn common_settings(
    settings: &ConductorSettings,
    layout: &Layout,
    checkpoint: &Path,
) -> Result<WorkerSettings, Error> {
    let workers = layout.topology.spawned_workers();
    check_cores(&settings.device, workers)?;
    let mut weights = settings.weights.clone();
    weights.packed_weights = absolute("packed_weights", weights.packed_weights.as_deref())?;
    let mut trace = settings.trace.clone();
    trace.trace_steps = absolute("trace_steps", trace.trace_steps.as_deref())?;
    Ok(WorkerSettings {
        model_dir: checkpoint.to_owned(),
        nodes: None,
        max_waiting_requests: max_waiting_requests(settings),
        weights,
        device: DeviceSettings {
            compiled_kernels: absolute("compiled_kernels", settings.device.compiled_kernels.as_deref())?,
            threads: Some(threads_per_worker(&settings.device, workers)),
            ..settings.device.clone()
        },
        connections: settings.connections.clone(),
        tensor_parallel: settings.tensor_parallel.clone(),
        engine: settings.engine.clone(),
        memory_share: memory_share(workers),
        hang_timeout: settings.faults.hang_timeout,
        trace,
        sim: settings.sim.clone(),
    })
}

/// Maximum number of requests that wait at one worker. One worker may get all requests that the conductor admits, if
/// the other workers are gone. Workers may join by hand, so the number of workers is not known, and `MAX_RANKS` is used
/// instead.
fn max_waiting_requests(settings: &ConductorSettings) -> usize {
    settings.faults.max_queued_requests as usize + settings.engine.running_limit() * MAX_RANKS as usize
}

/// Makes a path absolute, since workers and commands may have another working directory.
pub fn absolute(field: &str, path: Option<&Path>) -> Result<Option<PathBuf>, Error> {
    path.map(std::path::absolute).transpose().map_err(|error| {
        Error::invalid(field, format!("is relative to a working directory that is gone: {error}"))
    })
}

/// Each spawned worker's share of the memory that is free before any worker has loaded the model; `None` if the free
/// memory is not known.
fn memory_share(workers: u32) -> Option<ByteSize> {
    memory::available().map(|bytes| ByteSize(bytes / u64::from(workers.max(1))))
}

/// Number of compute threads of each worker: as set, or an equal share of the machine's cores.
fn threads_per_worker(device: &DeviceSettings, workers: u32) -> u32 {
    device.threads.unwrap_or_else(|| (cores() / workers.max(1)).max(1))
}

/// Refuses to pin threads if the workers together have more threads than the machine has cores.
fn check_cores(device: &DeviceSettings, workers: u32) -> Result<(), Error> {
    let (cores, threads) = (cores(), threads_per_worker(device, workers));
    if !device.pin_threads || workers.saturating_mul(threads) <= cores {
        return Ok(());
    }
    let why =
        format!("{workers} workers of {threads} threads want {} cores, there are {cores}", workers * threads);
    Err(Error::invalid("pin_threads", why))
}

fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32)
}

#[cfg(test)]
mod tests;
