//! Checks of a checkpoint before it is loaded: can this build serve it on these ranks, and is there memory for it?
//!
//! A conductor checks the checkpoint before it binds a port or starts a worker, so that a fault is reported once, and
//! at once. A worker checks the memory that it is about to take, because it may be on another machine, and because only
//! the worker opens the GPU.

mod need;

use std::path::Path;

use tutti_kernels::{Device, collective::GroupRank};
use tutti_models::{Footprint, LoadOptions, footprints};
use tutti_runtime::{Error, memory};
use tutti_settings::{DeviceChoice, Quantize, WorkerSettings};

use self::need::{MemoryKind, Need};
use crate::loading::load_options;

/// Files that exist only where there is an NVIDIA driver. The driver makes the first at its first use; the last three
/// are those of Jetson and of Linux inside Windows.
const DRIVER_FILES: [&str; 6] = [
    "/dev/nvidiactl",
    "/proc/driver/nvidia",
    "/sys/module/nvidia",
    "/dev/nvhost-gpu",
    "/dev/nvmap",
    "/dev/dxg",
];

/// The workers of one group of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct WorkerGroup<'a> {
    /// The settings that the conductor sends to each of them.
    pub settings: &'a WorkerSettings,
    /// Number of replicas of the model. Each has as many ranks as the settings say.
    pub replicas: u32,
}

/// Refuses a config that this build cannot serve with these settings. Reads no weights. A simulated device serves any
/// config.
pub fn check_config(settings: &WorkerSettings) -> Result<(), Error> {
    if settings.device.device == DeviceChoice::Sim {
        return Ok(());
    }
    Ok(tutti_models::check_config(&load_options(settings), ranks(settings))?)
}

/// Checks the headers of the weights that these groups load on this machine. Refuses weights for which the CPU's memory
/// has no room. A GPU's memory is checked by its worker.
pub fn check_weights(groups: &[WorkerGroup<'_>]) -> Result<(), Error> {
    let mut need = Need::default();
    for WorkerGroup { settings, replicas } in groups {
        let device = settings.device.device;
        if device == DeviceChoice::Sim {
            continue;
        }
        let ranks = footprints(&load_options(settings), ranks(settings))?;
        check_activations(settings, &ranks)?;
        if computes_on_cpu(device) {
            ranks.iter().for_each(|rank| need.add(rank, settings, *replicas));
        }
    }
    let check = MemoryCheck::of(groups.iter().map(|group| group.settings));
    match memory::allocatable() {
        Some(free) if need.bytes() > free.bytes => {
            check.apply(need.refused(&free.to_string(), MemoryKind::Host { total: free.total }))
        }
        _ => Ok(()),
    }
}

/// Refuses the setting that keeps activations in f32 if no matrix has four bits. With other weights, activations are in
/// f32 anyway, except with `--quantize int8`, whose products have no form with activations in f32.
fn check_activations(settings: &WorkerSettings, ranks: &[Footprint]) -> Result<(), Error> {
    let has_int4 = settings.weights.quantize == Quantize::Int4 || ranks.iter().any(|rank| rank.has_int4);
    if settings.weights.no_quantized_activations && !has_int4 {
        let message =
            "needs weights of four bits: those of --quantize int4, or of a checkpoint that stores them";
        return Err(Error::invalid("no_quantized_activations", message));
    }
    Ok(())
}

/// Refuses to load a rank's weights if the memory of its device has no room for them.
pub(crate) fn check_rank<D: Device>(
    settings: &WorkerSettings,
    options: &LoadOptions,
    device: &D,
) -> Result<(), Error> {
    let GroupRank { rank, world_size } = device.group_rank();
    let mut need = Need::default();
    let ranks = footprints(options, world_size)?;
    ranks.get(rank).into_iter().for_each(|rank| need.add(&rank.on_device(device), settings, 1));
    let (bytes, said, kind) = match (device.free_bytes(), memory::allocatable()) {
        (Some(bytes), _) => {
            (bytes, format!("{} are free on {}", memory::Size(bytes), device.describe()), MemoryKind::Device)
        }
        (None, Some(free)) => (free.bytes, free.to_string(), MemoryKind::Host { total: free.total }),
        (None, None) => return Ok(()),
    };
    let check = MemoryCheck::of([settings]);
    if need.bytes() > bytes { check.apply(need.refused(&said, kind)) } else { Ok(()) }
}

/// The treatment of a model for which there is not enough memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemoryCheck {
    /// The model is refused.
    Refuses,
    /// The model is loaded, because the setting `no_memory_check` says so.
    Warns,
}

impl MemoryCheck {
    fn of<'a>(settings: impl IntoIterator<Item = &'a WorkerSettings>) -> Self {
        let is_off = settings.into_iter().all(|settings| settings.weights.no_memory_check);
        if is_off { Self::Warns } else { Self::Refuses }
    }

    /// Returns the refusal, or logs it if it is only a warning.
    fn apply(self, refusal: Error) -> Result<(), Error> {
        match self {
            Self::Refuses => Err(refusal),
            Self::Warns => {
                tracing::warn!(
                    "no_memory_check is set, so the model is loaded although {}",
                    refusal.message()
                );
                Ok(())
            }
        }
    }
}

/// Number of ranks of one replica.
fn ranks(settings: &WorkerSettings) -> usize {
    settings.tensor_parallel.tp as usize
}

/// True if workers of this choice of device compute on the CPU. False if `auto` may mean a GPU.
fn computes_on_cpu(device: DeviceChoice) -> bool {
    match device {
        DeviceChoice::Cpu => true,
        DeviceChoice::Auto => !DRIVER_FILES.iter().any(|file| Path::new(file).exists()),
        DeviceChoice::Cuda | DeviceChoice::Sim => false,
    }
}

#[cfg(test)]
mod tests;
