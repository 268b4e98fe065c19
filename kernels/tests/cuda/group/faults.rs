//! Tests that every wait for a rank that stays away, leaves or never joins ends with an error, and that the device can
//! then be dropped.

use std::time::{Duration, Instant};

use tutti_kernels::collective::GroupRank;
use tutti_kernels::cuda::{CudaDevice, GroupId, GroupMeeting, KernelCache};
use tutti_kernels::{Collectives, Device, DeviceError, StepResults};

use super::{PATIENCE, Rank, ranks};
use crate::support::{tensor, values};

/// Deadline of collectives that never end.
const DEADLINE: Duration = Duration::from_millis(300);

#[track_caller]
fn assert_lost<T: std::fmt::Debug>(outcome: Result<T, DeviceError>, words: &str) {
    match outcome {
        Err(DeviceError::Lost(why)) => assert!(why.contains(words), "{why}"),
        other => panic!("{other:?} is no loss of the device"),
    }
}

/// Rank 0 enters a collective that rank 1 never joins, waits by calling `wait`, and drops its device.
fn alone_in_a_collective(rank: &Rank, wait: impl Fn(&mut CudaDevice) -> Result<bool, DeviceError>) {
    let mut gpu = rank.join(DEADLINE);
    let mut x = tensor(&mut gpu, 8, &[1.0; 64]);
    if rank.group_rank.is_leader() {
        gpu.all_reduce(&mut x).unwrap();
        assert_lost(wait(&mut gpu), "all-reduce) has not ended at rank 0 of 2 within 300ms");
        assert_lost(gpu.all_reduce(&mut x), "has not ended");
        assert_lost(gpu.download(&x, &mut Vec::new()), "has not ended");
        drop((x, gpu));
    }
    rank.meet("end");
}

/// Waits for the end of a step, up to a limit.
fn collect(gpu: &mut CudaDevice, limit: Option<Duration>) -> Result<bool, DeviceError> {
    let mut done = gpu.end_step()?;
    gpu.collect(&mut done, limit.map(|limit| Instant::now() + limit), &mut StepResults::default())
}

#[test]
fn a_rank_that_stays_away_trips_the_watchdog_of_a_step() {
    ranks("group::faults::a_rank_that_stays_away_trips_the_watchdog_of_a_step", 2, |rank| {
        alone_in_a_collective(rank, |gpu| collect(gpu, None));
    });
}

#[test]
fn a_rank_that_stays_away_trips_the_watchdog_of_a_bounded_step() {
    ranks("group::faults::a_rank_that_stays_away_trips_the_watchdog_of_a_bounded_step", 2, |rank| {
        alone_in_a_collective(rank, |gpu| collect(gpu, Some(PATIENCE)));
    });
}

#[test]
fn a_rank_that_stays_away_trips_the_watchdog_of_a_read() {
    ranks("group::faults::a_rank_that_stays_away_trips_the_watchdog_of_a_read", 2, |rank| {
        alone_in_a_collective(rank, |gpu| {
            let x = gpu.tensor(1, 1)?;
            gpu.download(&x, &mut Vec::new()).map(|()| true)
        });
    });
}

#[test]
fn a_bounded_collect_ends_before_the_watchdog_does() {
    ranks("group::faults::a_bounded_collect_ends_before_the_watchdog_does", 2, |rank| {
        let mut gpu = rank.join(PATIENCE);
        let mut x = tensor(&mut gpu, 8, &[1.0; 64]);
        if rank.group_rank.is_leader() {
            gpu.all_reduce(&mut x).unwrap();
            let mut done = gpu.end_step().unwrap();
            let mut results = StepResults::default();
            let soon = Some(Instant::now() + Duration::from_millis(20));
            assert!(!gpu.collect(&mut done, soon, &mut results).unwrap(), "the other rank has not come");
            rank.meet("waited");
            assert!(gpu.collect(&mut done, None, &mut results).unwrap());
        } else {
            rank.meet("waited");
            gpu.all_reduce(&mut x).unwrap();
        }
        assert_eq!(values(&mut gpu, &x), [2.0; 64]);
        rank.meet("end");
    });
}

#[test]
fn a_rank_that_dies_ends_the_waits_of_the_others() {
    ranks("group::faults::a_rank_that_dies_ends_the_waits_of_the_others", 2, |rank| {
        let mut gpu = rank.join(Duration::from_secs(5));
        let mut x = tensor(&mut gpu, 8, &[1.0; 64]);
        gpu.all_reduce(&mut x).unwrap();
        assert_eq!(values(&mut gpu, &x), [2.0; 64]);
        rank.meet("summed");
        if !rank.group_rank.is_leader() {
            // Nothing is dropped, as in a process that is killed.
            return std::mem::forget((x, gpu));
        }
        // NCCL reports the loss at the call or later, or the deadline passes.
        let lost = gpu.all_reduce(&mut x).and_then(|()| collect(&mut gpu, None));
        assert_lost(lost, "rank 0 of 2");
    });
}

#[test]
fn a_rank_whose_group_never_comes_gives_up() {
    ranks("group::faults::a_rank_whose_group_never_comes_gives_up", 1, |_| {
        let gpu = CudaDevice::open(0, &KernelCache::of_user()).unwrap();
        let group_rank = GroupRank { rank: 0, world_size: 2 };
        let id = GroupId::make().unwrap();
        assert_eq!(GroupId::from_bytes(id.as_bytes()), Some(id));
        assert_eq!(GroupId::from_bytes(&id.as_bytes()[1..]), None);
        let meeting = GroupMeeting { id, group_rank, patience: DEADLINE, deadline: PATIENCE };
        let joined = gpu.join(&meeting).map(|_| ());
        assert_lost(joined, "forming the group) has not ended at rank 0 of 2 within 300ms");
    });
}
