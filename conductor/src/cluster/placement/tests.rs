use std::net::{IpAddr, Ipv4Addr};

use proptest::prelude::*;
use tokio::sync::mpsc;
use tutti_proto::{GraphKey, Rank, cluster::v1 as pb};

use super::*;
use crate::cluster::{
    topology::{GroupSpec, Topology},
    workers::{Activity, Booking, Joining},
};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const BOOKING: Booking = Booking { requests: 1, queued_blocks: 2, active_blocks: 0, suspects: 0 };

fn joining(rank: u32) -> Joining {
    Joining { rank: Rank(rank), pid: 1, host: HERE, meeting_path: String::new() }
}

fn whole(tp: u32) -> Workers {
    let mut workers = Workers::new(Topology::all_in_one(tp, tp));
    workers.set_roles(vec![GroupRole::Whole]);
    workers
}

fn ready(workers: &mut Workers, rank: u32) -> WorkerId {
    let id = workers.join(joining(rank), mpsc::channel(1).0);
    workers.get_mut(id).unwrap().phase = pb::WorkerPhase::Ready;
    id
}

/// A request of one block that no worker has cached.
fn query(cached: &Cached) -> PlacementQuery<'_> {
    PlacementQuery { may_decode: true, suspect: false, blocks: 1, cached, most_requests: 100 }
}

fn rank_of(placement: &Placement) -> Rank {
    *placement.members.keys().next().unwrap()
}

fn placed(workers: &Workers) -> Option<Rank> {
    workers.place_request(&query(&Cached::default())).as_ref().map(rank_of)
}

fn chosen(workers: &Workers) -> Rank {
    placed(workers).unwrap()
}

fn key(request: u64) -> GraphKey {
    pb::GraphKey { request, ..Default::default() }.into()
}

#[test]
fn the_least_loaded_ready_worker_is_chosen_and_ties_go_round() {
    let mut workers = whole(1);
    assert_eq!(placed(&workers), None);
    let (a, b) = (ready(&mut workers, 0), ready(&mut workers, 1));
    assert_eq!(chosen(&workers), Rank(0));
    workers.book(a, key(1), BOOKING, Activity::Active);
    assert_eq!(chosen(&workers), Rank(1));
    workers.book(b, key(2), Booking { queued_blocks: 1, ..BOOKING }, Activity::Active);
    assert_eq!(chosen(&workers), Rank(1));
    workers.release(a, key(1));
    workers.release(a, key(1));
    workers.release(b, key(2));
    workers.book(a, key(3), BOOKING, Activity::Active);
    workers.release(a, key(3));
    assert_eq!(chosen(&workers), Rank(1));
    workers.get_mut(b).unwrap().phase = pb::WorkerPhase::Draining;
    assert_eq!(chosen(&workers), Rank(0));
}

#[test]
fn a_group_takes_requests_at_its_leader_once_all_have_loaded() {
    let mut workers = whole(2);
    let first = ready(&mut workers, 0);
    assert_eq!(placed(&workers), None);
    ready(&mut workers, 3);
    assert_eq!(placed(&workers), None, "ranks 0 and 3 are of two groups");
    let second = ready(&mut workers, 1);
    assert_eq!(chosen(&workers), Rank(0));
    assert_eq!(workers.group_of(Rank(0)), [(Rank(0), first), (Rank(1), second)]);
    assert!(workers.leaves_with_its_leader(second) && !workers.leaves_with_its_leader(first));
    assert_eq!((workers.loaded().count(), workers.ready().count()), (3, 1));
    workers.remove(first);
    assert!(!workers.leaves_with_its_leader(second), "its leader is gone already");
    assert_eq!(placed(&workers), None);
}

#[test]
fn two_suspects_are_never_on_one_worker() {
    let mut workers = whole(1);
    let a = ready(&mut workers, 0);
    workers.book(a, key(1), Booking { suspects: 1, ..BOOKING }, Activity::Active);
    let cached = Cached::default();
    let suspect = PlacementQuery { suspect: true, ..query(&cached) };
    assert_eq!(workers.place_request(&suspect), None);
    assert!(placed(&workers).is_some(), "other requests may share the worker");
    workers.release(a, key(1));
    assert!(workers.place_request(&suspect).is_some());
}

#[test]
fn a_worker_that_takes_no_messages_is_turned_away() {
    let mut workers = whole(1);
    let (link, _inbox) = mpsc::channel(1);
    let id = workers.join(joining(0), link);
    workers.get_mut(id).unwrap().phase = pb::WorkerPhase::Ready;
    let drain = || pb::conductor_message::Message::Drain(pb::Drain {});
    workers.send(id, drain());
    assert!(placed(&workers).is_some());
    workers.send(id, drain());
    assert_eq!(placed(&workers), None);
}

#[test]
fn a_rank_that_comes_back_has_a_new_name() {
    let mut workers = whole(1);
    let first = ready(&mut workers, 0);
    workers.remove(first);
    assert_ne!(ready(&mut workers, 0), first);
}

/// Workers of three groups: ranks 0 and 1 prefill, rank 2 decodes, and all other ranks run whole requests.
fn disaggregated(whole: u32) -> Workers {
    let group = |name: &str, replicas| {
        let name = name.to_owned();
        GroupSpec { name, nodes: None, walks: None, tp: 1, replicas, spawned: true }
    };
    let mut groups = vec![group("prefill", 2), group("decode", 1)];
    groups.extend((whole > 0).then(|| group("all", whole)));
    let mut workers = Workers::new(Topology::new(groups));
    workers.set_roles(vec![GroupRole::Prefill, GroupRole::Decode, GroupRole::Whole]);
    workers
}

fn first_placement(workers: &Workers, may_decode: bool) -> Option<(GraphRole, u32)> {
    let cached = Cached::default();
    let placement = workers.place_request(&PlacementQuery { may_decode, ..query(&cached) });
    placement.map(|placement| (placement.role, rank_of(&placement).0))
}

#[test]
fn a_request_begins_with_its_decode_where_there_is_a_prefill_too() {
    let mut workers = disaggregated(0);
    ready(&mut workers, 2);
    assert_eq!(first_placement(&workers, true), None, "no worker prefills");
    let first = ready(&mut workers, 0);
    assert_eq!(first_placement(&workers, true), Some((GraphRole::Decode, 2)));
    assert_eq!(first_placement(&workers, false), Some((GraphRole::Prefill, 0)));
    workers.book(first, key(1), BOOKING, Activity::Active);
    ready(&mut workers, 1);
    assert_eq!(rank_of(&workers.place_prefill(&query(&Cached::default())).unwrap()), Rank(1));
}

#[test]
fn the_less_loaded_side_wins_whole_or_disaggregated() {
    let mut workers = disaggregated(1);
    let (all, _prefill) = (ready(&mut workers, 3), ready(&mut workers, 0));
    assert_eq!(first_placement(&workers, true), Some((GraphRole::Whole, 3)), "no worker only decodes");
    let decode = ready(&mut workers, 2);
    workers.book(all, key(1), BOOKING, Activity::Active);
    assert_eq!(first_placement(&workers, true), Some((GraphRole::Decode, 2)));
    workers.book(decode, key(2), Booking { queued_blocks: 5, ..BOOKING }, Activity::Resting);
    assert_eq!(first_placement(&workers, true), Some((GraphRole::Whole, 3)));
}

fn holding(holders: &[(WorkerId, usize)]) -> Cached {
    Cached::of(holders)
}

#[test]
fn a_prefix_wins_until_its_worker_has_more_to_do_than_it_saves() {
    let mut workers = whole(1);
    let (_, b) = (ready(&mut workers, 0), ready(&mut workers, 1));
    let cached = holding(&[(b, 6)]);
    let long = PlacementQuery { blocks: 10, ..query(&cached) };
    let placement = workers.place_request(&long).unwrap();
    assert_eq!((rank_of(&placement), placement.cached), (Rank(1), 6));
    workers.book(b, key(1), Booking { queued_blocks: 4, ..BOOKING }, Activity::Active);
    assert_eq!(rank_of(&workers.place_request(&long).unwrap()), Rank(1));
    workers.set_decoding(b, key(1), 7);
    let placement = workers.place_request(&long).unwrap();
    assert_eq!(
        (rank_of(&placement), placement.cached),
        (Rank(0), 0),
        "its decodes cost more than the prefix saves"
    );
    workers.set_decoding(b, key(1), 5);
    assert_eq!(rank_of(&workers.place_request(&long).unwrap()), Rank(1));
    let most_requests = 1;
    assert_eq!(
        rank_of(&workers.place_request(&PlacementQuery { most_requests, ..long }).unwrap()),
        Rank(0),
        "the worker is full"
    );
    workers.release(b, key(1));
    assert_eq!(workers.get_mut(b).unwrap().bookings.sum(), Booking::default());
}

/// A worker whose memory has slots for fewer requests than the settings allow.
#[test]
fn a_worker_is_full_with_as_many_requests_as_it_says() {
    let mut workers = whole(1);
    let (small, large) = (ready(&mut workers, 0), ready(&mut workers, 1));
    workers.get_mut(small).unwrap().running_limit = Some(2);
    // The limit of the settings holds even if a worker reports a higher limit.
    workers.get_mut(large).unwrap().running_limit = Some(1000);
    workers.book(large, key(1), Booking { requests: 3, queued_blocks: 9, ..BOOKING }, Activity::Active);
    for (request, expected) in (2..).zip([Rank(0), Rank(0), Rank(1)]) {
        assert_eq!(chosen(&workers), expected, "request {request}");
        workers.book(small, key(request), Booking { queued_blocks: 0, ..BOOKING }, Activity::Active);
    }
    workers.book(large, key(5), Booking { requests: 97, queued_blocks: 0, ..BOOKING }, Activity::Active);
    assert_eq!(chosen(&workers), Rank(0), "both are full, and this one has less to do");
}

#[test]
fn a_worker_that_comes_back_has_nothing_of_what_it_had() {
    let mut workers = whole(1);
    let (_, b) = (ready(&mut workers, 0), ready(&mut workers, 1));
    let cached = holding(&[(b, 6)]);
    workers.remove(b);
    ready(&mut workers, 1);
    let long = PlacementQuery { blocks: 10, ..query(&cached) };
    let placement = workers.place_request(&long).unwrap();
    assert_eq!((rank_of(&placement), placement.cached), (Rank(0), 0));
}

#[test]
fn each_graph_goes_where_its_own_prefix_is() {
    let mut workers = disaggregated(0);
    let (_, b, _) = (ready(&mut workers, 0), ready(&mut workers, 1), ready(&mut workers, 2));
    let cached = holding(&[(b, 3)]);
    let long = PlacementQuery { blocks: 10, ..query(&cached) };
    let placement = workers.place_request(&long).unwrap();
    assert_eq!(
        (placement.role, placement.cached),
        (GraphRole::Decode, 0),
        "the prefill's cache is not the decode's"
    );
    let placement = workers.place_prefill(&long).unwrap();
    assert_eq!((placement.role, rank_of(&placement), placement.cached), (GraphRole::Prefill, Rank(1), 3));
}

proptest! {
    #[test]
    fn no_worker_with_room_costs_less(
        load in prop::collection::vec((0u64..12, 0u64..12, 0usize..10, 0u64..4), 1..6),
        blocks in 1u64..12,
    ) {
        let mut workers = whole(1);
        let mut held = Vec::new();
        let mut costs = Vec::new();
        for (rank, (queued_blocks, active_blocks, cached, requests)) in (0..).zip(load) {
            let id = ready(&mut workers, rank);
            let booking = Booking { requests, queued_blocks, active_blocks, suspects: 0 };
            workers.book(id, key(1), booking, Activity::Active);
            held.push((id, cached));
            costs.push((requests >= 3, blocks.saturating_sub(cached as u64) + queued_blocks + active_blocks, requests));
        }
        let cached = holding(&held);
        let placement = workers.place_request(&PlacementQuery { blocks, most_requests: 3, ..query(&cached) }).unwrap();
        let rank = rank_of(&placement).0 as usize;
        prop_assert_eq!(costs[rank], *costs.iter().min().unwrap());
        prop_assert_eq!(placement.cached, held[rank].1 as u64);
    }

    /// Requests with unrelated prompts spread evenly: the numbers of requests of two workers differ by at most 1.
    #[test]
    fn requests_alike_spread_evenly(ranks in 1u32..6, requests in 1u64..40, blocks in 1u64..9) {
        let mut workers = whole(1);
        (0..ranks).for_each(|rank| _ = ready(&mut workers, rank));
        for request in 1..=requests {
            let cached = Cached::default();
            let placement = workers.place_request(&PlacementQuery { blocks, ..query(&cached) }).unwrap();
            let id = *placement.members.values().next().unwrap();
            workers.book(id, key(request), Booking { queued_blocks: blocks, ..BOOKING }, Activity::Active);
        }
        let counts = || workers.iter().map(|(_, worker)| worker.bookings.sum().requests);
        prop_assert!(counts().max().unwrap() - counts().min().unwrap() <= 1);
    }
}

#[test]
fn a_resting_graph_is_load_but_no_work() {
    let mut workers = whole(1);
    let id = ready(&mut workers, 0);
    workers.book(id, key(1), BOOKING, Activity::Resting);
    let state = |workers: &mut Workers| {
        let worker = workers.get_mut(id).unwrap();
        (!worker.bookings.are_empty(), worker.bookings.have_work(), worker.bookings.sum().requests)
    };
    assert_eq!(state(&mut workers), (true, false, 1));
    workers.activate(id, key(1));
    workers.activate(id, key(1));
    assert_eq!(state(&mut workers), (true, true, 1));
    workers.book(id, key(2), BOOKING, Activity::Resting);
    assert!(workers.release(id, key(1)) && workers.release(id, key(2)));
    assert_eq!(state(&mut workers), (false, false, 0));
}
