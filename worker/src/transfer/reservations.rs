//! Reservations of requests that will continue on this worker: the secret that allows a push, the lease, and the
//! hand-overs that were accepted.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};
use tutti_kernels::collective::GroupRank;
use tutti_proto::{GraphKey, cluster::v1 as pb};

use super::{freight::Freight, segment::Segment};

/// Maximum number of accepted hand-overs that are remembered, for senders that did not receive the answer. The oldest
/// is forgotten first.
const MAX_REMEMBERED: usize = 1024;

/// Maximum number of failed reservations whose reasons are remembered, for senders that come later.
const MAX_REASONS: usize = 64;

/// All reservations of a worker.
#[derive(Default)]
pub(super) struct Reservations {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: HashMap<GraphKey, Reservation>,
    imported: HashMap<GraphKey, Imported>,
    /// Keys of `imported`, oldest first.
    order: VecDeque<GraphKey>,
    /// Reservations that have failed, with the reasons, oldest first.
    failed: VecDeque<(GraphKey, String)>,
}

struct Reservation {
    secret: Vec<u8>,
    lease: Duration,
    /// `None` until the request holds the space for its units.
    held: Option<Held>,
}

struct Held {
    /// Time at which the sender was last heard from.
    heard: Instant,
    space: ReservedSpace,
}

/// Space that a sender may fill.
#[derive(Clone)]
pub(super) struct ReservedSpace {
    /// Kinds and sizes of the units in the space.
    pub freight: Freight,
    /// The share of the units that this rank takes if the sender is a group of as many ranks. `None` if `freight` is
    /// all that this worker takes.
    pub share: Option<Freight>,
    /// Number of pages or rows in the space.
    pub count: usize,
    /// Number of leading pages that are already valid here. A sender must not fill them.
    pub known: usize,
    /// `None` if no segment could be created. The messages then carry the bytes.
    pub segment: Option<Arc<Segment>>,
}

struct Imported {
    secret: Vec<u8>,
    hand_over: pb::HandOver,
}

/// State that a sender finds under a key.
pub(super) enum Found {
    /// Space that waits to be filled.
    Waiting(ReservedSpace),
    /// The request already continues here, and this is the accepted hand-over.
    Imported(pb::HandOver),
}

/// Reason why a sender finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotFound {
    NoSuchGraph,
    WrongSecret,
}

impl ReservedSpace {
    /// Narrows the space to what a sender announces: whole units, or one rank's share. False if this worker takes no
    /// such units.
    pub fn choose(&mut self, announced: GroupRank) -> bool {
        if let Some(share) = self.share.take_if(|share| share.share == announced) {
            self.freight = share;
        }
        self.freight.share == announced
    }
}

impl Reservations {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a graph that is about to be launched and will receive units. A second call with the same key has no
    /// effect.
    pub fn expect(&self, key: GraphKey, reservation: &pb::PlaneReservation) {
        let lease = Duration::from_millis(reservation.lease_ms.into());
        let secret = reservation.secret.clone();
        self.lock().waiting.entry(key).or_insert(Reservation { secret, lease, held: None });
    }

    /// Opens a reservation to pushes and starts the lease. Returns the reservation's secret; `None` if the request has
    /// ended.
    pub fn hold(&self, key: GraphKey, space: ReservedSpace) -> Option<Vec<u8>> {
        let mut state = self.lock();
        let reservation = state.waiting.get_mut(&key)?;
        reservation.held = Some(Held { heard: Instant::now(), space });
        Some(reservation.secret.clone())
    }

    /// Adds a segment of shared memory that pushes may use.
    pub fn set_segment(&self, key: GraphKey, segment: Segment) {
        if let Some(held) = self.lock().waiting.get_mut(&key).and_then(|waiting| waiting.held.as_mut()) {
            held.space.segment = Some(Arc::new(segment));
        }
    }

    /// Looks up a graph for a sender that shows `secret`.
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

    /// Restarts a reservation's lease. Returns false if the reservation has ended.
    pub fn renew(&self, key: GraphKey) -> bool {
        let mut state = self.lock();
        let held = state.waiting.get_mut(&key).and_then(|waiting| waiting.held.as_mut());
        held.map(|held| held.heard = Instant::now()).is_some()
    }

    /// Ends a waiting reservation by an accepted hand-over. The hand-over is remembered, so that a sender that repeats
    /// the hand-over gets the same answer.
    pub fn accept(&self, key: GraphKey, hand_over: pb::HandOver) {
        let mut state = self.lock();
        let Some(Reservation { secret, .. }) = state.waiting.remove(&key) else { return };
        if state.order.len() == MAX_REMEMBERED
            && let Some(oldest) = state.order.pop_front()
        {
            state.imported.remove(&oldest);
        }
        state.order.push_back(key);
        state.imported.insert(key, Imported { secret, hand_over });
    }

    /// Ends a waiting reservation. An accepted hand-over stays remembered.
    pub fn end(&self, key: GraphKey) {
        self.lock().waiting.remove(&key);
    }

    /// Ends a waiting reservation that has failed, and remembers the reason for its sender. False if none waits.
    pub fn fail(&self, key: GraphKey, reason: String) -> bool {
        let mut state = self.lock();
        if state.waiting.remove(&key).is_none() {
            return false;
        }
        if state.failed.len() == MAX_REASONS {
            state.failed.pop_front();
        }
        state.failed.push_back((key, reason));
        true
    }

    /// The reason why no reservation has this key.
    pub fn why_gone(&self, key: GraphKey) -> String {
        let state = self.lock();
        let failed = state.failed.iter().find(|(failed, _)| *failed == key);
        failed.map_or_else(|| format!("{key} does not wait for planes here"), |(_, reason)| reason.clone())
    }

    /// Waits until a reservation ends. If its sender stays silent for the whole lease, ends the reservation and returns
    /// the lease.
    pub async fn expired(&self, key: GraphKey) -> Option<Duration> {
        loop {
            let (until, lease) = self.lease_until(key)?;
            if Instant::now() >= until {
                self.end(key);
                return Some(lease);
            }
            sleep_until(until).await;
        }
    }

    /// Time at which the lease ends if the sender stays silent, and the lease's length. `None` if no open reservation
    /// has this key.
    pub fn lease_until(&self, key: GraphKey) -> Option<(Instant, Duration)> {
        let state = self.lock();
        let Reservation { lease, held, .. } = state.waiting.get(&key)?;
        Some((held.as_ref()?.heard + *lease, *lease))
    }
}

#[cfg(test)]
mod tests;
