//! The device that a worker computes on.

use tutti_kernels::cuda::{self, GroupId, Missing};
use tutti_proto::Rank;
use tutti_runtime::Error;
use tutti_settings::{DeviceChoice, WorkerSettings};

/// The kind of device that a worker computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    Cpu,
    Cuda {
        /// Index of the GPU on the worker's machine.
        ordinal: usize,
    },
    Sim,
}

/// Chooses the device by the settings and by the hardware of the worker's machine, and logs the choice that `auto`
/// leads to.
pub fn choose(settings: &WorkerSettings, rank: Rank) -> Result<Chosen, Error> {
    if let Some(dir) = settings.device.compiled_kernels.as_deref().filter(|dir| !dir.is_dir()) {
        return Err(Error::invalid(
            "compiled_kernels",
            format!("is {}, which is no directory", dir.display()),
        ));
    }
    let chosen = choose_among(settings, rank, gpus(settings))?;
    if settings.device.device == DeviceChoice::Auto {
        tracing::info!(worker = rank.0, device = ?chosen, "the device that --device auto stands for");
    }
    Ok(chosen)
}

/// Makes the id of the TP group that this worker leads. `None` if the worker computes on a CPU, or if its device cannot
/// be used; loading then reports the error.
pub fn group_id(settings: &WorkerSettings, rank: Rank) -> Result<Option<GroupId>, Error> {
    match choose_among(settings, rank, gpus(settings)) {
        Ok(Chosen::Cuda { .. }) => {}
        Ok(Chosen::Cpu | Chosen::Sim) | Err(_) => return Ok(None),
    }
    GroupId::make().map(Some).map_err(|error| Error::internal(error.to_string()))
}

/// Returns a function that counts the GPUs of this machine and opens the libraries that these settings need.
fn gpus(settings: &WorkerSettings) -> impl FnOnce() -> Result<usize, Missing> {
    let in_group = settings.tensor_parallel.tp > 1;
    let compiles = settings.device.compiled_kernels.is_none();
    move || {
        let count = if compiles { cuda::gpus()? } else { cuda::gpus_without_compiler()? };
        if in_group {
            cuda::collectives()?;
        }
        Ok(count)
    }
}

/// Chooses as [`choose`] does, with `gpus` to count the GPUs.
fn choose_among(
    settings: &WorkerSettings,
    rank: Rank,
    gpus: impl FnOnce() -> Result<usize, Missing>,
) -> Result<Chosen, Error> {
    let refuse = |why: String| Error::invalid("device", why);
    let gpu = |count: usize| Chosen::Cuda { ordinal: rank.0 as usize % count.max(1) };
    match settings.device.device {
        DeviceChoice::Cpu => Ok(Chosen::Cpu),
        DeviceChoice::Sim => Ok(Chosen::Sim),
        DeviceChoice::Cuda => gpus().map(gpu).map_err(|missing| refuse(format!("cuda: {missing}"))),
        DeviceChoice::Auto => match gpus() {
            Ok(count) => Ok(gpu(count)),
            Err(missing) => {
                if !missing.is_driver() {
                    tracing::warn!(worker = rank.0, %missing, "the NVIDIA driver of this machine is not used");
                }
                Ok(Chosen::Cpu)
            }
        },
    }
}

#[cfg(test)]
pub(crate) mod tests;
