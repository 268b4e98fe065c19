//! Reservations of requests that will continue on this worker: the secret that allows a push, the lease, and the
//! hand-overs that were accepted.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};
use tonic::{Status, codegen::http::HeaderMap};
use tutti_kernels::collective::GroupRank;
use tutti_proto::{GraphKey, cluster::v1 as pb};

use crate::{UnitLayout, credential, segment::Segment};

/// Maximum number of accepted hand-overs that are remembered, for senders that did not receive the answer. The oldest
/// is forgotten first.
const MAX_REMEMBERED: usize = 1024;

/// Maximum number of failed reservations whose reasons are remembered, for senders that ask later.
const MAX_REASONS: usize = 64;

/// All reservations of a worker.
#[derive(Default)]
pub(crate) struct Reservations {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: HashMap<GraphKey, Reservation>,
    /// Accepted hand-overs, each with its reservation's secret.
    imported: HashMap<GraphKey, (Vec<u8>, pb::HandOver)>,
    /// Keys of `imported`, oldest first.
    order: VecDeque<GraphKey>,
    /// Reservations that have failed, with the reasons, oldest first.
    failed: VecDeque<(GraphKey, String)>,
}

struct Reservation {
    secret: Vec<u8>,
    lease: Duration,
    /// Time at which the sender was last heard from.
    heard: Instant,
    /// Space for the request's units; `None` until the request holds it.
    space: Option<Space>,
}

/// Space that a sender may fill.
#[derive(Clone)]
pub(crate) struct Space {
    /// Kinds and sizes of the units in the space.
    pub layout: UnitLayout,
    /// The share of the units that this rank takes if the sender is a group with the same number of ranks. `None` if
    /// this worker takes only the units of `layout`.
    pub share: Option<UnitLayout>,
    /// Number of pages or rows in the space.
    pub count: usize,
    /// Number of leading pages that this worker already holds. A sender must not fill them.
    pub known: usize,
    /// The segment of shared memory. `None` if no segment could be created, and then the messages carry the bytes.
    pub segment: Option<Arc<Segment>>,
}

/// The state of a key that a sender asks for: space to fill, or an accepted hand-over.
pub(crate) enum Found {
    /// Space that waits to be filled.
    Waiting(Space),
    /// The accepted hand-over. The request already continues on this worker.
    Imported(pb::HandOver),
}

impl Space {
    /// Narrows the space to the units that a sender announces: whole units, or one rank's share. Returns false if this
    /// worker does not take the announced units.
    pub fn choose(&mut self, announced: GroupRank) -> bool {
        if let Some(share) = self.share.take_if(|share| share.share == announced) {
            self.layout = share;
        }
        self.layout.share == announced
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
        self.lock().waiting.entry(key).or_insert(Reservation {
            secret,
            lease,
            heard: Instant::now(),
            space: None,
        });
    }

    /// Opens a reservation to pushes and starts the lease. Returns the reservation's secret and lease; `None` if the
    /// request has ended.
    pub fn hold(&self, key: GraphKey, space: Space) -> Option<pb::PlaneReservation> {
        let mut state = self.lock();
        let Reservation { secret, lease, heard, space: held } = state.waiting.get_mut(&key)?;
        (*heard, *held) = (Instant::now(), Some(space));
        Some(pb::PlaneReservation { secret: secret.clone(), lease_ms: lease.as_millis() as u32 })
    }

    /// Adds a segment of shared memory that pushes may use.
    pub fn set_segment(&self, key: GraphKey, segment: Segment) {
        if let Some(space) = self.lock().waiting.get_mut(&key).and_then(|waiting| waiting.space.as_mut()) {
            space.segment = Some(Arc::new(segment));
        }
    }

    /// Checks that a sender shows the secret of a graph that this worker knows.
    pub fn check(&self, key: GraphKey, headers: &HeaderMap) -> Result<(), Status> {
        let state = self.lock();
        let imported = state.imported.get(&key).map(|(secret, _)| secret);
        let right = imported.or_else(|| state.waiting.get(&key).map(|waiting| &waiting.secret));
        match right {
            Some(right) if credential::is_shown(headers, right) => Ok(()),
            Some(_) => Err(Status::unauthenticated(format!("this is not the secret of {key}"))),
            None => Err(Status::not_found(state.why_gone(key))),
        }
    }

    /// Looks up a graph for a sender whose secret has been checked.
    pub fn find(&self, key: GraphKey) -> Result<Found, Status> {
        let state = self.lock();
        let imported = state.imported.get(&key);
        let waiting = state.waiting.get(&key).filter(|_| imported.is_none());
        let imported = imported.map(|(_, hand_over)| Found::Imported(hand_over.clone()));
        let found = imported.or_else(|| waiting?.space.clone().map(Found::Waiting));
        found.ok_or_else(|| Status::not_found(state.why_gone(key)))
    }

    /// Restarts a reservation's lease. Returns false if the reservation has ended.
    pub fn renew(&self, key: GraphKey) -> bool {
        let mut state = self.lock();
        let open = state.waiting.get_mut(&key).filter(|waiting| waiting.space.is_some());
        open.map(|waiting| waiting.heard = Instant::now()).is_some()
    }

    /// Ends a waiting reservation because its hand-over is accepted. Remembers the hand-over, so that a sender that
    /// repeats it gets the same answer.
    pub fn accept(&self, key: GraphKey, hand_over: pb::HandOver) {
        let mut state = self.lock();
        let Some(Reservation { secret, .. }) = state.waiting.remove(&key) else { return };
        if state.order.len() == MAX_REMEMBERED
            && let Some(oldest) = state.order.pop_front()
        {
            state.imported.remove(&oldest);
        }
        state.order.push_back(key);
        state.imported.insert(key, (secret, hand_over));
    }

    /// Ends a waiting reservation. An accepted hand-over stays remembered.
    pub fn end(&self, key: GraphKey) {
        self.lock().waiting.remove(&key);
    }

    /// Ends a waiting reservation that has failed, and remembers the reason for its sender. False if no reservation
    /// waits.
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
        self.lock().why_gone(key)
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

    /// Returns the time at which the lease ends if the sender stays silent, and the lease's length. `None` if no open
    /// reservation has this key.
    pub fn lease_until(&self, key: GraphKey) -> Option<(Instant, Duration)> {
        let state = self.lock();
        let Reservation { lease, heard, .. } = state.waiting.get(&key).filter(|open| open.space.is_some())?;
        Some((*heard + *lease, *lease))
    }
}

impl State {
    fn why_gone(&self, key: GraphKey) -> String {
        let failed = self.failed.iter().find(|(failed, _)| *failed == key);
        failed.map_or_else(|| format!("{key} does not wait for planes here"), |(_, reason)| reason.clone())
    }
}

#[cfg(test)]
mod tests;
