//! The leader's view of its group's other ranks, for transfers of shares: orders to the ranks, the rooms that they
//! hold, and the bytes that they stage.

mod reports;
mod store;

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::timeout};
use tonic::codegen::http::HeaderMap;
use tutti_proto::{
    GraphKey,
    cluster::v1::{self as pb, rank_order::Order},
};

pub(crate) use self::{
    reports::{Reports, report_to},
    store::ShareStore,
};
use crate::{UnitLayout, credential, network::ServiceAddress, send::STAGED_BYTES};

/// The other ranks of a leader's group.
pub(crate) struct Ranks {
    /// Layout of the leader's own share.
    pub layout: UnitLayout,
    /// Secret by which the ranks authenticate their reports. `None` if no secret could be made.
    secret: Option<[u8; 16]>,
    state: Mutex<State>,
    /// Signalled when a rank has made room, or a request has ended.
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// Orders that the engine has not taken yet.
    orders: Vec<pb::RankOrder>,
    /// Requests that an order to the ranks has named.
    known: HashSet<GraphKey>,
    /// The room that each rank from rank 1 on holds for a request, until the leader announces its own room.
    rooms: HashMap<GraphKey, Vec<Option<pb::RankRoom>>>,
    /// Total of the bytes that each rank was told to stage.
    staged: u64,
    /// Total of the bytes that each rank from rank 1 on has sent or dropped.
    released: Vec<u64>,
    /// True if the engine has asked for room and has found little.
    is_short: bool,
    /// True once an order was queued.
    is_used: bool,
    /// The reason why no shares are exchanged any more.
    lost: Option<String>,
}

impl Ranks {
    /// Creates the view. If `secret` is an error, no shares are exchanged, and the error is the reason.
    pub fn new(layout: UnitLayout, secret: Result<[u8; 16], String>) -> Self {
        let lost = secret.as_ref().err().cloned();
        let state = State { released: vec![0; layout.share.world_size - 1], lost, ..State::default() };
        Self { layout, secret: secret.ok(), state: Mutex::new(state), changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ranks other than the leader.
    pub fn followers(&self) -> Range<usize> {
        1..self.layout.share.world_size
    }

    /// True if a call shows the secret of the group.
    pub fn is_shown(&self, headers: &HeaderMap) -> bool {
        self.secret.is_some_and(|secret| credential::is_shown(headers, &secret))
    }

    /// Queues the order that lets the ranks report to the leader at this address.
    pub fn order_reports(&self, address: ServiceAddress) {
        let (port, socket) = address.into_fields();
        let secret = self.secret.unwrap_or_default().to_vec();
        let order = Order::ReportTo(pb::ReportTo { port, secret, socket });
        self.lock().orders.push(pb::RankOrder { order: Some(order) });
    }

    /// Queues an order that makes a request known to the ranks. Returns true if no order was queued before.
    pub fn order(&self, key: GraphKey, order: Order) -> bool {
        let mut state = self.lock();
        state.known.insert(key);
        if matches!(order, Order::Reserve(_)) {
            state.rooms.insert(key, vec![None; self.followers().len()]);
        }
        state.orders.push(pb::RankOrder { order: Some(order) });
        !std::mem::replace(&mut state.is_used, true)
    }

    /// Queues the end of a request's share, if the ranks know the request.
    pub fn order_end(&self, key: GraphKey, end: pb::EndShare) {
        let mut state = self.lock();
        if state.known.contains(&key) {
            state.orders.push(pb::RankOrder { order: Some(Order::End(end)) });
        }
    }

    /// Tells the ranks to forget a request, if they know it.
    pub fn forget(&self, key: GraphKey) {
        let mut state = self.lock();
        if state.known.remove(&key) {
            state.rooms.remove(&key);
            state.orders.push(pb::RankOrder { order: Some(Order::Forget(key.into())) });
            drop(state);
            self.changed.notify_waiters();
        }
    }

    /// Records that a request continues on another worker. The ranks' pushes of this request end without an order.
    pub fn handed_over(&self, key: GraphKey) {
        self.lock().known.remove(&key);
    }

    pub fn take_orders(&self) -> Vec<pb::RankOrder> {
        std::mem::take(&mut self.lock().orders)
    }

    /// Records a rank's room for a request.
    pub fn held(&self, key: GraphKey, rank: usize, room: pb::RankRoom) {
        if let Some(rooms) = self.lock().rooms.get_mut(&key) {
            rooms[rank - 1] = Some(room);
        }
        self.changed.notify_waiters();
    }

    /// Waits until all ranks hold room for a request, and returns their rooms. Returns an empty list if the request
    /// ends or a rank's reports end. The sender then sends whole units to the leader. An error names a rank that has
    /// not answered within `patience`.
    pub async fn rooms(&self, key: GraphKey, patience: Duration) -> Result<Vec<pb::RankRoom>, String> {
        let complete = async {
            loop {
                let mut changed = std::pin::pin!(self.changed.notified());
                // Registered before the check, so that a change after the check is not missed.
                changed.as_mut().enable();
                if let Some(rooms) = self.rooms_if_complete(key) {
                    return rooms;
                }
                changed.await;
            }
        };
        timeout(patience, complete).await.map_err(|_| {
            let late =
                self.lock().rooms.remove(&key).and_then(|rooms| rooms.iter().position(Option::is_none));
            format!("rank {} has made no room within {patience:?}", late.unwrap_or(0) + 1)
        })
    }

    fn rooms_if_complete(&self, key: GraphKey) -> Option<Vec<pb::RankRoom>> {
        let mut state = self.lock();
        let rooms = state.rooms.get(&key);
        let is_complete = rooms.is_none_or(|rooms| rooms.iter().all(Option::is_some));
        if is_complete || state.lost.is_some() {
            let rooms = state.rooms.remove(&key).unwrap_or_default();
            return Some(rooms.into_iter().collect::<Option<_>>().unwrap_or_default());
        }
        None
    }

    /// Records why no shares are exchanged any more. Returns the requests that the ranks know.
    pub fn lose(&self, why: &str) -> Vec<GraphKey> {
        let mut state = self.lock();
        state.lost.get_or_insert_with(|| why.to_owned());
        let known = state.known.iter().copied().collect();
        drop(state);
        self.changed.notify_waiters();
        known
    }

    /// The reason why no shares are exchanged any more.
    pub fn lost(&self) -> Option<String> {
        self.lock().lost.clone()
    }

    /// Records that every rank stages this many bytes more.
    pub fn staged(&self, bytes: usize) {
        self.lock().staged += bytes as u64;
    }

    /// Records a rank's total of released bytes. True if the engine may be waiting for room, because the last call of
    /// [`left`](Self::left) returned little.
    pub fn released(&self, rank: usize, total: u64) -> bool {
        let mut state = self.lock();
        state.released[rank - 1] = total;
        std::mem::take(&mut state.is_short)
    }

    /// Number of bytes that every rank can stage now. Unbounded once shares are no longer exchanged.
    pub fn left(&self) -> usize {
        let mut state = self.lock();
        if state.lost.is_some() {
            return usize::MAX;
        }
        let released = state.released.iter().min().copied().unwrap_or(state.staged);
        let bytes = STAGED_BYTES.max(self.layout.largest_unit());
        let left = bytes.saturating_sub(state.staged.saturating_sub(released) as usize);
        state.is_short = left < bytes / 4;
        left
    }
}

#[cfg(test)]
mod tests;
