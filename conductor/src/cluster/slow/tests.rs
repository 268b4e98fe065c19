use std::net::Ipv4Addr;

use tutti_proto::{Rank, cluster::v1 as pb};
use tutti_settings::FaultSettings;

use super::*;
use crate::cluster::{GroupSpec, Joining, Topology, link};

const H100: &str = "cuda, GPU 0, NVIDIA H100, compute capability 9.0";

/// Ready workers, each the leader of a group of its own with these ranks, role and device. The first is 20 times slower
/// than the others.
fn findings(groups: &[(u32, GroupRole, &str)]) -> Vec<Finding> {
    let group = |(tp, ..): &(u32, GroupRole, &str)| GroupSpec {
        name: String::new(),
        nodes: None,
        walks: None,
        tp: *tp,
        replicas: 1,
        spawned: true,
    };
    let mut workers = Workers::new(Topology::new(groups.iter().map(group).collect()));
    workers.set_roles(groups.iter().map(|(_, role, _)| *role).collect());
    let rule = Rule::of(&FaultSettings { slow_worker_steps: 8, ..FaultSettings::default() });
    let (mut rank, mut us) = (0, 200_000);
    for (tp, _, device) in groups {
        for _ in 0..*tp {
            let joining = Joining {
                rank: Rank(rank),
                pid: 1,
                host: Ipv4Addr::LOCALHOST.into(),
                meeting_path: String::new(),
            };
            let id = workers.join(joining, link(1).0);
            let worker = workers.get_mut(id).unwrap();
            worker.phase = pb::WorkerPhase::Ready;
            worker.device = (*device).to_owned();
            let work = pb::StepWork {
                run_us: us,
                tokens: 1,
                decode_rows: 1,
                attended_tokens: 9,
                ..Default::default()
            };
            let report = pb::StepReport { work: Some(work), ..Default::default() };
            (0..8).for_each(|_| worker.steps.take(&report, &rule, Duration::ZERO));
            rank += 1;
        }
        us = 10_000;
    }
    workers.compare(&rule, Duration::ZERO).into_iter().map(|(_, finding)| finding).collect()
}

#[test]
fn gpus_of_one_kind_are_compared() {
    let other = "cuda, GPU 3, NVIDIA H100, compute capability 9.0";
    let found = findings(&[(1, GroupRole::Whole, H100), (1, GroupRole::Whole, other)]);
    assert_eq!(found, [Finding::Slow(20.0), Finding::Sound]);
}

#[test]
fn workers_of_another_kind_are_not_compared() {
    let l4 = "cuda, GPU 1, NVIDIA L4, compute capability 8.9";
    for other in [(1, GroupRole::Whole, l4), (2, GroupRole::Whole, H100), (1, GroupRole::Decode, H100)] {
        assert_eq!(findings(&[(1, GroupRole::Whole, H100), other]), [Finding::Nothing; 2], "{other:?}");
    }
}

#[test]
fn a_worker_without_peers_is_compared_with_none() {
    assert_eq!(findings(&[(1, GroupRole::Whole, H100)]), [Finding::Nothing]);
}
