//! Which cores a worker's threads have for themselves.

use crate::DeviceError;

/// Cores in the order in which workers get them: those of a NUMA node follow each other, and of a node the hardware
/// threads of one core, so that neighbours share memory and caches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cores(Vec<usize>);

/// Where a core is. What the system does not say is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct CoreId {
    node: usize,
    package: usize,
    core: usize,
}

impl Cores {
    /// Those that this process may run on.
    #[cfg(target_os = "linux")]
    pub fn allowed() -> Result<Self, DeviceError> {
        use rustix::thread::{CpuSet, sched_getaffinity};
        let set = sched_getaffinity(None)
            .map_err(|error| DeviceError::Lost(format!("cannot ask which cores there are: {error}")))?;
        Ok(Self::ordered(
            (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).map(|cpu| (system::core_id(cpu), cpu)),
        ))
    }

    /// Those that this process may run on.
    #[cfg(not(target_os = "linux"))]
    pub fn allowed() -> Result<Self, DeviceError> {
        Err(DeviceError::Unsupported("threads of their own cores, on this system".to_owned()))
    }

    fn ordered(cpus: impl Iterator<Item = (CoreId, usize)>) -> Self {
        let mut cpus: Vec<_> = cpus.collect();
        cpus.sort_unstable();
        Self(cpus.into_iter().map(|(_, cpu)| cpu).collect())
    }

    /// The cores of a worker of so many threads, the `index`th on this machine. There are no two workers on a core unless
    /// there are more threads than cores.
    #[must_use]
    pub fn share(&self, index: usize, threads: usize) -> Self {
        let workers = (self.0.len() / threads.max(1)).max(1);
        Self(self.0.iter().copied().cycle().skip(index % workers * threads).take(threads).collect())
    }

    /// Their numbers, one for each thread.
    pub fn numbers(&self) -> &[usize] {
        &self.0
    }
}

/// Lets the calling thread, and those that it starts from now on, run on one core alone.
#[cfg(target_os = "linux")]
pub(super) fn pin(core: usize) -> Result<(), DeviceError> {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set)
        .map_err(|error| DeviceError::Lost(format!("cannot keep a thread on core {core}: {error}")))
}

/// [`Cores`] cannot be had here.
#[cfg(not(target_os = "linux"))]
pub(super) fn pin(_: usize) -> Result<(), DeviceError> {
    Ok(())
}

#[cfg(target_os = "linux")]
mod system {
    use std::fs;

    use super::CoreId;

    /// Where a core is, as far as the system says.
    pub(super) fn core_id(cpu: usize) -> CoreId {
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
mod tests {
    use super::*;

    fn cores(nodes: usize, cores: usize) -> Cores {
        // As Linux often numbers them: every core's first hardware thread, then every core's second.
        let all = nodes * cores;
        Cores::ordered((0..2 * all).map(|cpu| {
            let core = cpu % all;
            (CoreId { node: core % nodes, package: core % nodes, core }, cpu)
        }))
    }

    #[test]
    fn a_workers_cores_are_on_one_node_and_whole() {
        let cores = cores(2, 4);
        // Cores 0, 2, 4, 6 are of node 0; the second thread of core n is 8 + n.
        assert_eq!(cores.numbers(), [0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15]);
        assert_eq!(cores.share(0, 8).numbers(), [0, 8, 2, 10, 4, 12, 6, 14]);
        assert_eq!(cores.share(1, 8).numbers(), [1, 9, 3, 11, 5, 13, 7, 15]);
        assert_eq!(cores.share(3, 2).numbers(), [6, 14]);
    }

    #[test]
    fn workers_share_no_core_while_there_are_enough() {
        let cores = cores(1, 3);
        for threads in 1..=6 {
            let workers = 6 / threads;
            let mut taken: Vec<_> =
                (0..workers).flat_map(|index| cores.share(index, threads).numbers().to_vec()).collect();
            taken.sort_unstable();
            taken.dedup();
            assert_eq!(taken.len(), workers * threads, "{threads} threads");
        }
        assert_eq!(cores.share(5, 4).numbers().len(), 4, "a worker too many has another's");
        assert_eq!(cores.share(0, 8).numbers().len(), 8, "more threads than cores");
    }
}
