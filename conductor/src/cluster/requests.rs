//! All requests of the cluster, and the subset that waits for a placement.

use std::collections::{BTreeMap, BTreeSet};

use tutti_proto::RequestId;

use crate::request::{Dropped, Request};

/// All requests in flight.
#[derive(Debug, Default)]
pub(super) struct Requests {
    by_id: BTreeMap<RequestId, Request>,
    /// Requests that no worker could take when they needed a placement.
    waiting: BTreeSet<RequestId>,
    /// The id of the newest request. Ids count up from 1.
    newest: u64,
}

impl Requests {
    /// Makes ids begin after `id`.
    pub fn begin_after(&mut self, id: u64) {
        self.newest = id;
    }

    pub fn mint_id(&mut self) -> RequestId {
        self.newest += 1;
        RequestId(self.newest)
    }

    pub fn insert(&mut self, id: RequestId, request: Request) {
        self.by_id.insert(id, request);
    }

    pub fn get(&self, id: RequestId) -> Option<&Request> {
        self.by_id.get(&id)
    }

    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Request> {
        self.by_id.get_mut(&id)
    }

    /// All requests, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = (RequestId, &Request)> {
        self.by_id.iter().map(|(id, request)| (*id, request))
    }

    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    pub fn ids(&self) -> Vec<RequestId> {
        self.by_id.keys().copied().collect()
    }

    /// Keeps a request in the waiting set until it is placed.
    pub fn wait(&mut self, id: RequestId) {
        self.waiting.insert(id);
    }

    pub fn stop_waiting(&mut self, id: RequestId) {
        self.waiting.remove(&id);
    }

    pub fn any_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Removes all waiting requests and returns them, the oldest first.
    pub fn take_waiting(&mut self) -> BTreeSet<RequestId> {
        std::mem::take(&mut self.waiting)
    }

    /// The waiting requests that meet a condition, the oldest first.
    pub fn waiting_where(&self, meets: impl Fn(&Request) -> bool) -> Vec<RequestId> {
        let waiting = self.waiting.iter().copied();
        waiting.filter(|id| self.by_id.get(id).is_some_and(&meets)).collect()
    }

    /// Removes a request if it has ended and no worker holds data of the request. Returns true if the request was
    /// removed.
    pub fn remove_if_over(&mut self, id: RequestId) -> bool {
        let over = self.by_id.get(&id).is_some_and(Request::is_over);
        if over {
            self.by_id.remove(&id);
        }
        over
    }

    /// Returns why a message is dropped if its request is not present. Ids count up, so a missing request with an id up
    /// to the newest one has ended.
    pub fn why_unknown(&self, id: RequestId) -> Dropped {
        if (1..=self.newest).contains(&id.0) { Dropped::Stale } else { Dropped::Unknown }
    }
}
