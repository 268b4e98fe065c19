//! A TP group whose ranks are threads of the test. The ranks communicate through shared memory, as processes do.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use tutti_kernels::collective::{Collective, CollectiveError, GroupRank, Patience, SharedMemory};
use tutti_models::{
    LoadFormat, LoadOptions, Model, Quantize,
    lockstep::{Leader, follow},
};

use super::{PAGES, SLOTS, device, options, try_load_with};

/// Timeout of a collective. It is far above the time that a working group needs.
const WAIT: Duration = Duration::from_secs(120);

/// Loads the model in `dir` on a group of `size` ranks and calls `act` with the leader.
pub fn of_ranks<T>(
    size: usize,
    dir: &Path,
    load_format: LoadFormat,
    act: impl FnOnce(&mut dyn Model) -> T,
) -> T {
    of_ranks_as(size, dir, load_format, Quantize::None, act)
}

/// Runs [`of_ranks`] with quantised weights.
pub fn of_ranks_as<T>(
    size: usize,
    dir: &Path,
    load_format: LoadFormat,
    quantize: Quantize,
    act: impl FnOnce(&mut dyn Model) -> T,
) -> T {
    of_ranks_over(size, &options(dir, load_format, quantize), &|_, group| group, act)
}

/// Runs [`of_ranks`] with these options.
pub fn of_ranks_with<T>(size: usize, options: &LoadOptions, act: impl FnOnce(&mut dyn Model) -> T) -> T {
    of_ranks_over(size, options, &|_, group| group, act)
}

/// Runs [`of_ranks`] with whole experts on each rank.
pub fn of_ranks_with_whole_experts<T>(
    size: usize,
    dir: &Path,
    load_format: LoadFormat,
    quantize: Quantize,
    act: impl FnOnce(&mut dyn Model) -> T,
) -> T {
    let options = LoadOptions { expert_parallel: true, ..options(dir, load_format, quantize) };
    of_ranks_over(size, &options, &|_, group| group, act)
}

/// Counts of the bytes that rank 0 has sent in collectives.
#[derive(Default)]
pub struct Traffic {
    /// Bytes that rank 0 has sent in gathers, to the root or to all ranks.
    pub gathered: AtomicUsize,
}

/// Runs [`of_ranks`] and counts the bytes that rank 0 sends.
pub fn of_ranks_counted<T>(
    size: usize,
    dir: &Path,
    load_format: LoadFormat,
    traffic: &Arc<Traffic>,
    act: impl FnOnce(&mut dyn Model) -> T,
) -> T {
    let count = |rank, group| -> Box<dyn Collective> {
        match rank {
            0 => Box::new(Counted { group, traffic: Arc::clone(traffic) }),
            _ => group,
        }
    };
    of_ranks_over(size, &options(dir, load_format, Quantize::None), &count, act)
}

/// A collective that counts the bytes that it sends.
struct Counted {
    group: Box<dyn Collective>,
    traffic: Arc<Traffic>,
}

impl Collective for Counted {
    fn group_rank(&self) -> GroupRank {
        self.group.group_rank()
    }

    fn transport(&self) -> &'static str {
        self.group.transport()
    }

    fn all_reduce(&mut self, data: &mut [f32]) -> Result<(), CollectiveError> {
        self.group.all_reduce(data)
    }

    fn gather(&mut self, part: &[f32], out: Option<&mut [f32]>) -> Result<(), CollectiveError> {
        self.traffic.gathered.fetch_add(size_of_val(part), Ordering::Relaxed);
        self.group.gather(part, out)
    }

    fn all_gather(&mut self, part: &[u8], out: &mut Vec<u8>) -> Result<(), CollectiveError> {
        self.traffic.gathered.fetch_add(part.len(), Ordering::Relaxed);
        self.group.all_gather(part, out)
    }

    fn gather_bytes(&mut self, part: &[u8], out: Option<&mut [u8]>) -> Result<(), CollectiveError> {
        self.traffic.gathered.fetch_add(part.len(), Ordering::Relaxed);
        self.group.gather_bytes(part, out)
    }

    fn scatter_bytes(&mut self, parts: Option<&[u8]>, part: &mut [u8]) -> Result<(), CollectiveError> {
        self.group.scatter_bytes(parts, part)
    }

    fn broadcast(&mut self, message: &mut Vec<u8>, patience: Patience) -> Result<(), CollectiveError> {
        self.group.broadcast(message, patience)
    }
}

/// Runs [`of_ranks`]. `over` wraps or replaces the collective that each rank's device uses.
fn of_ranks_over<T>(
    size: usize,
    options: &LoadOptions,
    over: &(dyn Fn(usize, Box<dyn Collective>) -> Box<dyn Collective> + Sync),
    act: impl FnOnce(&mut dyn Model) -> T,
) -> T {
    let meeting = tempfile::tempdir().unwrap();
    let meet = |what: &str, rank| {
        let group_rank = GroupRank { rank, world_size: size };
        Box::new(SharedMemory::meet(&meeting.path().join(what), group_rank, WAIT, WAIT).unwrap())
    };
    let load = |rank| {
        // Results of checkpoints are compared with references, from which activations in eight bits stray.
        let is_rounded = options.quantize != Quantize::None;
        let device =
            device().with_group(over(rank, meet("data", rank))).with_quantised_activations(is_rounded);
        try_load_with(device, options).unwrap()
    };
    thread::scope(|scope| {
        let (meet, load) = (&meet, &load);
        let follower =
            |rank| move || follow(&mut *load(rank), &mut *meet("plans", rank), &mut (), |_| {}).unwrap();
        let followers: Vec<_> = (1..size).map(|rank| scope.spawn(follower(rank))).collect();
        let mut leader = Leader::new(load(0), meet("plans", 0));
        leader.allocate_planes(PAGES, SLOTS).unwrap();
        let result = act(&mut leader);
        drop(leader);
        followers.into_iter().for_each(|follower| follower.join().unwrap());
        result
    })
}

/// A rank of a group whose other ranks do not exist. Every collective fails, but loading a model needs none.
pub struct Lone(pub GroupRank);

impl Collective for Lone {
    fn group_rank(&self) -> GroupRank {
        self.0
    }

    fn transport(&self) -> &'static str {
        "none"
    }

    fn all_reduce(&mut self, _: &mut [f32]) -> Result<(), CollectiveError> {
        Err(self.alone())
    }

    fn gather(&mut self, _: &[f32], _: Option<&mut [f32]>) -> Result<(), CollectiveError> {
        Err(self.alone())
    }

    fn all_gather(&mut self, _: &[u8], _: &mut Vec<u8>) -> Result<(), CollectiveError> {
        Err(self.alone())
    }

    fn gather_bytes(&mut self, _: &[u8], _: Option<&mut [u8]>) -> Result<(), CollectiveError> {
        Err(self.alone())
    }

    fn scatter_bytes(&mut self, _: Option<&[u8]>, _: &mut [u8]) -> Result<(), CollectiveError> {
        Err(self.alone())
    }

    fn broadcast(&mut self, _: &mut Vec<u8>, _: Patience) -> Result<(), CollectiveError> {
        Err(self.alone())
    }
}

impl Lone {
    fn alone(&self) -> CollectiveError {
        CollectiveError::Transport("a group without its other ranks".to_owned())
    }
}
