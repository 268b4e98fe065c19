//! A disaggregated request, with prefill and decode at two workers, case by case.

use std::time::Instant;

use tutti_proto::Rank;
use tutti_runtime::ErrorKind;

use super::{
    super::*,
    replay::{PROMPT, accepted, at, finish, read, row, scores},
};

const PREFILL: WorkerId = WorkerId(1);
const DECODE: WorkerId = WorkerId(2);

pub(super) fn room() -> ReservedRoom {
    ReservedRoom {
        address: "127.0.0.1:9".into(),
        layout_hash: 77,
        shared_memory: "/dev/shm/room".into(),
        known_pages: 3,
        ranks: vec![follower()],
    }
}

fn follower() -> pb::RankDestination {
    pb::RankDestination { address: "127.0.0.1:10".into(), shared_memory: "/dev/shm/share".into() }
}

/// A first try with both graphs launched, and the graphs' keys.
struct Disaggregated {
    request: Request,
    receiver: mailbox::Receiver,
    prefill: Option<pb::GraphKey>,
    decode: Option<pb::GraphKey>,
}

fn disaggregated(max_replays: u32) -> Disaggregated {
    let (mut request, receiver) = accepted(max_replays);
    let decode = request.launch(GraphRole::Decode, at(DECODE), Instant::now()).unwrap().key;
    assert_eq!(request.check_reserved(DECODE, decode.unwrap().into()), Ok(RoomFor::Planes));
    let prefill = request.launch_prefill(at(PREFILL), room(), Instant::now()).unwrap().key;
    Disaggregated { request, receiver, prefill, decode }
}

pub(super) fn said(key: Option<pb::GraphKey>, outcome: pb::completion::Outcome) -> pb::Completion {
    pb::Completion { key, epoch: 9, rank: 0, outcome: Some(outcome) }
}

pub(super) fn handed_over(key: Option<pb::GraphKey>, generated: u32) -> pb::Completion {
    said(key, pb::completion::Outcome::HandedOver(pb::HandedOver { generated }))
}

pub(super) fn handover_failed(key: Option<pb::GraphKey>) -> pb::Completion {
    let fault = Error::unavailable("the other side is gone");
    said(key, pb::completion::Outcome::HandoverFailed(fault.into()))
}

#[test]
fn every_graph_of_a_request_has_the_salt_of_its_prefix() {
    let (mut request, _receiver) = accepted(0);
    let decode = request.launch(GraphRole::Decode, at(DECODE), Instant::now()).unwrap();
    let prefill = request.launch_prefill(at(PREFILL), room(), Instant::now()).unwrap();
    for launch in [decode, prefill] {
        assert_eq!(launch.spec.unwrap().cache_salt, [9; 16]);
    }
}

fn named(worker: WorkerId, key: Option<pb::GraphKey>) -> (WorkerId, GraphKey) {
    (worker, key.unwrap().into())
}

#[test]
fn the_decode_is_launched_first_and_the_prefill_is_told_where_it_is() {
    let (mut request, _receiver) = accepted(0);
    let decode = request.launch(GraphRole::Decode, at(DECODE), Instant::now()).unwrap();
    let reservation = pb::PlaneReservation { secret: vec![9; 16], lease_ms: 500 };
    assert_eq!((decode.walks, decode.receive, decode.send_to), (vec![1], Some(reservation), None));
    assert_eq!(request.launch(GraphRole::Whole, at(PREFILL), Instant::now()), None);
    let prefill = request.launch_prefill(at(PREFILL), room(), Instant::now()).unwrap();
    assert_eq!((prefill.walks, prefill.receive), (vec![0], None));
    assert_ne!(prefill.key, decode.key);
    let to = pb::PlaneDestination {
        key: decode.key,
        address: "127.0.0.1:9".into(),
        secret: vec![9; 16],
        lease_ms: 500,
        layout_hash: 77,
        shared_memory: "/dev/shm/room".into(),
        known_pages: 3,
        ranks: vec![follower()],
        sender: 0,
    };
    assert_eq!(prefill.send_to, Some(to));
    assert_eq!(request.launch_prefill(at(PREFILL), room(), Instant::now()), None);
}

#[test]
fn tokens_come_from_one_worker_and_then_from_the_other() {
    let Disaggregated { mut request, mut receiver, prefill, decode } = disaggregated(0);
    request.on_row(PREFILL, scores(prefill, 0, 1, PROMPT - 1));
    request.on_row(PREFILL, pb::RowReport { cached_tokens: Some(4), ..row(prefill, 1, 0) });
    let effects = request.on_completion(PREFILL, handed_over(prefill, 1));
    assert_eq!((effects.handed_over, effects.begun), (true, vec![named(DECODE, decode)]));
    assert_eq!((effects.released, effects.ended), (vec![named(PREFILL, prefill)], None));
    request.on_row(DECODE, row(decode, 0, 1));
    assert_eq!(request.on_worker_lost(PREFILL, "killed"), Effects::default(), "it has completed its graph");
    let effects = request.on_completion(DECODE, finish(decode, 1, 0, 2));
    assert_eq!((effects.ended, effects.released), (Some(EndingKind::Finished), vec![named(DECODE, decode)]));
    let seen = read(&mut receiver);
    let finished = seen.ending.unwrap().unwrap();
    assert_eq!((seen.tokens, finished.generated, finished.cached_tokens), (vec![0, 1], 2, 4));
    assert!(request.is_over());
}

#[test]
fn rows_of_the_decode_that_overtake_the_prefill_are_kept() {
    let Disaggregated { mut request, mut receiver, prefill, decode } = disaggregated(0);
    for index in [1, 2] {
        assert_eq!(request.on_row(DECODE, row(decode, index - 1, index)), RowOutcome::default());
    }
    let effects = request.on_completion(DECODE, finish(decode, 2, 0, 3));
    assert_eq!((effects.ended, effects.released), (None, vec![named(DECODE, decode)]));
    assert_eq!(read(&mut receiver).tokens, [0u32; 0]);
    assert_eq!(request.on_row(PREFILL, row(prefill, 0, 0)).taken, 3);
    let effects = request.on_completion(PREFILL, handed_over(prefill, 1));
    assert_eq!((effects.ended, effects.handed_over), (Some(EndingKind::Finished), true));
    assert_eq!(read(&mut receiver).tokens, [0, 1, 2]);
    assert!(request.is_over());
}

#[test]
fn a_first_token_that_is_the_last_cancels_the_decode() {
    let Disaggregated { mut request, mut receiver, prefill, decode } = disaggregated(0);
    request.on_row(PREFILL, row(prefill, 0, 0));
    let effects = request.on_completion(PREFILL, finish(prefill, 1, 0, 1));
    assert_eq!((effects.ended, effects.cancel), (Some(EndingKind::Finished), vec![named(DECODE, decode)]));
    assert!(read(&mut receiver).ending.unwrap().is_ok() && !request.is_over());
    request.on_completion(DECODE, said(decode, pb::completion::Outcome::Cancelled(pb::CancelledOutcome {})));
    assert!(request.is_over());
}

#[test]
fn only_the_expected_room_counts() {
    let (mut request, _receiver) = accepted(1);
    let key = |graph, incarnation| pb::GraphKey { request: 7, incarnation, graph }.into();
    assert_eq!(request.check_reserved(DECODE, key(1, 0)), Err(Dropped::Unknown), "not launched yet");
    request.launch(GraphRole::Decode, at(DECODE), Instant::now()).unwrap();
    assert_eq!(request.check_reserved(PREFILL, key(1, 0)), Err(Dropped::Unknown), "from another worker");
    assert_eq!(request.check_reserved(DECODE, key(0, 0)), Err(Dropped::Unknown));
    request.launch_prefill(at(PREFILL), room(), Instant::now()).unwrap();
    assert_eq!(request.check_reserved(DECODE, key(1, 0)), Err(Dropped::Duplicate));
    request.on_worker_lost(PREFILL, "killed");
    assert_eq!(request.check_reserved(DECODE, key(1, 0)), Err(Dropped::Stale));
    request.end_early(Ending::Cancelled);
    assert_eq!(request.check_reserved(DECODE, key(1, 0)), Err(Dropped::Stale));
}

#[test]
fn room_without_a_prefill_is_given_back_and_no_try_is_lost() {
    let (mut request, _receiver) = accepted(0);
    for incarnation in 0..5 {
        let decode = request.launch(GraphRole::Decode, at(DECODE), Instant::now()).unwrap().key;
        assert_eq!(decode.unwrap().incarnation, incarnation);
        let effects = request.give_room_back();
        assert!(effects.needs_placement && !effects.replayed && request.is_waiting());
        assert_eq!(effects.cancel, [named(DECODE, decode)]);
    }
    assert_eq!(request.give_room_back(), Effects::default());
}

#[test]
fn the_loss_of_either_side_starts_both_again() {
    for (victim, left) in [(PREFILL, DECODE), (DECODE, PREFILL)] {
        let Disaggregated { mut request, mut receiver, prefill, decode } = disaggregated(1);
        request.on_row(PREFILL, row(prefill, 0, 0));
        let effects = request.on_worker_lost(victim, "killed");
        let key = |worker| if worker == PREFILL { prefill } else { decode };
        assert!(effects.replayed && effects.needs_placement && request.is_waiting());
        assert_eq!(effects.released, [named(victim, key(victim))]);
        assert_eq!(effects.cancel, [named(left, key(left))]);
        let again = request.launch(GraphRole::Decode, at(WorkerId(5)), Instant::now()).unwrap();
        assert_eq!((again.generated, again.key.unwrap().incarnation), (vec![100], 1));
        let again = request.launch_prefill(at(WorkerId(6)), room(), Instant::now()).unwrap();
        assert_eq!(again.generated, [100]);
        request.on_row(WorkerId(6), row(again.key, 0, 1));
        assert_eq!(request.on_row(DECODE, row(decode, 0, 1)).dropped, 1, "a row of the earlier try");
        assert!(request.on_completion(WorkerId(6), handed_over(again.key, 2)).handed_over);
        assert_eq!(read(&mut receiver).tokens, [0, 1]);
    }
}

#[test]
fn failed_handovers_and_lost_workers_are_counted_separately() {
    let Disaggregated { mut request, mut receiver, prefill, decode } = disaggregated(1);
    let effects = request.on_completion(PREFILL, handover_failed(prefill));
    assert!(effects.replayed && !request.is_suspect());
    assert_eq!(effects.cancel, [named(DECODE, decode)]);
    assert!(
        !request.on_completion(DECODE, handover_failed(decode)).replayed,
        "both sides report the same try"
    );
    request.launch(GraphRole::Decode, at(DECODE), Instant::now()).unwrap();
    assert!(request.on_worker_lost(DECODE, "killed").replayed);
    let decode = request.launch(GraphRole::Decode, at(WorkerId(5)), Instant::now()).unwrap().key;
    let effects = request.on_completion(WorkerId(5), handover_failed(decode));
    assert_eq!(effects.ended, Some(EndingKind::Failed(ErrorKind::Unavailable)));
    let error = read(&mut receiver).ending.unwrap().unwrap_err();
    assert!(error.message().contains("handed over, 2 times") && error.message().contains("the other side"));
}

#[test]
fn a_handover_that_does_not_add_up_is_a_failure() {
    type Event = fn(&mut Disaggregated) -> Effects;
    let events: [(&str, Event); 5] = [
        ("before its token", |all| all.request.on_completion(PREFILL, handed_over(all.prefill, 1))),
        ("of another count", |all| {
            all.request.on_row(PREFILL, row(all.prefill, 0, 0));
            all.request.on_completion(PREFILL, handed_over(all.prefill, 2))
        }),
        ("by the decode", |all| all.request.on_completion(DECODE, handed_over(all.decode, 1))),
        ("with a gap behind it", |all| {
            all.request.on_row(PREFILL, row(all.prefill, 0, 0));
            all.request.on_row(DECODE, row(all.decode, 0, 2));
            all.request.on_completion(PREFILL, handed_over(all.prefill, 1))
        }),
        ("of a whole graph", |all| {
            let (mut request, receiver) = accepted(0);
            let key = request.launch(GraphRole::Whole, at(PREFILL), Instant::now()).unwrap().key;
            request.on_row(PREFILL, row(key, 0, 0));
            let effects = request.on_completion(PREFILL, handed_over(key, 1));
            (all.request, all.receiver) = (request, receiver);
            effects
        }),
    ];
    for (what, event) in events {
        let mut all = disaggregated(2);
        assert_eq!(event(&mut all).ended, Some(EndingKind::Failed(ErrorKind::Internal)), "{what}");
        assert!(!all.request.is_live());
    }
}

#[test]
fn a_decode_that_fails_while_the_prefill_runs_ends_both() {
    let Disaggregated { mut request, mut receiver, prefill, decode } = disaggregated(2);
    let fault = Error::internal("another layout");
    let effects = request.on_completion(DECODE, said(decode, pb::completion::Outcome::Failed(fault.into())));
    assert_eq!(effects.cancel, [named(PREFILL, prefill)]);
    assert_eq!(read(&mut receiver).ending.unwrap().unwrap_err().kind(), ErrorKind::Internal);
}

#[test]
fn a_prefill_without_a_decode_needs_no_room() {
    let (mut request, mut receiver) = accepted(0);
    let launch = request.launch(GraphRole::Prefill, at(PREFILL), Instant::now()).unwrap();
    assert_eq!((launch.walks, launch.send_to, launch.receive), (vec![0], None, None));
    request.on_row(PREFILL, row(launch.key, 0, 0));
    request.on_completion(PREFILL, finish(launch.key, 1, 0, 1));
    assert!(request.is_over() && read(&mut receiver).ending.unwrap().is_ok());
}

#[test]
fn a_decode_on_several_ranks_is_led_by_its_lowest() {
    let (mut request, _receiver) = accepted(0);
    let both = Members::from([(Rank(2), DECODE), (Rank(3), WorkerId(9))]);
    let decode = request.launch(GraphRole::Decode, both, Instant::now()).unwrap().key.unwrap().into();
    assert_eq!(request.check_reserved(WorkerId(9), decode), Err(Dropped::Unknown));
    assert_eq!(request.check_reserved(DECODE, decode), Ok(RoomFor::Planes));
}

const ENCODER: WorkerId = WorkerId(3);

/// A request with media whose prefill has been launched, and the prefill's key.
fn with_media(max_replays: u32, role: GraphRole) -> (Request, mailbox::Receiver, GraphKey) {
    let (mut request, receiver) = accepted(max_replays);
    let item = |first| pb::MediaItem {
        data: vec![1, 2].into(),
        digest: vec![3; 16],
        runs: vec![pb::MediaRun { first, tokens: 1 }],
        ..Default::default()
    };
    *Arc::get_mut(&mut request.spec).unwrap().media_mut() = vec![item(0), item(2)];
    let mut request = Request { encoders: vec![WalkId(7)], ..request };
    let launch = request.launch(role, at(PREFILL), Instant::now()).unwrap();
    assert_eq!(launch.receive_media, Some(pb::PlaneReservation { secret: vec![9; 16], lease_ms: 500 }));
    let media = launch.spec.unwrap().media;
    assert!(media.iter().all(|item| item.data.is_empty() && item.digest == [3; 16] && item.tokens() == 1));
    (request, receiver, launch.key.unwrap().into())
}

#[test]
fn media_are_encoded_for_the_prefill_once_it_has_room() {
    let (mut request, _receiver, prefill) = with_media(0, GraphRole::Whole);
    assert_eq!(
        request.launch_prefill(at(PREFILL), room(), Instant::now()),
        None,
        "the request waits for no planes"
    );
    assert_eq!(request.check_reserved(ENCODER, prefill), Err(Dropped::Unknown));
    assert_eq!(request.check_reserved(PREFILL, prefill), Ok(RoomFor::Embeddings));
    let launch = request.launch_encode(at(ENCODER), room(), Instant::now()).unwrap();
    let spec = launch.spec.unwrap();
    assert_eq!((launch.walks, spec.prompt, spec.media[1].data.clone()), (vec![7], vec![], vec![1, 2].into()));
    let own = &request.spec.media[1].data;
    assert_eq!(spec.media[1].data.as_ptr(), own.as_ptr(), "a launch copies no media, which are large");
    let send_to = launch.send_to.unwrap();
    assert_eq!((send_to.key.map(GraphKey::from), send_to.layout_hash), (Some(prefill), 77));
    assert_eq!(request.launch_encode(at(ENCODER), room(), Instant::now()), None);
    assert_eq!(request.check_reserved(PREFILL, prefill), Err(Dropped::Duplicate));
    let effects = request.on_completion(ENCODER, handed_over(launch.key, 0));
    assert_eq!((effects.begun, effects.ended), (vec![(PREFILL, prefill)], None));
    assert_eq!(effects.released, [named(ENCODER, launch.key)]);
    let again = request.on_completion(ENCODER, handed_over(launch.key, 0));
    assert_eq!(again.dropped, Some(Dropped::Stale));
    assert_eq!(request.on_worker_lost(ENCODER, "killed"), Effects::default(), "it has completed its graph");
}

#[test]
fn a_dead_encoder_is_replayed_and_a_missing_one_is_awaited() {
    let (mut request, _receiver, prefill) = with_media(1, GraphRole::Prefill);
    let effects = request.give_room_back();
    assert_eq!(
        (effects.needs_placement, effects.replayed, effects.cancel),
        (true, false, vec![(PREFILL, prefill)])
    );
    let prefill = request.launch(GraphRole::Prefill, at(PREFILL), Instant::now()).unwrap().key.unwrap();
    assert_eq!(request.check_reserved(PREFILL, prefill.into()), Ok(RoomFor::Embeddings));
    let encoder = request.launch_encode(at(ENCODER), room(), Instant::now()).unwrap().key;
    let effects = request.on_worker_lost(ENCODER, "killed");
    assert_eq!((effects.replayed, effects.needs_placement), (true, true));
    assert_eq!(
        (effects.released, effects.cancel),
        (vec![named(ENCODER, encoder)], vec![(PREFILL, prefill.into())])
    );
    assert!(request.is_waiting());
}

#[test]
fn an_encoder_that_hands_nothing_over_fails_the_request() {
    let (mut request, mut receiver, _) = with_media(1, GraphRole::Whole);
    let encoder = request.launch_encode(at(ENCODER), room(), Instant::now()).unwrap().key;
    let effects = request.on_completion(ENCODER, finish(encoder, 9, 0, 0));
    assert_eq!(effects.ended, Some(EndingKind::Failed(ErrorKind::Internal)));
    assert!(read(&mut receiver).ending.unwrap().is_err());
}
