//! Assignment of cores to the threads of a machine's workers.

use crate::DeviceError;

/// Logical CPUs in the order of their assignment to workers: ordered by NUMA node, package and physical core, so that
/// adjacent CPUs share memory and caches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cores(Vec<usize>);

/// Position of a logical CPU in the machine's topology. Values that the system does not report are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CoreId {
    node: usize,
    package: usize,
    core: usize,
}

impl Cores {
    /// The cores that this process may run on.
    #[cfg(target_os = "linux")]
    pub fn allowed() -> Result<Self, DeviceError> {
        use rustix::thread::{CpuSet, sched_getaffinity};
        let set = sched_getaffinity(None)
            .map_err(|error| DeviceError::Lost(format!("cannot ask which cores there are: {error}")))?;
        Ok(Self::ordered(
            (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).map(|cpu| (system::core_id(cpu), cpu)),
        ))
    }

    /// The cores that this process may run on.
    #[cfg(not(target_os = "linux"))]
    pub fn allowed() -> Result<Self, DeviceError> {
        Err(DeviceError::Unsupported("threads of their own cores, on this system".to_owned()))
    }

    fn ordered(cpus: impl Iterator<Item = (CoreId, usize)>) -> Self {
        let mut cpus: Vec<_> = cpus.collect();
        cpus.sort_unstable();
        Self(cpus.into_iter().map(|(_, cpu)| cpu).collect())
    }

    /// Returns the cores of the worker with index `index` on this machine, one per thread. Workers share a core only if
    /// there are more threads than cores.
    #[must_use]
    pub fn share(&self, index: usize, threads: usize) -> Self {
        let workers = (self.0.len() / threads.max(1)).max(1);
        Self(self.0.iter().copied().cycle().skip(index % workers * threads).take(threads).collect())
    }

    /// The numbers of the cores, one per thread.
    pub fn numbers(&self) -> &[usize] {
        &self.0
    }
}

/// Pins the calling thread, and the threads that it starts from now on, to one core.
#[cfg(target_os = "linux")]
pub(in crate::cpu) fn pin(core: usize) -> Result<(), DeviceError> {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set)
        .map_err(|error| DeviceError::Lost(format!("cannot keep a thread on core {core}: {error}")))
}

/// Does nothing: [`Cores`] cannot be created on this system.
#[cfg(not(target_os = "linux"))]
pub(in crate::cpu) fn pin(_: usize) -> Result<(), DeviceError> {
    Ok(())
}

#[cfg(target_os = "linux")]
mod system {
    use std::fs;

    use super::CoreId;

    /// Reads the position of a logical CPU from sysfs.
    pub(in crate::cpu) fn core_id(cpu: usize) -> CoreId {
        let directory = format!("/sys/devices/system/cpu/cpu{cpu}");
        let of_topology = |name: &str| -> usize {
            let text = fs::read_to_string(format!("{directory}/topology/{name}")).unwrap_or_default();
            text.trim().parse().unwrap_or(0)
        };
        let node = fs::read_dir(&directory)
            .into_iter()
            .flatten()
            .flatten()
            .find_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok());
        CoreId {
            node: node.unwrap_or(0),
            package: of_topology("physical_package_id"),
            core: of_topology("core_id"),
        }
    }
}

#[cfg(test)]
mod tests;
