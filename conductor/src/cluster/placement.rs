//! Which worker gets what.

use tutti_proto::WorkerId;

use super::{
    roles::Role,
    workers::{Worker, Workers},
};
use crate::request::{Part, Placement};

impl Workers {
    /// Of those, the one with the fewest requests, then the fewest tokens, then the fewest launches so far. A suspect goes
    /// only where no other one is.
    fn least_loaded(&self, role: Role, suspect: bool) -> Option<(WorkerId, &Worker)> {
        self.ready_for(role)
            .filter(|(_, worker)| !suspect || worker.booked.suspects == 0)
            .min_by_key(|(_, worker)| (worker.booked, worker.launched))
    }

    /// Where a request begins that may or may not have something to decode: as a whole, with a prefill that nothing
    /// follows, or with the room for its decode, which needs somebody to do the prefill. Of a group it is the leader's
    /// alone: the other ranks do as it says and hold nothing of a request, so that its word that a graph is over is the
    /// group's.
    pub fn place(&self, may_decode: bool, suspect: bool) -> Option<(Part, Placement)> {
        let whole = self.least_loaded(Role::Whole, suspect).map(|at| (Part::Whole, at));
        let prefill = self.least_loaded(Role::Prefill, suspect);
        let apart = if may_decode {
            let decode = prefill.and_then(|_| self.least_loaded(Role::Decode, suspect));
            decode.map(|at| (Part::Decode, at))
        } else {
            prefill.map(|at| (Part::Prefill, at))
        };
        let (part, (id, worker)) =
            whole.into_iter().chain(apart).min_by_key(|(_, (_, worker))| (worker.booked, worker.launched))?;
        Some((part, Placement::from([(worker.rank, id)])))
    }

    /// Where the prefill of a request goes whose decode has its room.
    pub fn place_prefill(&self, suspect: bool) -> Option<Placement> {
        let (id, worker) = self.least_loaded(Role::Prefill, suspect)?;
        Some(Placement::from([(worker.rank, id)]))
    }

    /// Where the media of a request are encoded that `prefill` waits for: there, if it encodes too, and nothing has to leave
    /// the worker.
    pub fn place_encoder(&self, prefill: WorkerId, suspect: bool) -> Option<Placement> {
        let itself = self.ready_for(Role::Encode).find(|(id, _)| *id == prefill);
        let (id, worker) = itself.or_else(|| self.least_loaded(Role::Encode, suspect))?;
        Some(Placement::from([(worker.rank, id)]))
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use tokio::sync::mpsc;
    use tutti_proto::{GraphKey, Rank, cluster::v1 as pb};

    use super::*;
    use crate::cluster::{
        topology::{GroupSpec, Topology},
        workers::Booking,
    };

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const BOOKING: Booking = Booking { requests: 1, tokens: 10, suspects: 0 };

    fn whole(tp: u32) -> Workers {
        let mut workers = Workers::of(Topology::all_in_one(tp, tp));
        workers.take_roles(vec![Role::Whole]);
        workers
    }

    fn ready(workers: &mut Workers, rank: u32) -> WorkerId {
        let id = workers.join(Rank(rank), 1, HERE, mpsc::channel(1).0);
        workers.get_mut(id).unwrap().phase = pb::WorkerPhase::Ready;
        id
    }

    fn chosen(workers: &Workers) -> Rank {
        *workers.place(true, false).unwrap().1.keys().next().unwrap()
    }

    fn key(request: u64) -> GraphKey {
        pb::GraphKey { request, ..Default::default() }.into()
    }

    #[test]
    fn the_least_loaded_ready_worker_is_chosen_and_ties_go_round() {
        let mut workers = whole(1);
        assert_eq!(workers.place(true, false), None);
        let (a, b) = (ready(&mut workers, 0), ready(&mut workers, 1));
        assert_eq!(chosen(&workers), Rank(0));
        workers.book(a, key(1), BOOKING, false);
        assert_eq!(chosen(&workers), Rank(1));
        workers.book(b, key(2), Booking { tokens: 5, ..BOOKING }, false);
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
        assert_eq!(workers.place(true, false), None);
        ready(&mut workers, 3);
        assert_eq!(workers.place(true, false), None, "ranks 0 and 3 are of two groups");
        let second = ready(&mut workers, 1);
        assert_eq!(chosen(&workers), Rank(0));
        assert_eq!(workers.group_of(Rank(0)), [(Rank(0), first), (Rank(1), second)]);
        assert!(workers.leaves_with_its_leader(second) && !workers.leaves_with_its_leader(first));
        assert_eq!((workers.loaded().count(), workers.ready().count()), (3, 1));
        workers.remove(first);
        assert!(!workers.leaves_with_its_leader(second), "its leader is gone already");
        assert_eq!(workers.place(true, false), None);
    }

    #[test]
    fn two_suspects_are_never_on_one_worker() {
        let mut workers = whole(1);
        let a = ready(&mut workers, 0);
        workers.book(a, key(1), Booking { requests: 1, tokens: 1, suspects: 1 }, false);
        assert_eq!(workers.place(true, true), None);
        assert!(workers.place(true, false).is_some(), "others may stand beside it");
        workers.release(a, key(1));
        assert!(workers.place(true, true).is_some());
    }

    #[test]
    fn a_worker_that_takes_no_messages_is_turned_away() {
        let mut workers = whole(1);
        let (link, _inbox) = mpsc::channel(1);
        let id = workers.join(Rank(0), 1, HERE, link);
        workers.get_mut(id).unwrap().phase = pb::WorkerPhase::Ready;
        let drain = || pb::conductor_message::Message::Drain(pb::Drain {});
        workers.send(id, drain());
        assert!(workers.place(true, false).is_some());
        workers.send(id, drain());
        assert_eq!(workers.place(true, false), None);
    }

    #[test]
    fn a_rank_that_comes_back_has_a_new_name() {
        let mut workers = whole(1);
        let first = ready(&mut workers, 0);
        workers.remove(first);
        assert_ne!(ready(&mut workers, 0), first);
    }

    /// Ranks 0 and 1 prefill, 2 decodes, and the others do everything.
    fn apart(whole: u32) -> Workers {
        let group = |name: &str, replicas| {
            let name = name.to_owned();
            GroupSpec { name, nodes: None, walks: None, tp: 1, replicas, spawned: true }
        };
        let mut groups = vec![group("prefill", 2), group("decode", 1)];
        groups.extend((whole > 0).then(|| group("all", whole)));
        let mut workers = Workers::of(Topology::new(groups));
        workers.take_roles(vec![Role::Prefill, Role::Decode, Role::Whole]);
        workers
    }

    fn place(workers: &Workers, may_decode: bool) -> Option<(Part, u32)> {
        workers.place(may_decode, false).map(|(part, at)| (part, at.keys().next().unwrap().0))
    }

    #[test]
    fn a_request_begins_with_its_decode_where_there_is_a_prefill_too() {
        let mut workers = apart(0);
        ready(&mut workers, 2);
        assert_eq!(place(&workers, true), None, "nobody prefills");
        let first = ready(&mut workers, 0);
        assert_eq!(place(&workers, true), Some((Part::Decode, 2)));
        assert_eq!(place(&workers, false), Some((Part::Prefill, 0)));
        workers.book(first, key(1), BOOKING, false);
        ready(&mut workers, 1);
        assert_eq!(workers.place_prefill(false).unwrap().keys().next(), Some(&Rank(1)));
    }

    #[test]
    fn whoever_has_less_to_do_takes_it_whole_or_apart() {
        let mut workers = apart(1);
        let (all, _prefill) = (ready(&mut workers, 3), ready(&mut workers, 0));
        assert_eq!(place(&workers, true), Some((Part::Whole, 3)), "nobody decodes apart");
        let decode = ready(&mut workers, 2);
        workers.book(all, key(1), BOOKING, false);
        assert_eq!(place(&workers, true), Some((Part::Decode, 2)));
        workers.book(decode, key(2), Booking { tokens: 20, ..BOOKING }, true);
        assert_eq!(place(&workers, true), Some((Part::Whole, 3)));
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
