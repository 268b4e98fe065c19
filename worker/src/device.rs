//! The device that a worker computes on.

use tutti_kernels::cuda::{self, Missing};
use tutti_proto::Rank;
use tutti_runtime::Error;
use tutti_settings::{DeviceChoice, Quantize, WorkerSettings};

/// The device of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    Cpu,
    Cuda {
        /// Number of the GPU on the worker's machine.
        ordinal: usize,
    },
    Sim,
}

/// Chooses the device by the settings and by what the worker's machine has, and logs what `auto` stands for.
pub fn choose(settings: &WorkerSettings, rank: Rank) -> Result<Chosen, Error> {
    if let Some(dir) = settings.device.compiled_kernels.as_deref().filter(|dir| !dir.is_dir()) {
        return Err(Error::invalid(
            "compiled_kernels",
            format!("is {}, which is no directory", dir.display()),
        ));
    }
    let gpus = match settings.device.compiled_kernels {
        Some(_) => cuda::gpus_without_compiler,
        None => cuda::gpus,
    };
    let chosen = choose_among(settings, rank, gpus)?;
    if settings.device.device == DeviceChoice::Auto {
        tracing::info!(worker = %rank, device = ?chosen, "the device that --device auto stands for");
    }
    Ok(chosen)
}

/// As [`choose`], on a machine where `gpus` counts the GPUs.
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
        DeviceChoice::Cuda => match (unfit(settings), gpus()) {
            (Some(why), _) => Err(refuse(format!("cuda: {why}"))),
            (None, Ok(count)) => Ok(gpu(count)),
            (None, Err(missing)) => Err(refuse(format!("cuda: {missing}"))),
        },
        DeviceChoice::Auto => match (unfit(settings), gpus()) {
            (None, Ok(count)) => Ok(gpu(count)),
            (Some(why), Ok(_)) => {
                tracing::warn!(worker = %rank, why, "the GPU of this machine is not used");
                Ok(Chosen::Cpu)
            }
            (_, Err(missing)) => {
                if !missing.is_driver() {
                    tracing::warn!(worker = %rank, %missing, "the NVIDIA driver of this machine is not used");
                }
                Ok(Chosen::Cpu)
            }
        },
    }
}

/// The setting that the CUDA device of this build does not serve.
fn unfit(settings: &WorkerSettings) -> Option<String> {
    if settings.tensor_parallel.tp > 1 {
        return Some("this build divides no model among GPUs: --tp needs --device cpu".to_owned());
    }
    if settings.weights.quantize != Quantize::None {
        let quantize = settings.weights.quantize;
        return Some(format!(
            "this build has no weights in {quantize} on GPUs: --quantize needs --device cpu"
        ));
    }
    None
}

#[cfg(test)]
mod tests;
