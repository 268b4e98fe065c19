//! Discovery of conductors: a DNS name is looked up periodically, and the fleet gets the conductors at its addresses.

use std::{collections::BTreeSet, sync::Arc};

use tokio::{net::lookup_host, time::sleep};

use super::super::{Fleet, address};

impl Fleet {
    /// Looks up the DNS name periodically. A failed lookup leaves the fleet unchanged.
    pub(super) async fn look_up(self: Arc<Self>, name: String) {
        loop {
            let found = lookup_host(&name).await.map(|found| found.map(address::url).collect());
            let trouble = match found {
                Ok(found) => self.take_found(&name, found),
                Err(error) => Some(format!("discover: {name}: {error}")),
            };
            self.note_lookup(trouble);
            self.changed.send_modify(|count| *count += 1);
            sleep(self.settings.discover()).await;
        }
    }

    fn note_lookup(&self, trouble: Option<String>) {
        let mut known = self.lookup_trouble.lock();
        if *known != trouble {
            if let Some(trouble) = &trouble {
                tracing::warn!(%trouble, "the lookup of conductors failed; the known ones stay");
            }
            *known = trouble;
        }
    }

    /// Updates the roster with the addresses found. Returns an error text if `found` is empty, or has an address that
    /// may not be used.
    fn take_found(&self, name: &str, found: BTreeSet<String>) -> Option<String> {
        if found.is_empty() {
            return Some(format!("discover: {name} has no address"));
        }
        let mut refused = None;
        let join = |url: &str| match address::connection(url, &self.access, &self.settings) {
            Ok(channel) => Some(self.member(url.to_owned(), channel)),
            Err(error) => {
                refused = Some(format!("discover: {error}"));
                None
            }
        };
        let change = self.roster.write().update(&found, join);
        for member in &change.joined {
            tracing::info!(conductor = %member.name, "found a conductor");
        }
        for member in &change.left {
            tracing::info!(conductor = %member.name, "the lookup no longer finds the conductor; its running requests continue");
            self.metrics.removed(member);
        }
        refused
    }
}

#[cfg(test)]
mod tests;
