//! A TP group whose ranks are threads of the test. They meet in shared memory, as processes do.

use std::{path::Path, thread, time::Duration};

use tutti_kernels::collective::{Collective, CollectiveError, GroupRank, Patience, SharedMemory};
use tutti_models::{
    LoadFormat, Model, NoCourier, Quantize,
    lockstep::{Leader, follow},
};

use super::{PAGES, SLOTS, device, try_load_as};

/// Deadline of a collective, far above what a working group takes.
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
    let meeting = tempfile::tempdir().unwrap();
    let meet = |what: &str, rank| {
        let group_rank = GroupRank { rank, world_size: size };
        Box::new(SharedMemory::meet(&meeting.path().join(what), group_rank, WAIT, WAIT).unwrap())
    };
    let load =
        |rank| try_load_as(device().with_group(meet("data", rank)), dir, load_format, quantize).unwrap();
    thread::scope(|scope| {
        let (meet, load) = (&meet, &load);
        let follower = |rank| {
            move || follow(&mut *load(rank), &mut *meet("plans", rank), &mut NoCourier, |_| {}).unwrap()
        };
        let followers: Vec<_> = (1..size).map(|rank| scope.spawn(follower(rank))).collect();
        let mut leader = Leader::new(load(0), meet("plans", 0));
        leader.allocate_planes(PAGES, SLOTS).unwrap();
        let result = act(&mut leader);
        drop(leader);
        followers.into_iter().for_each(|follower| follower.join().unwrap());
        result
    })
}

/// A rank of a group without the other ranks. It can load, which needs no collective; every collective fails.
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
