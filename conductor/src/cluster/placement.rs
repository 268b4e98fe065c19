//! Which worker gets what: the one where it costs least, in blocks of tokens.
//!
//! `cost = uncached prompt blocks + active decode blocks + queued prompt blocks`: what has to be computed of the request
//! itself there, what its steps are shared with, and what has to be computed before. A prefix is worth no more than the
//! wait for it, so load wins in the end.

use tutti_proto::WorkerId;

use super::{
    prefixes::Cached,
    roles::GroupRole,
    workers::{Worker, Workers},
};
use crate::request::{GraphRole, Members};

/// A request that needs a place.
#[derive(Clone, Copy, Debug)]
pub struct PlacementQuery<'a> {
    /// Whether something may follow its first token.
    pub may_decode: bool,
    /// Whether it may be what brings its workers down.
    pub suspect: bool,
    /// Blocks of its prompt and of the output that it has had.
    pub blocks: u64,
    /// Who has how many of them.
    pub cached: &'a Cached,
    /// Requests that a worker runs at a time: with more it lets them wait, whatever else it has.
    pub most_requests: u64,
}

/// Where a request, or a part of it, goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    pub role: GraphRole,
    pub members: Members,
    /// Blocks of its prompt that are there.
    pub cached: u64,
}

/// What a request costs somewhere. The smaller one is better: then who has fewer requests, then who has had fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    full: bool,
    blocks: u64,
    requests: u64,
    launched: u64,
}

impl Cost {
    fn of(wanted: &PlacementQuery<'_>, id: WorkerId, worker: &Worker) -> Self {
        Self {
            full: worker.booked.requests >= wanted.most_requests,
            blocks: wanted.blocks.saturating_sub(wanted.cached.at(id)) + worker.booked.blocks(),
            requests: worker.booked.requests,
            launched: worker.launched,
        }
    }

    /// With a decode there after the prefill that costs this. The prompt is computed but once, so of the decode's worker
    /// only the load counts.
    fn with_decode(self, decode: &Worker, full: bool) -> Self {
        Self {
            full: self.full || full,
            blocks: self.blocks + decode.booked.blocks(),
            requests: decode.booked.requests,
            launched: decode.launched,
        }
    }
}

impl Workers {
    /// Where it costs least of those that have this role. A suspect goes only where no other one is.
    fn cheapest(&self, role: GroupRole, wanted: &PlacementQuery<'_>) -> Option<(Cost, WorkerId, &Worker)> {
        self.ready_for(role)
            .filter(|(_, worker)| !wanted.suspect || worker.booked.suspects == 0)
            .map(|(id, worker)| (Cost::of(wanted, id, worker), id, worker))
            .min_by_key(|(cost, ..)| *cost)
    }

    /// Where a request begins that may or may not have something to decode: as a whole, with a prefill that nothing
    /// follows, or with the room for its decode, which needs somebody to do the prefill. Of a group it is the leader's
    /// alone: the other ranks do as it says and hold nothing of a request, so that its word that a graph is over is the
    /// group's.
    pub fn place_request(&self, wanted: &PlacementQuery<'_>) -> Option<Placement> {
        let whole =
            self.cheapest(GroupRole::Whole, wanted).map(|(cost, id, at)| (cost, GraphRole::Whole, id, at));
        let prefill = self.cheapest(GroupRole::Prefill, wanted);
        let disaggregated = if wanted.may_decode {
            prefill.zip(self.cheapest(GroupRole::Decode, wanted)).map(|((prefill, ..), (decode, id, at))| {
                (prefill.with_decode(at, decode.full), GraphRole::Decode, id, at)
            })
        } else {
            prefill.map(|(cost, id, at)| (cost, GraphRole::Prefill, id, at))
        };
        let (_, role, id, worker) = whole.into_iter().chain(disaggregated).min_by_key(|(cost, ..)| *cost)?;
        Some(Placement::new(role, id, worker, wanted))
    }

    /// Where the prefill of a request goes whose decode has its room.
    pub fn place_prefill(&self, wanted: &PlacementQuery<'_>) -> Option<Placement> {
        let (_, id, worker) = self.cheapest(GroupRole::Prefill, wanted)?;
        Some(Placement::new(GraphRole::Prefill, id, worker, wanted))
    }

    /// Where the media of a request are encoded that `prefill` waits for: there, if it encodes too, and nothing has to leave
    /// the worker.
    pub fn place_encoder(&self, prefill: WorkerId, wanted: &PlacementQuery<'_>) -> Option<Placement> {
        // Encoders keep nothing of what they have encoded.
        let wanted = PlacementQuery { cached: &Cached::default(), ..*wanted };
        let itself = self.ready_for(GroupRole::Encode).find(|(id, _)| *id == prefill);
        let (id, worker) = itself
            .or_else(|| self.cheapest(GroupRole::Encode, &wanted).map(|(_, id, worker)| (id, worker)))?;
        Some(Placement::new(GraphRole::Encode, id, worker, &wanted))
    }
}

impl Placement {
    fn new(role: GraphRole, id: WorkerId, worker: &Worker, wanted: &PlacementQuery<'_>) -> Self {
        Self { role, members: Members::from([(worker.rank, id)]), cached: wanted.cached.at(id) }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use proptest::prelude::*;
    use tokio::sync::mpsc;
    use tutti_proto::{GraphKey, Rank, cluster::v1 as pb};

    use super::*;
    use crate::cluster::{
        topology::{GroupSpec, Topology},
        workers::Booking,
    };

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const BOOKING: Booking = Booking { requests: 1, queued_blocks: 2, active_blocks: 0, suspects: 0 };

    fn whole(tp: u32) -> Workers {
        let mut workers = Workers::of(Topology::all_in_one(tp, tp));
        workers.take_roles(vec![GroupRole::Whole]);
        workers
    }

    fn ready(workers: &mut Workers, rank: u32) -> WorkerId {
        let id = workers.join(Rank(rank), 1, HERE, mpsc::channel(1).0);
        workers.get_mut(id).unwrap().phase = pb::WorkerPhase::Ready;
        id
    }

    /// A request of one block that nobody has.
    fn wanted(cached: &Cached) -> PlacementQuery<'_> {
        PlacementQuery { may_decode: true, suspect: false, blocks: 1, cached, most_requests: 100 }
    }

    fn rank_of(placement: &Placement) -> Rank {
        *placement.members.keys().next().unwrap()
    }

    fn placed(workers: &Workers) -> Option<Rank> {
        workers.place_request(&wanted(&Cached::default())).as_ref().map(rank_of)
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
        workers.book(a, key(1), BOOKING, false);
        assert_eq!(chosen(&workers), Rank(1));
        workers.book(b, key(2), Booking { queued_blocks: 1, ..BOOKING }, false);
        assert_eq!(chosen(&workers), Rank(1));
        workers.release(a, key(1));
        workers.release(a, key(1));
        workers.release(b, key(2));
        workers.book(a, key(3), BOOKING, false);
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
        workers.book(a, key(1), Booking { suspects: 1, ..BOOKING }, false);
        let cached = Cached::default();
        let suspect = PlacementQuery { suspect: true, ..wanted(&cached) };
        assert_eq!(workers.place_request(&suspect), None);
        assert!(placed(&workers).is_some(), "others may stand beside it");
        workers.release(a, key(1));
        assert!(workers.place_request(&suspect).is_some());
    }

    #[test]
    fn a_worker_that_takes_no_messages_is_turned_away() {
        let mut workers = whole(1);
        let (link, _inbox) = mpsc::channel(1);
        let id = workers.join(Rank(0), 1, HERE, link);
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

    /// Ranks 0 and 1 prefill, 2 decodes, and the others do everything.
    fn disaggregated(whole: u32) -> Workers {
        let group = |name: &str, replicas| {
            let name = name.to_owned();
            GroupSpec { name, nodes: None, walks: None, tp: 1, replicas, spawned: true }
        };
        let mut groups = vec![group("prefill", 2), group("decode", 1)];
        groups.extend((whole > 0).then(|| group("all", whole)));
        let mut workers = Workers::of(Topology::new(groups));
        workers.take_roles(vec![GroupRole::Prefill, GroupRole::Decode, GroupRole::Whole]);
        workers
    }

    fn first_placement(workers: &Workers, may_decode: bool) -> Option<(GraphRole, u32)> {
        let cached = Cached::default();
        let placement = workers.place_request(&PlacementQuery { may_decode, ..wanted(&cached) });
        placement.map(|placement| (placement.role, rank_of(&placement).0))
    }

    #[test]
    fn a_request_begins_with_its_decode_where_there_is_a_prefill_too() {
        let mut workers = disaggregated(0);
        ready(&mut workers, 2);
        assert_eq!(first_placement(&workers, true), None, "nobody prefills");
        let first = ready(&mut workers, 0);
        assert_eq!(first_placement(&workers, true), Some((GraphRole::Decode, 2)));
        assert_eq!(first_placement(&workers, false), Some((GraphRole::Prefill, 0)));
        workers.book(first, key(1), BOOKING, false);
        ready(&mut workers, 1);
        assert_eq!(rank_of(&workers.place_prefill(&wanted(&Cached::default())).unwrap()), Rank(1));
    }

    #[test]
    fn whoever_has_less_to_do_takes_it_whole_or_disaggregated() {
        let mut workers = disaggregated(1);
        let (all, _prefill) = (ready(&mut workers, 3), ready(&mut workers, 0));
        assert_eq!(first_placement(&workers, true), Some((GraphRole::Whole, 3)), "nobody decodes apart");
        let decode = ready(&mut workers, 2);
        workers.book(all, key(1), BOOKING, false);
        assert_eq!(first_placement(&workers, true), Some((GraphRole::Decode, 2)));
        workers.book(decode, key(2), Booking { queued_blocks: 5, ..BOOKING }, true);
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
        let long = PlacementQuery { blocks: 10, ..wanted(&cached) };
        let placement = workers.place_request(&long).unwrap();
        assert_eq!((rank_of(&placement), placement.cached), (Rank(1), 6));
        workers.book(b, key(1), Booking { queued_blocks: 4, ..BOOKING }, false);
        assert_eq!(rank_of(&workers.place_request(&long).unwrap()), Rank(1));
        workers.decodes(b, key(1), 7);
        let placement = workers.place_request(&long).unwrap();
        assert_eq!(
            (rank_of(&placement), placement.cached),
            (Rank(0), 0),
            "what decodes there costs more than the prefix saves"
        );
        workers.decodes(b, key(1), 5);
        assert_eq!(rank_of(&workers.place_request(&long).unwrap()), Rank(1));
        let most_requests = 1;
        assert_eq!(
            rank_of(&workers.place_request(&PlacementQuery { most_requests, ..long }).unwrap()),
            Rank(0),
            "it would wait for its turn"
        );
        workers.release(b, key(1));
        assert_eq!(workers.get_mut(b).unwrap().booked, Booking::default());
    }

    #[test]
    fn a_worker_that_comes_back_has_nothing_of_what_it_had() {
        let mut workers = whole(1);
        let (_, b) = (ready(&mut workers, 0), ready(&mut workers, 1));
        let cached = holding(&[(b, 6)]);
        workers.remove(b);
        ready(&mut workers, 1);
        let long = PlacementQuery { blocks: 10, ..wanted(&cached) };
        let placement = workers.place_request(&long).unwrap();
        assert_eq!((rank_of(&placement), placement.cached), (Rank(0), 0));
    }

    #[test]
    fn each_part_goes_where_its_own_prefix_is() {
        let mut workers = disaggregated(0);
        let (_, b, _) = (ready(&mut workers, 0), ready(&mut workers, 1), ready(&mut workers, 2));
        let cached = holding(&[(b, 3)]);
        let long = PlacementQuery { blocks: 10, ..wanted(&cached) };
        let placement = workers.place_request(&long).unwrap();
        assert_eq!(
            (placement.role, placement.cached),
            (GraphRole::Decode, 0),
            "what the prefill has, the decode has not"
        );
        let placement = workers.place_prefill(&long).unwrap();
        assert_eq!((placement.role, rank_of(&placement), placement.cached), (GraphRole::Prefill, Rank(1), 3));
    }

    proptest! {
        #[test]
        fn no_place_that_has_room_costs_less(
            load in prop::collection::vec((0u64..12, 0u64..12, 0usize..10, 0u64..4), 1..6),
            blocks in 1u64..12,
        ) {
            let mut workers = whole(1);
            let mut held = Vec::new();
            let mut costs = Vec::new();
            for (rank, (queued_blocks, active_blocks, cached, requests)) in (0..).zip(load) {
                let id = ready(&mut workers, rank);
                let booking = Booking { requests, queued_blocks, active_blocks, suspects: 0 };
                workers.book(id, key(1), booking, false);
                held.push((id, cached));
                costs.push((requests >= 3, blocks.saturating_sub(cached as u64) + queued_blocks + active_blocks, requests));
            }
            let cached = holding(&held);
            let placement = workers.place_request(&PlacementQuery { blocks, most_requests: 3, ..wanted(&cached) }).unwrap();
            let rank = rank_of(&placement).0 as usize;
            prop_assert_eq!(costs[rank], *costs.iter().min().unwrap());
            prop_assert_eq!(placement.cached, held[rank].1 as u64);
        }

        /// Where prompts share nothing, no worker gets more than one request more than another.
        #[test]
        fn requests_alike_spread_evenly(ranks in 1u32..6, requests in 1u64..40, blocks in 1u64..9) {
            let mut workers = whole(1);
            (0..ranks).for_each(|rank| _ = ready(&mut workers, rank));
            for request in 1..=requests {
                let cached = Cached::default();
                let placement = workers.place_request(&PlacementQuery { blocks, ..wanted(&cached) }).unwrap();
                let id = *placement.members.values().next().unwrap();
                workers.book(id, key(request), Booking { queued_blocks: blocks, ..BOOKING }, false);
            }
            let counts = || workers.iter().map(|(_, worker)| worker.booked.requests);
            prop_assert!(counts().max().unwrap() - counts().min().unwrap() <= 1);
        }
    }

    #[test]
    fn a_graph_that_rests_is_a_load_but_no_work() {
        let mut workers = whole(1);
        let id = ready(&mut workers, 0);
        workers.book(id, key(1), BOOKING, true);
        let state = |workers: &mut Workers| {
            let worker = workers.get_mut(id).unwrap();
            (worker.holds_any(), worker.has_work(), worker.booked.requests)
        };
        assert_eq!(state(&mut workers), (true, false, 1));
        workers.wake(id, key(1));
        workers.wake(id, key(1));
        assert_eq!(state(&mut workers), (true, true, 1));
        workers.book(id, key(2), BOOKING, true);
        assert!(workers.release(id, key(1)) && workers.release(id, key(2)));
        assert_eq!(state(&mut workers), (false, false, 0));
    }
}
