//! TP groups: formation, placement at the leader, and the end of a group with one rank.

use tutti_conductor::cluster::{Limits, Topology};
use tutti_proto::cluster::v1::{
    self as pb, conductor_message::Message as FromConductor, form_group::Meeting,
    worker_message::Message as ToConductor,
};
use tutti_runtime::{ErrorKind, health::State};

use crate::bench::{Bench, FakeWorker, hello, limits, read, ready, soon};

fn in_pairs(spawned_workers: u32) -> Limits {
    Limits { topology: Topology::all_in_one(spawned_workers, 2), ..limits(spawned_workers) }
}

async fn formed(worker: &mut FakeWorker) -> (u32, Meeting) {
    match worker.hear().await {
        Some(FromConductor::FormGroup(form)) => {
            assert_eq!(form.size, 2);
            (form.rank, form.meeting.unwrap())
        }
        other => panic!("{other:?} forms no group"),
    }
}

/// Receives the rank and the meeting path of a worker. The leader answers, and then the other ranks receive their
/// messages.
async fn meeting_path(worker: &mut FakeWorker) -> (u32, String) {
    match formed(worker).await {
        (rank, Meeting::SharedMemory(path)) => {
            if rank == 0 {
                worker.say(ToConductor::GroupListening(pb::GroupListening::default())).await;
            }
            (rank, path)
        }
        other => panic!("{other:?} is not in shared memory"),
    }
}

#[tokio::test]
async fn a_group_meets_once_all_have_joined_and_serves_at_its_leader_once_all_have_loaded() {
    let bench = Bench::new(in_pairs(4)).await;
    let mut second = bench.join(1).await;
    // A rank of another group does not complete the first group.
    let mut other = bench.join(2).await;
    let mut leader = bench.join(0).await;
    let meeting = meeting_path(&mut leader).await;
    assert_eq!((meeting.0, meeting_path(&mut second).await), (0, (1, meeting.1.clone())));
    let mut last = bench.join(3).await;
    let another = meeting_path(&mut other).await;
    assert_eq!((another.0, meeting_path(&mut last).await), (0, (1, another.1.clone())));
    assert_ne!(meeting.1, another.1);

    for loaded in [&leader, &other, &last] {
        loaded.say(ToConductor::Ready(ready())).await;
    }
    bench.wait_ready(|state| *state == State::Not("3 of 4 workers have loaded the model".into())).await;
    second.say(ToConductor::Ready(ready())).await;
    bench.wait_ready(|state| *state == State::Ok).await;
    let mut submissions = [bench.submit(1).unwrap(), bench.submit(1).unwrap()];
    for worker in [&mut leader, &mut other] {
        let launch = worker.launched().await;
        worker.finish(launch.key, &[0]).await;
    }
    for submission in &mut submissions {
        // The leader's completion completes the group's graph.
        assert_eq!(read(submission).await.1.unwrap().generated, 1);
    }
    bench.idle().await;
}

#[tokio::test]
async fn the_end_of_one_rank_is_the_end_of_its_group_which_forms_anew_elsewhere() {
    let bench = Bench::new(in_pairs(2)).await;
    for gone in [0, 1] {
        let (mut leader, mut second) = (bench.join(0).await, bench.join(1).await);
        let (_, first_path) = meeting_path(&mut leader).await;
        meeting_path(&mut second).await;
        for rank in [&leader, &second] {
            rank.say(ToConductor::Ready(ready())).await;
        }
        bench.wait_ready(|state| *state == State::Ok).await;
        let (left, gone_too) = if gone == 0 { (second, leader) } else { (leader, second) };
        drop(gone_too);
        bench.wait_ready(|state| matches!(state, State::Not(_))).await;
        let mut left = left;
        assert_eq!(left.hear().await, None, "the other is turned away");
        assert_eq!(bench.submit(1).unwrap_err().kind(), ErrorKind::Unavailable);
        // The rank is free at once, though its process may still run.
        let mut again = (bench.join(1).await, bench.join(0).await);
        assert_ne!(meeting_path(&mut again.1).await.1, first_path);
        drop(again);
        soon("all are gone", async {
            while bench.cluster.status().workers.iter().any(|worker| worker.pid != 0) {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}

#[tokio::test]
async fn ranks_that_join_by_hand_dial_their_leader_where_it_listens() {
    let bench = Bench::new(in_pairs(2)).await;
    let mut leader = bench.try_join_with(hello(2), "").await.unwrap();
    let mut second = bench.try_join_with(hello(3), "").await.unwrap();
    let (0, Meeting::Listen(listen)) = formed(&mut leader).await else {
        panic!("the leader does not listen")
    };
    // A port is ignored if it comes from a rank that was not asked.
    let listening =
        |port| ToConductor::GroupListening(pb::GroupListening { port, ..pb::GroupListening::default() });
    second.say(listening(1)).await;
    leader.say(listening(4321)).await;
    let (1, Meeting::Dial(dial)) = formed(&mut second).await else { panic!("the other does not dial") };
    assert_eq!((dial.address.as_str(), &dial.secret), ("127.0.0.1:4321", &listen.secret));
    assert_eq!(listen.secret.len(), 16);
}

#[tokio::test]
async fn the_id_of_a_group_of_gpus_goes_from_its_leader_to_all_other_ranks() {
    let bench = Bench::new(Limits { topology: Topology::all_in_one(6, 3), ..limits(6) }).await;
    let mut ranks = [bench.join(0).await, bench.join(1).await, bench.join(2).await];
    let mut others = [bench.join(3).await, bench.join(4).await, bench.join(5).await];
    for (group, nccl_id) in [(&mut ranks, vec![7; 128]), (&mut others, Vec::new())] {
        let [leader, followers @ ..] = group;
        let Some(FromConductor::FormGroup(form)) = leader.hear().await else { panic!("no group") };
        assert_eq!((form.rank, form.size, form.nccl_id), (0, 3, Vec::new()), "the leader makes the id");
        let listening = pb::GroupListening { port: 0, nccl_id: nccl_id.clone() };
        leader.say(ToConductor::GroupListening(listening)).await;
        for (rank, follower) in (1..).zip(followers) {
            let Some(FromConductor::FormGroup(theirs)) = follower.hear().await else { panic!("no group") };
            assert_eq!((theirs.rank, &theirs.nccl_id, &theirs.meeting), (rank, &nccl_id, &form.meeting));
        }
    }
}

#[tokio::test]
async fn a_dismissed_group_leaves_with_its_leader() {
    let bench = Bench::new(in_pairs(4)).await;
    let (mut leader, mut second) = (bench.join(0).await, bench.join(1).await);
    meeting_path(&mut leader).await;
    meeting_path(&mut second).await;
    // The leader of rank 3 has not joined, so rank 3 itself is told to leave.
    let mut alone = bench.join(3).await;
    bench.cluster.dismiss();
    assert!(matches!(leader.hear().await, Some(FromConductor::Drain(_))));
    assert!(matches!(alone.hear().await, Some(FromConductor::Drain(_))));
    drop(leader);
    assert_eq!(
        second.hear().await,
        None,
        "it is not told to drain, since it is turned away once its leader has gone"
    );
}

#[tokio::test]
async fn a_group_that_has_outlived_its_conductor_does_not_meet_again() {
    let bench = Bench::outlived(in_pairs(2), 1).await;
    let formed = |rank| pb::Hello { meeting_path: "/dev/shm/group-1".into(), ..hello(rank) };
    let (mut leader, second) =
        (bench.try_join(formed(0)).await.unwrap(), bench.try_join(formed(1)).await.unwrap());
    leader.say(ToConductor::Ready(ready())).await;
    second.say(ToConductor::Ready(ready())).await;
    bench.wait_ready(|state| *state == State::Ok).await;
    let mut submission = bench.submit(1).unwrap();
    // The first message is a launch, and not a meeting.
    let launch = leader.launched().await;
    assert_eq!(launch.key.unwrap().request, 1_000_000_001, "its number is none of the conductor before");
    leader.finish(launch.key, &[0]).await;
    assert_eq!(read(&mut submission).await.1.unwrap().generated, 1);
}

#[tokio::test]
async fn the_rest_of_a_group_that_has_lost_a_rank_with_its_conductor_is_turned_away() {
    let bench = Bench::outlived(in_pairs(2), 1).await;
    let formed = pb::Hello { meeting_path: "/dev/shm/group-1".into(), ..hello(0) };
    let mut leader = bench.try_join(formed).await.unwrap();
    let _new = bench.join(1).await;
    let error = leader.turned_away().await;
    assert!(error.message().contains("a rank of its group was lost"), "{error}");
}
