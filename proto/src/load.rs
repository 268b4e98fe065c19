//! The load that a worker reports.

use std::time::Duration;

use crate::cluster::v1::WorkerLoad;

impl WorkerLoad {
    /// The load `ago` after its report: a request that waited then has waited on.
    #[must_use]
    pub fn aged(mut self, ago: Duration) -> Self {
        if self.oldest_waiting_ms > 0 {
            let ago = u32::try_from(ago.as_millis()).unwrap_or(u32::MAX);
            self.oldest_waiting_ms = self.oldest_waiting_ms.saturating_add(ago);
        }
        self
    }
}
