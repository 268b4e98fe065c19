//! Settings of the emulated devices. All settings are environment variables.
//!
//! | variable | meaning | default |
//! | --- | --- | --- |
//! | `EMULATED_GPUS` | number of devices | 1 |
//! | `CUDA_VISIBLE_DEVICES` | indexes of the devices that the process sees, as for the real driver | all |
//! | `EMULATED_GPU_MEMORY` | memory per device: bytes, or a number with `MiB` or `GiB` | `2GiB` |
//! | `EMULATED_GPU_CAPABILITY` | compute capability | `9.0` |
//! | `EMULATED_GPU_SEED` | seed of the order of streams and warps; without it, work runs at once and in order | none |
//! | `EMULATED_GPU_PATIENCE` | milliseconds after which seeded work runs even if no host thread waits for it | 5 |
//! | `EMULATED_GPU_CHECKS` | `races`, `uninitialised`, both separated by a comma, or `all` | none |
//! | `EMULATED_GPU_FAULTS` | rules of faults, see [`faults`](crate::faults) | none |
//! | `EMULATED_GPU_THREADS` | host threads per launch; 0 means one per processor | 0 |

use std::time::Duration;

use crate::faults::FaultPlan;

/// Settings of a process.
#[derive(Debug)]
pub struct Settings {
    /// Index of each visible device among all devices.
    pub devices: Vec<usize>,
    /// Bytes of memory per device.
    pub memory_bytes: u64,
    /// Compute capability: major, minor.
    pub capability: (u32, u32),
    /// Seed of every order that CUDA leaves open: the orders of streams and of warps.
    pub seed: Option<u64>,
    /// Time after which seeded work runs even if the host does not wait for it.
    pub patience: Duration,
    /// True to report races.
    pub races: bool,
    /// True to report reads of memory that was never written.
    pub uninitialised: bool,
    /// Host threads per launch; 0 means one per processor.
    pub threads: usize,
    /// Rules of faults on demand.
    pub faults: FaultPlan,
}

impl Settings {
    /// Reads the settings through `variable`, which returns an environment variable's value.
    ///
    /// # Errors
    ///
    /// The name and the value of a variable whose value is wrong.
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let count: usize = parsed(&variable, "EMULATED_GPUS")?.unwrap_or(1);
        let (mut races, mut uninitialised) = (false, false);
        for check in variable("EMULATED_GPU_CHECKS").unwrap_or_default().split(',').filter(|c| !c.is_empty())
        {
            match check.trim() {
                "races" => races = true,
                "uninitialised" => uninitialised = true,
                "all" => (races, uninitialised) = (true, true),
                "none" => {}
                other => return Err(format!("EMULATED_GPU_CHECKS: unknown check {other:?}")),
            }
        }
        Ok(Settings {
            devices: visible(count, variable("CUDA_VISIBLE_DEVICES").as_deref()),
            memory_bytes: match variable("EMULATED_GPU_MEMORY") {
                Some(text) => {
                    bytes(&text).ok_or_else(|| format!("EMULATED_GPU_MEMORY: no size: {text:?}"))?
                }
                None => 2 << 30,
            },
            capability: match variable("EMULATED_GPU_CAPABILITY") {
                Some(text) => capability(&text)
                    .ok_or_else(|| format!("EMULATED_GPU_CAPABILITY: no capability like 9.0: {text:?}"))?,
                None => (9, 0),
            },
            seed: parsed(&variable, "EMULATED_GPU_SEED")?,
            patience: Duration::from_millis(parsed(&variable, "EMULATED_GPU_PATIENCE")?.unwrap_or(5)),
            races,
            uninitialised,
            threads: parsed(&variable, "EMULATED_GPU_THREADS")?.unwrap_or(0),
            faults: FaultPlan::parse(&variable("EMULATED_GPU_FAULTS").unwrap_or_default())
                .map_err(|error| format!("EMULATED_GPU_FAULTS: {error}"))?,
        })
    }
}

fn parsed<T: std::str::FromStr>(
    variable: &impl Fn(&str) -> Option<String>,
    name: &str,
) -> Result<Option<T>, String> {
    let Some(text) = variable(name) else { return Ok(None) };
    text.trim().parse().map(Some).map_err(|_| format!("{name}: no number: {text:?}"))
}

/// Returns the indexes in `CUDA_VISIBLE_DEVICES`, up to the first index that does not exist. As in CUDA, that index and
/// all later ones are ignored.
fn visible(count: usize, list: Option<&str>) -> Vec<usize> {
    let Some(list) = list else { return (0..count).collect() };
    list.split(',').map_while(|index| index.trim().parse().ok().filter(|&index| index < count)).collect()
}

fn bytes(text: &str) -> Option<u64> {
    let (number, unit) = match (text.strip_suffix("GiB"), text.strip_suffix("MiB")) {
        (Some(number), _) => (number, 1 << 30),
        (_, Some(number)) => (number, 1 << 20),
        _ => (text, 1),
    };
    number.trim().parse::<u64>().ok()?.checked_mul(unit)
}

fn capability(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests;
