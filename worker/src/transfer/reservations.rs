//! Requests that go on here with what is computed elsewhere: who may push, until when, and what has been taken over.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tutti_proto::{GraphKey, cluster::v1 as pb};

use super::{Unit, segment::Segment};

/// Hand-overs that are remembered, for senders that did not hear the answer; the oldest is forgotten first.
const REMEMBERED: usize = 1024;

/// All of a worker's.
#[derive(Default)]
pub(super) struct Reservations {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: HashMap<GraphKey, Reservation>,
    imported: HashMap<GraphKey, Imported>,
    /// Keys of `taken`, oldest first.
    order: VecDeque<GraphKey>,
}

struct Reservation {
    secret: Vec<u8>,
    lease: Duration,
    /// Once the pages are held.
    held: Option<Held>,
}

struct Held {
    /// When the sender was last heard of.
    heard: Instant,
    space: ReservedSpace,
}

/// What a sender may fill.
#[derive(Clone)]
pub(super) struct ReservedSpace {
    /// What it is for.
    pub unit: Unit,
    /// Pages of the one plane, or rows.
    pub count: usize,
    /// The first of them are known here already, and are not to be filled.
    pub known: usize,
    /// None where it could not be made: then bytes come with the messages.
    pub segment: Option<Arc<Segment>>,
}

struct Imported {
    secret: Vec<u8>,
    hand_over: pb::HandOver,
}

/// What a sender finds under a key.
pub(super) enum Found {
    /// ReservedSpace to fill.
    Waiting(ReservedSpace),
    /// The request goes on, by this hand-over.
    Imported(pb::HandOver),
}

/// Why a sender finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotFound {
    NoSuchGraph,
    WrongSecret,
}

impl Reservations {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A graph that receives is about to be launched. A second one of the same key changes nothing.
    pub fn expect(&self, key: GraphKey, reservation: &pb::PlaneReservation) {
        let lease = Duration::from_millis(reservation.lease_ms.into());
        let secret = reservation.secret.clone();
        self.lock().waiting.entry(key).or_insert(Reservation { secret, lease, held: None });
    }

    /// Its room is held: from now on it can be pushed to, and its lease runs. Gives its secret; none if it has ended.
    pub fn hold(&self, key: GraphKey, space: ReservedSpace) -> Option<Vec<u8>> {
        let mut state = self.lock();
        let reservation = state.waiting.get_mut(&key)?;
        reservation.held = Some(Held { heard: Instant::now(), space });
        Some(reservation.secret.clone())
    }

    /// Its pages can be pushed to a segment too.
    pub fn set_segment(&self, key: GraphKey, segment: Segment) {
        if let Some(held) = self.lock().waiting.get_mut(&key).and_then(|waiting| waiting.held.as_mut()) {
            held.space.segment = Some(Arc::new(segment));
        }
    }

    /// For a sender that shows this secret.
    pub fn find(&self, key: GraphKey, secret: &[u8]) -> Result<Found, NotFound> {
        let state = self.lock();
        if let Some(imported) = state.imported.get(&key) {
            let found = Found::Imported(imported.hand_over.clone());
            return if imported.secret == secret { Ok(found) } else { Err(NotFound::WrongSecret) };
        }
        let reservation = state.waiting.get(&key).ok_or(NotFound::NoSuchGraph)?;
        if reservation.secret != secret {
            return Err(NotFound::WrongSecret);
        }
        let held = reservation.held.as_ref().ok_or(NotFound::NoSuchGraph)?;
        Ok(Found::Waiting(held.space.clone()))
    }

    /// Its sender has been heard of. False if it does not wait any more.
    pub fn renew(&self, key: GraphKey) -> bool {
        let mut state = self.lock();
        let held = state.waiting.get_mut(&key).and_then(|waiting| waiting.held.as_mut());
        held.map(|held| held.heard = Instant::now()).is_some()
    }

    /// It goes on here: the same hand-over, coming again, will find it so.
    pub fn accept(&self, key: GraphKey, hand_over: pb::HandOver) {
        let mut state = self.lock();
        let Some(Reservation { secret, .. }) = state.waiting.remove(&key) else { return };
        if state.order.len() == REMEMBERED
            && let Some(oldest) = state.order.pop_front()
        {
            state.imported.remove(&oldest);
        }
        state.order.push_back(key);
        state.imported.insert(key, Imported { secret, hand_over });
    }

    /// It waits for nothing any more. One that was taken stays so.
    pub fn end(&self, key: GraphKey) {
        self.lock().waiting.remove(&key);
    }

    /// When its lease is over if its sender is not heard of before, and how long that is; none if it does not wait any
    /// more.
    pub fn lease_until(&self, key: GraphKey) -> Option<(Instant, Duration)> {
        let state = self.lock();
        let Reservation { lease, held, .. } = state.waiting.get(&key)?;
        Some((held.as_ref()?.heard + *lease, *lease))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(request: u64) -> GraphKey {
        pb::GraphKey { request, incarnation: 0, graph: 1 }.into()
    }

    fn expect(reservations: &Reservations, request: u64) {
        let message = pb::PlaneReservation { secret: vec![request as u8; 16], lease_ms: 1000 };
        reservations.expect(key(request), &message);
    }

    fn space(count: usize) -> ReservedSpace {
        ReservedSpace { unit: Unit::row(8), count, known: 0, segment: None }
    }

    #[test]
    fn a_sender_finds_what_its_secret_opens_once_pages_are_held() {
        let reservations = Reservations::default();
        expect(&reservations, 1);
        let find = |secret: u8| reservations.find(key(1), &[secret; 16]).err();
        assert_eq!(find(1), Some(NotFound::NoSuchGraph), "no pages are held");
        assert!(!reservations.renew(key(1)));
        assert_eq!(reservations.hold(key(1), space(3)), Some(vec![1; 16]));
        assert_eq!((find(1), find(2)), (None, Some(NotFound::WrongSecret)));
        assert!(reservations.renew(key(1)));
        reservations.end(key(1));
        assert_eq!(find(1), Some(NotFound::NoSuchGraph));
        assert!(!reservations.renew(key(1)) && reservations.lease_until(key(1)).is_none());
    }

    #[test]
    fn what_was_taken_is_remembered_but_not_for_ever() {
        let reservations = Reservations::default();
        for request in 0..REMEMBERED as u64 + 1 {
            expect(&reservations, request);
            reservations.hold(key(request), space(1));
            let hand_over = pb::HandOver { computed_tokens: request as u32, ..Default::default() };
            reservations.accept(key(request), hand_over);
            reservations.end(key(request));
        }
        assert_eq!(reservations.find(key(0), &[0; 16]).err(), Some(NotFound::NoSuchGraph));
        let found = reservations.find(key(1), &[1; 16]).ok();
        assert!(matches!(found, Some(Found::Imported(pb::HandOver { computed_tokens: 1, .. }))));
        assert_eq!(reservations.find(key(1), &[9; 16]).err(), Some(NotFound::WrongSecret));
    }
}
