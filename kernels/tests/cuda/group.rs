//! Groups of GPUs, a thread per rank, against groups of CPUs: collectives, and sampling from the ranks' best tokens.

mod collectives;
mod faults;
mod nominations;

use std::time::Duration;

use tutti_kernels::collective::{GroupRank, SharedMemory};
use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_kernels::cuda::{self, CudaDevice, GroupId, GroupMeeting, KernelCache};

use crate::support::{Families, skipped};

/// Longest wait of a test for something that happens.
const PATIENCE: Duration = Duration::from_secs(60);

/// A computation of one rank that is the same on every device.
trait RankCase: Sync {
    type Output: Send;
    fn run<D: Families>(&self, device: &mut D) -> Self::Output;
}

/// True if there are `size` GPUs. Too few emulated ones are an error: their number is the caller's choice.
fn has_gpus(test: &str, size: usize) -> bool {
    let missing = match cuda::gpus() {
        Ok(count) if count >= size => match cuda::collectives() {
            Ok(()) => return true,
            Err(missing) => missing.to_string(),
        },
        Ok(count) if std::env::var_os("EMULATED_GPUS").is_none() => {
            eprintln!("{test}: SKIPPED: {size} GPUs are needed, and there are {count}");
            return false;
        }
        Ok(count) => format!("{size} GPUs are needed, and there are {count}: tests/emulated-gpu/run --gpus 4"),
        Err(missing) => missing.to_string(),
    };
    skipped(test, &missing);
    false
}

/// Runs `body` on each GPU of a group, a thread per rank, and returns the ranks' results in order.
fn on_gpus<T: Send>(size: usize, deadline: Duration, body: impl Fn(CudaDevice) -> T + Sync) -> Vec<T> {
    let id = GroupId::make().unwrap();
    on_threads(size, |group_rank| {
        let device = CudaDevice::open(group_rank.rank, &KernelCache::of_user()).unwrap();
        let meeting = GroupMeeting { id, group_rank, patience: PATIENCE, deadline };
        body(device.join(&meeting).unwrap())
    })
}

fn on_cpus<T: Send>(size: usize, body: impl Fn(CpuDevice) -> T + Sync) -> Vec<T> {
    let folder = tempfile::tempdir().unwrap();
    on_threads(size, |group_rank| {
        let group = SharedMemory::meet(&folder.path().join("group"), group_rank, PATIENCE, PATIENCE).unwrap();
        body(CpuDevice::new(1, Isa::detect()).unwrap().with_group(Box::new(group)))
    })
}

fn on_threads<T: Send>(size: usize, body: impl Fn(GroupRank) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let start = |rank| scope.spawn(move || body(GroupRank { rank, world_size: size }));
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The results of a case on all ranks: of GPUs, and of CPUs.
fn both<C: RankCase>(size: usize, case: &C) -> [Vec<C::Output>; 2] {
    [
        on_gpus(size, PATIENCE, |mut device| case.run(&mut device)),
        on_cpus(size, |mut device| case.run(&mut device)),
    ]
}
