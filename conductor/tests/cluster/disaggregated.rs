//! Disaggregated prefill and decode: launches, reserved rooms, hand-overs, losses and cancels.

use std::time::Duration;

use tutti_conductor::cluster::{GroupSpec, Limits, Topology};
use tutti_proto::cluster::v1::{
    self as pb, completion::Outcome, conductor_message::Message, worker_message::Message as ToConductor,
};
use tutti_runtime::{ErrorKind, health::State};

use crate::bench::{Bench, FakeWorker, hello, limits, metric, read, ready};

fn group(name: &str, walk: &str, tp: u32) -> GroupSpec {
    let walks = Some(vec![walk.to_owned()]);
    GroupSpec { name: name.into(), nodes: None, walks, tp, replicas: 1, spawned: true }
}

fn topology() -> Limits {
    let groups = vec![group("front", "prefill_text", 1), group("back", "thinker_decode", 1)];
    Limits { topology: Topology::new(groups), ..limits(0) }
}

async fn both() -> (Bench, FakeWorker, FakeWorker) {
    let bench = Bench::new(topology()).await;
    let prefill = bench.ready(0).await;
    assert!(matches!(bench.health.ready(), State::Not(why) if why.contains("none of them a decode group")));
    let decode = bench.ready(1).await;
    bench.wait_ready(|state| *state == State::Ok).await;
    (bench, prefill, decode)
}

async fn reserved(worker: &FakeWorker, key: Option<pb::GraphKey>) {
    reserved_at(worker, key, (4321, "")).await;
}

/// The worker has room, and listens at this port or socket.
async fn reserved_at(worker: &FakeWorker, key: Option<pb::GraphKey>, (port, socket): (u32, &str)) {
    let shared_memory = "/dev/shm/room".into();
    let ranks =
        vec![pb::RankRoom { port: 4322, shared_memory: "/dev/shm/share".into(), socket: String::new() }];
    let room = pb::Reserved {
        key,
        port,
        layout_hash: 5,
        shared_memory,
        known_pages: 3,
        ranks,
        socket: socket.into(),
    };
    worker.say(ToConductor::Reserved(room)).await;
}

fn handed_over(generated: u32) -> Option<Outcome> {
    Some(Outcome::HandedOver(pb::HandedOver { generated }))
}

#[tokio::test]
async fn the_prefill_is_told_the_socket_of_a_worker_on_its_machine() {
    let (bench, mut prefill, mut decode) = both().await;
    let _submission = bench.submit(3).unwrap();
    let launch = decode.launched().await;
    reserved_at(&decode, launch.key, (0, "/run/planes-1")).await;
    assert_eq!(prefill.launched().await.send_to.unwrap().address, "unix:/run/planes-1");
}

#[tokio::test]
async fn the_prefill_waits_for_room_at_the_decode_and_is_told_where_it_is() {
    let (bench, mut prefill, mut decode) = both().await;
    let mut submission = bench.submit(3).unwrap();
    let launch = decode.launched().await;
    let reservation = launch.receive.unwrap();
    assert_eq!((reservation.secret.len(), reservation.lease_ms), (16, 30_000));
    reserved(&decode, launch.key).await;
    // A repeated `Reserved` launches nothing.
    reserved(&decode, launch.key).await;
    let first = prefill.launched().await;
    let to = first.send_to.unwrap();
    assert_eq!((to.key, to.address.as_str(), to.layout_hash), (launch.key, "127.0.0.1:4321", 5));
    assert_eq!((to.known_pages, to.ranks), (3, vec![]), "the worker is in no group");
    assert_eq!((to.secret, to.shared_memory.as_str()), (reservation.secret, "/dev/shm/room"));
    prefill.step(first.key, &[0], handed_over(1)).await;
    decode.step(launch.key, &[1], None).await;
    decode.finish(launch.key, &[2]).await;
    let (indices, ending) = read(&mut submission).await;
    assert_eq!((indices, ending.unwrap().generated), (vec![0, 1, 2], 3));
    bench.idle().await;
    assert_eq!(bench.metric("tutti_request_handovers_total"), 1);
    assert_eq!(bench.metric(r#"tutti_completions_dropped_total{reason="duplicate"}"#), 1);
    assert_eq!(bench.metric(r#"tutti_groups_ready{role="prefill"}"#), 1);
}

#[tokio::test]
async fn a_request_of_one_token_needs_no_decode() {
    let (bench, mut prefill, _decode) = both().await;
    let mut submission = bench.submit(1).unwrap();
    let launch = prefill.launched().await;
    assert_eq!((launch.walks.len(), launch.send_to), (1, None));
    prefill.finish(launch.key, &[0]).await;
    assert!(read(&mut submission).await.1.is_ok());
    bench.idle().await;
}

#[tokio::test]
async fn two_groups_that_keep_planes_in_different_layouts_are_refused_by_name() {
    let bench = Bench::new(topology()).await;
    let _prefill = bench.ready(0).await;
    let mut decode = bench.join(1).await;
    decode.say(ToConductor::Ready(pb::Ready { layout_hash: 9, ..ready() })).await;
    let error = decode.turned_away().await;
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(
        error.message().contains(r#"group "back""#) && error.message().contains(r#"group "front""#),
        "{error}"
    );
}

#[tokio::test]
async fn workers_that_store_planes_in_different_types_are_refused_by_name() {
    let of = |element_type: pb::ElementType| {
        let mut ready = ready();
        let paged = pb::PagedPlane {
            page_tokens: 16,
            ratio: 1,
            bytes_per_entry: 64,
            element_type: element_type.into(),
        };
        let plane = pb::Plane { name: "kv".into(), kind: Some(pb::plane::Kind::Paged(paged)) };
        ready.model.as_mut().unwrap().declaration.as_mut().unwrap().planes.push(plane);
        ready
    };
    let bench = Bench::new(topology()).await;
    let _prefill = bench.ready_with(0, of(pb::ElementType::Bf16)).await;
    let mut decode = bench.join(1).await;
    decode.say(ToConductor::Ready(of(pb::ElementType::Fp8))).await;
    let error = decode.turned_away().await;
    assert_eq!(error.field(), Some("kv_cache_dtype"), "{error}");
    for word in [r#"group "back""#, r#"group "front""#, "BF16", "FP8"] {
        assert!(error.message().contains(word), "{word:?} is not in {error}");
    }
}

#[tokio::test]
async fn a_rank_that_the_topology_does_not_have_is_turned_away() {
    let bench = Bench::new(topology()).await;
    let Err(error) = bench.try_join_with(hello(2), "").await else { panic!("there is no such rank") };
    assert!(error.message().contains("is 2, the limit is 1"), "{error}");
}

#[tokio::test]
async fn room_is_given_back_until_a_prefill_is_ready() {
    let (bench, prefill, mut decode) = both().await;
    let mut submission = bench.submit(2).unwrap();
    let first = decode.launched().await.key;
    drop(prefill);
    bench
        .wait_ready(|state| matches!(state, State::Not(why) if why.contains("none of them a prefill group")))
        .await;
    assert_eq!(bench.submit(2).unwrap_err().kind(), ErrorKind::Unavailable);
    reserved(&decode, first).await;
    assert_eq!(decode.cancelled().await, first);
    decode.confirm_cancel(first).await;
    let mut prefill = bench.ready(0).await;
    let again = decode.launched().await.key;
    assert_eq!(again.unwrap().incarnation, 1);
    // A `Reserved` of the earlier try is dropped.
    reserved(&decode, first).await;
    reserved(&decode, again).await;
    let launch = prefill.launched().await;
    prefill.step(launch.key, &[0], handed_over(1)).await;
    decode.finish(again, &[1]).await;
    assert!(read(&mut submission).await.1.is_ok());
    bench.idle().await;
    assert_eq!(bench.metric("tutti_request_replays_total"), 0, "nothing was lost");
    assert_eq!(bench.metric(r#"tutti_completions_dropped_total{reason="stale"}"#), 1);
}

#[tokio::test]
async fn a_lost_decode_takes_its_prefill_along_and_both_start_over() {
    let (bench, mut prefill, mut decode) = both().await;
    let mut submission = bench.submit(3).unwrap();
    let key = decode.launched().await.key;
    reserved(&decode, key).await;
    let first = prefill.launched().await.key;
    prefill.step(first, &[0], None).await;
    metric(&bench, "tutti_generated_tokens_total", 1).await;
    drop(decode);
    assert_eq!(prefill.cancelled().await, first);
    prefill.confirm_cancel(first).await;
    let mut decode = bench.ready(1).await;
    let again = decode.launched().await;
    assert_eq!((again.key.unwrap().incarnation, &again.generated), (1, &vec![10]));
    reserved(&decode, again.key).await;
    let launch = prefill.launched().await;
    prefill.step(launch.key, &[1], handed_over(2)).await;
    decode.finish(again.key, &[2]).await;
    assert_eq!(read(&mut submission).await.0, [0, 1, 2]);
    bench.idle().await;
}

#[tokio::test]
async fn a_decode_hangs_only_once_it_has_its_prefill() {
    let (bench, mut prefill, mut decode) = both().await;
    let _submission = bench.submit(3).unwrap();
    let key = decode.launched().await.key;
    reserved(&decode, key).await;
    let first = prefill.launched().await.key;
    let mut beats = 0;
    let mut wait = async |ticks: u64, prefills: bool| {
        for _ in 0..ticks {
            beats += 1;
            for (worker, rank, forwards) in [(&prefill, 0, if prefills { beats } else { 0 }), (&decode, 1, 0)]
            {
                let load = pb::WorkerLoad { trace_steps_lost: beats, ..Default::default() };
                worker
                    .say(ToConductor::Heartbeat(pb::Heartbeat {
                        load: Some(load),
                        forwards,
                        ..Default::default()
                    }))
                    .await;
                metric(&bench, &format!(r#"tutti_trace_steps_lost{{worker="{rank}"}}"#), beats).await;
            }
            bench.cluster.tick(Duration::from_secs(1));
        }
    };
    wait(15, true).await;
    assert_eq!(bench.metric("tutti_workers_ready"), 2);
    prefill.step(first, &[0], handed_over(1)).await;
    metric(&bench, "tutti_request_handovers_total", 1).await;
    wait(10, false).await;
    assert_eq!(bench.metric("tutti_workers_ready"), 2);
    wait(1, false).await;
    assert_eq!(bench.metric("tutti_workers_ready"), 1);
    assert_eq!(bench.metric(r#"tutti_workers_fenced_total{reason="hangs"}"#), 1);
}

#[tokio::test]
async fn a_client_that_leaves_frees_both_sides() {
    let (bench, mut prefill, mut decode) = both().await;
    let submission = bench.submit(3).unwrap();
    let key = decode.launched().await.key;
    reserved(&decode, key).await;
    let first = prefill.launched().await.key;
    drop(submission);
    assert_eq!((prefill.cancelled().await, decode.cancelled().await), (first, key));
    prefill.confirm_cancel(first).await;
    decode.confirm_cancel(key).await;
    bench.idle().await;
    let waiting = bench.submit(3).unwrap();
    let key = decode.launched().await.key;
    drop(waiting);
    assert_eq!(decode.cancelled().await, key);
    decode.confirm_cancel(key).await;
    bench.idle().await;
}

/// Receives the `FormGroup` message of a group of two ranks. The leader answers, and then the other rank receives its
/// message.
async fn joins_a_pair(worker: &mut FakeWorker) {
    let Some(Message::FormGroup(form)) = worker.hear().await else { panic!("no group") };
    assert_eq!(form.size, 2);
    if form.rank == 0 {
        worker.say(ToConductor::GroupListening(pb::GroupListening::default())).await;
    }
}

#[tokio::test]
async fn each_group_has_its_own_size() {
    let groups = vec![group("front", "prefill_text", 2), group("back", "thinker_decode", 1)];
    let bench = Bench::new(Limits { topology: Topology::new(groups), ..limits(0) }).await;
    let (mut leader, mut follower) = (bench.join(0).await, bench.join(1).await);
    for worker in [&mut leader, &mut follower] {
        joins_a_pair(worker).await;
        worker.say(ToConductor::Ready(ready())).await;
    }
    let mut decode = bench.ready(2).await;
    bench.wait_ready(|state| *state == State::Ok).await;
    let _submission = bench.submit(2).unwrap();
    let key = decode.launched().await.key;
    reserved(&decode, key).await;
    assert!(leader.launched().await.send_to.is_some());
    // The end of one rank ends its group, and no other group.
    drop(follower);
    assert_eq!(leader.hear().await, None);
    assert_eq!(decode.cancelled().await, key);
    let status = bench.cluster.status().workers;
    let last = status.last().unwrap();
    assert_eq!(
        (last.group.as_str(), last.role(), last.phase()),
        ("back", pb::WorkerRole::DecodeApart, pb::WorkerPhase::Ready)
    );
}

#[tokio::test]
async fn a_group_says_how_many_of_its_ranks_have_joined() {
    let by_hand = GroupSpec { spawned: false, replicas: 3, ..group("back", "thinker_decode", 2) };
    let groups = vec![group("front", "prefill_text", 1), by_hand];
    let bench = Bench::new(Limits { topology: Topology::new(groups), ..limits(0) }).await;
    let _workers = (bench.ready(0).await, bench.try_join_with(hello(4), "").await.unwrap());
    let group = |name: &str, first_rank, ranks, spawned| pb::GroupStatus {
        name: name.into(),
        first_rank,
        ranks,
        joined: 1,
        spawned,
    };
    assert_eq!(bench.cluster.status().groups, [group("front", 0, 1, true), group("back", 1, 6, false)]);
}

#[tokio::test]
async fn a_sender_learns_the_address_of_every_rank_of_its_receiver() {
    let groups = vec![group("front", "prefill_text", 1), group("back", "thinker_decode", 2)];
    let bench = Bench::new(Limits { topology: Topology::new(groups), ..limits(0) }).await;
    let mut prefill = bench.ready(0).await;
    let (mut leader, mut follower) = (bench.join(1).await, bench.join(2).await);
    for worker in [&mut leader, &mut follower] {
        joins_a_pair(worker).await;
        worker.say(ToConductor::Ready(ready())).await;
    }
    bench.wait_ready(|state| *state == State::Ok).await;
    let _submission = bench.submit(2).unwrap();
    let key = leader.launched().await.key;
    reserved(&leader, key).await;
    let to = prefill.launched().await.send_to.unwrap();
    let share =
        pb::RankDestination { address: "127.0.0.1:4322".into(), shared_memory: "/dev/shm/share".into() };
    assert_eq!((to.address.as_str(), to.ranks), ("127.0.0.1:4321", vec![share]));
}
