//! Tests groups of GPUs with a process per rank, as in a cluster. Collectives, and sampling from the ranks' best
//! tokens, are compared with groups of CPUs.

mod collectives;
mod faults;
mod nominations;

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tutti_kernels::collective::{GroupRank, SharedMemory};
use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_kernels::cuda::{self, CudaDevice, GroupId, GroupMeeting, KernelCache};

use crate::support::{Families, skipped};

/// Maximum time that a test waits for an event.
const PATIENCE: Duration = Duration::from_secs(60);
/// Environment variable with the name of the test that a child process runs.
const TEST: &str = "GROUP_TEST";
/// Environment variable with a child process's rank.
const RANK: &str = "GROUP_TEST_RANK";
/// Environment variable with the folder that the ranks share.
const FOLDER: &str = "GROUP_TEST_FOLDER";
/// Line that a child process prints after its body has returned.
const WELL: &str = "the rank has ended well";

/// A computation of one rank that is the same on every device.
trait RankCase: Sync {
    type Output: Send;
    fn run<D: Families>(&self, device: &mut D) -> Self::Output;
}

/// One rank of a test: a process.
struct Rank {
    group_rank: GroupRank,
    folder: PathBuf,
}

impl Rank {
    /// Joins the group of all ranks on the rank's own GPU.
    fn join(&self, deadline: Duration) -> CudaDevice {
        let Self { group_rank, .. } = *self;
        let device = CudaDevice::open(group_rank.rank, &KernelCache::of_user()).unwrap();
        if group_rank.is_leader() {
            self.publish("id", GroupId::make().unwrap().as_bytes());
        }
        let id = GroupId::from_bytes(&self.await_file("id")).unwrap();
        device.join(&GroupMeeting { id, group_rank, patience: PATIENCE, deadline }).unwrap()
    }

    /// Writes a file so that other ranks see all of it or nothing.
    fn publish(&self, name: &str, bytes: &[u8]) {
        let part = self.folder.join(format!(".{name}-{}", self.group_rank.rank));
        std::fs::write(&part, bytes).unwrap();
        std::fs::rename(part, self.folder.join(name)).unwrap();
    }

    fn await_file(&self, name: &str) -> Vec<u8> {
        let (file, began) = (self.folder.join(name), Instant::now());
        while !file.exists() {
            assert!(began.elapsed() < 2 * PATIENCE, "no rank publishes {name}");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::fs::read(file).unwrap()
    }

    /// Waits until all ranks have reached the barrier of this name.
    fn meet(&self, name: &str) {
        let file = |rank| format!("{name}-{rank}");
        self.publish(&file(self.group_rank.rank), &[]);
        (0..self.group_rank.world_size).for_each(|rank| drop(self.await_file(&file(rank))));
    }

    /// Returns the results of a case on this rank: with GPUs, and with CPUs on each instruction path of this machine.
    fn on_both<C: RankCase>(&self, case: &C) -> (C::Output, Vec<(Isa, C::Output)>) {
        let mut device = self.join(PATIENCE);
        let own = case.run(&mut device);
        // Ranks meet before they end, because a rank that ends is an error for the others.
        self.meet("end");
        let GroupRank { rank, world_size } = self.group_rank;
        let of_rank = |isa| (isa, on_cpus(isa, world_size, case).swap_remove(rank));
        (own, Isa::supported().map(of_rank).collect())
    }

    /// Returns the results of [`Self::on_both`]: first those of the GPUs, then those of the CPUs.
    fn all_results<C: RankCase>(&self, case: &C) -> impl Iterator<Item = C::Output> {
        let (own, cpus) = self.on_both(case);
        std::iter::once(own).chain(cpus.into_iter().map(|(_, results)| results))
    }
}

/// Runs `body` in a process per rank. `test` is the calling test's path. If there are too few GPUs, reports this and
/// does nothing. Too few emulated GPUs are an error, because the caller chooses their number.
fn ranks(test: &str, size: usize, body: impl FnOnce(&Rank)) {
    let variable = |name| std::env::var(name).ok();
    if let (Some(name), Some(rank), Some(folder)) = (variable(TEST), variable(RANK), variable(FOLDER)) {
        assert_eq!(name, test, "a child runs its own test");
        let rank = rank.parse().unwrap();
        body(&Rank { group_rank: GroupRank { rank, world_size: size }, folder: folder.into() });
        return eprintln!("{WELL}");
    }
    let enough = match (cuda::gpus(), cuda::collectives()) {
        (Ok(count), Ok(())) if count >= size => Ok(()),
        (Ok(count), _) if count < size && std::env::var_os("EMULATED_GPUS").is_none() => {
            return eprintln!("{test}: SKIPPED: {size} GPUs are needed, and there are {count}");
        }
        (Ok(count), Ok(())) => Err(format!("{size} GPUs are needed, there are {count}: run --gpus 4")),
        (Err(missing), _) | (_, Err(missing)) => Err(missing.to_string()),
    };
    if let Err(why) = enough {
        return skipped(test, &why);
    }
    let folder = tempfile::tempdir().unwrap();
    let start = |rank: usize| -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env(TEST, test)
            .env(RANK, rank.to_string())
            .env(FOLDER, folder.path())
            .stdout(Stdio::null())
            .stderr(File::create(folder.path().join(format!("log-{rank}"))).unwrap())
            .spawn()
            .unwrap()
    };
    let mut running: Vec<(usize, Child)> = (0..size).map(start).enumerate().collect();
    let mut failed = None;
    while !running.is_empty() && failed.is_none() {
        running.retain_mut(|(rank, child)| {
            let Some(status) = child.try_wait().unwrap() else { return true };
            let text = std::fs::read_to_string(folder.path().join(format!("log-{rank}"))).unwrap();
            if !status.success() || !text.contains(WELL) {
                failed.get_or_insert(format!("rank {rank} of {size} failed:\n{text}"));
            }
            false
        });
        std::thread::sleep(Duration::from_millis(5));
    }
    // The other ranks would wait for the failed rank for ever, so their processes are ended.
    for (_, mut child) in running {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(failed.is_none(), "{}", failed.unwrap_or_default());
}

fn on_cpus<C: RankCase>(isa: Isa, size: usize, case: &C) -> Vec<C::Output> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("group");
    std::thread::scope(|scope| {
        let start = |rank| {
            let path = &path;
            scope.spawn(move || {
                let rank = GroupRank { rank, world_size: size };
                let group = SharedMemory::meet(path, rank, PATIENCE, PATIENCE).unwrap();
                let mut device = CpuDevice::new(1, isa).unwrap().with_group(Box::new(group));
                case.run(&mut device)
            })
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
