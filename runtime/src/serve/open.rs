//! The open connections of one listener, within limits in total and per peer.
//!
//! An attacker cannot lock others out by reaching a limit. At a limit, idle connections are closed first, the longest
//! idle ones before others. Next are connections that have been busy for a while for callers without a credential. A
//! new connection is refused only if all connections are busy for callers with a credential.

use std::{collections::HashMap, net::IpAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tutti_settings::ConnectionSettings;

use super::{activity::Activity, stream::Peer};
use crate::{descriptors, live::Live};

/// At a limit, one in this many connections is closed at once, so that the table is searched seldom.
const EVICTED_SHARE: usize = 64;
/// Value of `strangers_time`. Probes are answered in much less time.
const STRANGERS_TIME: Duration = Duration::from_secs(2);

/// The table of open connections.
#[derive(Debug)]
pub(super) struct OpenConnections {
    limits: Live<ConnectionSettings>,
    /// Maximum number of connections that the process may have open, whatever the settings say.
    most: usize,
    /// Time after which requests of unknown callers no longer keep their connection open when room is needed.
    strangers_time: Duration,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// Number of connections accepted so far. Makes the keys of `connections`.
    accepted: u64,
    connections: HashMap<u64, (Option<IpAddr>, Arc<Activity>)>,
    per_peer: HashMap<IpAddr, usize>,
}

/// One connection's entry in the table, removed when the value is dropped.
#[derive(Debug)]
pub(super) struct Entry {
    key: u64,
    open: Arc<OpenConnections>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.open.table.lock().remove(self.key);
    }
}

impl OpenConnections {
    /// A table with these limits, or lower ones if the process may not open as many files.
    pub fn new(limits: impl Into<Live<ConnectionSettings>>) -> Arc<Self> {
        Arc::new(Self {
            limits: limits.into(),
            most: descriptors::for_connections(),
            strangers_time: STRANGERS_TIME,
            table: Mutex::default(),
        })
    }

    /// Enters a connection. `None` if a limit is reached and no connection under that limit can be closed.
    pub fn enter(self: &Arc<Self>, peer: Peer, activity: &Arc<Activity>) -> Option<Entry> {
        let peer = network(peer);
        let limits = self.limits.get();
        let (max_open, max_per_peer) =
            ((limits.max_open as usize).min(self.most), limits.max_per_peer as usize);
        let mut table = self.table.lock();
        if let Some(peer) = peer
            && table.per_peer.get(&peer).copied().unwrap_or_default() >= max_per_peer
            && table.make_room(max_per_peer, self.strangers_time, |other| other == Some(peer)) == 0
        {
            return None;
        }
        if table.connections.len() >= max_open
            && table.make_room(max_open, self.strangers_time, |_| true) == 0
        {
            return None;
        }
        let key = table.accepted;
        table.accepted += 1;
        table.connections.insert(key, (peer, activity.clone()));
        if let Some(peer) = peer {
            *table.per_peer.entry(peer).or_default() += 1;
        }
        Some(Entry { key, open: self.clone() })
    }

    /// Closes some connections that have a weak claim, because the process can open no more files.
    pub fn make_room(&self) {
        let mut table = self.table.lock();
        let open = table.connections.len();
        table.make_room(open, self.strangers_time, |_| true);
    }
}

impl Table {
    /// Closes connections with a weak claim whose peer qualifies, the weakest first, at most a share of `limit`.
    /// Returns their number.
    fn make_room(
        &mut self,
        limit: usize,
        strangers_time: Duration,
        qualifies: impl Fn(Option<IpAddr>) -> bool,
    ) -> usize {
        let qualified = self.connections.iter().filter(|(_, (peer, _))| qualifies(*peer));
        let mut weak: Vec<_> = qualified
            .filter_map(|(key, (_, activity))| Some((activity.claim(strangers_time)?, *key)))
            .collect();
        let share = (limit / EVICTED_SHARE).max(1);
        if weak.len() > share {
            weak.select_nth_unstable(share);
            weak.truncate(share);
        }
        for (_, key) in &weak {
            if let Some(activity) = self.remove(*key) {
                activity.evict();
            }
        }
        weak.len()
    }

    fn remove(&mut self, key: u64) -> Option<Arc<Activity>> {
        let (peer, activity) = self.connections.remove(&key)?;
        if let Some(peer) = peer
            && let Some(count) = self.per_peer.get_mut(&peer)
        {
            *count -= 1;
            if *count == 0 {
                self.per_peer.remove(&peer);
            }
        }
        Some(activity)
    }
}

/// The network that counts as one peer; `None` over a Unix socket.
pub(super) fn network(peer: Peer) -> Option<IpAddr> {
    match peer {
        Peer::Local => None,
        Peer::Ip(address) => Some(Peer::network(address)),
    }
}

#[cfg(test)]
mod tests;
