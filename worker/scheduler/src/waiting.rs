//! The requests that wait for pages, by ticket and by share.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
};

use crate::{request::Request, shares::ShareId, ticket::Ticket};

/// Accepted requests that hold no pages and wait for them.
#[derive(Debug, Default)]
pub(crate) struct Waiting {
    requests: BTreeMap<Ticket, Request>,
    /// The tickets of each share that has waiting requests.
    by_share: BTreeMap<ShareId, BTreeSet<Ticket>>,
}

impl Waiting {
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Adds a request. True if the request's share had no waiting request before.
    pub fn insert(&mut self, ticket: Ticket, request: Request) -> bool {
        let tickets = self.by_share.entry(request.share).or_default();
        let begins = tickets.is_empty();
        tickets.insert(ticket);
        self.requests.insert(ticket, request);
        begins
    }

    pub fn remove(&mut self, ticket: &Ticket) -> Option<Request> {
        let request = self.requests.remove(ticket)?;
        if let Some(tickets) = self.by_share.get_mut(&request.share) {
            tickets.remove(ticket);
            if tickets.is_empty() {
                self.by_share.remove(&request.share);
            }
        }
        Some(request)
    }

    pub fn get(&self, ticket: &Ticket) -> Option<&Request> {
        self.requests.get(ticket)
    }

    pub fn get_mut(&mut self, ticket: &Ticket) -> Option<&mut Request> {
        self.requests.get_mut(ticket)
    }

    /// The first waiting request of each share, in the order of the shares' numbers. Requests of a share up to the one
    /// in `passed` are left out.
    pub fn firsts<'a>(
        &'a self,
        passed: &'a BTreeMap<ShareId, Ticket>,
    ) -> impl Iterator<Item = (ShareId, Ticket)> + 'a {
        self.by_share.iter().filter_map(move |(&share, tickets)| {
            let from = passed.get(&share).map_or(Bound::Unbounded, |&ticket| Bound::Excluded(ticket));
            let first = tickets.range((from, Bound::Unbounded)).next()?;
            Some((share, *first))
        })
    }
}
