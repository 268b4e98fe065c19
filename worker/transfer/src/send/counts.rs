//! Counts of transfers since the process began.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use tutti_proto::cluster::v1 as pb;

/// The transport by which a push moves units to the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    /// The units go through the receiver's segment of shared memory on this host.
    SharedMemory,
    /// The stream carries the units.
    Tcp,
}

impl Transport {
    pub fn name(self) -> &'static str {
        match self {
            Self::SharedMemory => "shared memory",
            Self::Tcp => "tcp",
        }
    }
}

/// Counts of this process's transfers: of the sending side, and of corrupt messages at the receiving side.
#[derive(Debug, Default)]
pub(crate) struct TransferCounts {
    shared_memory_bytes: AtomicU64,
    tcp_bytes: AtomicU64,
    handed_over: AtomicU64,
    failed: AtomicU64,
    pushing_us: AtomicU64,
    exposed_us: AtomicU64,
    corrupt: AtomicU64,
}

impl TransferCounts {
    pub fn record_sent(&self, transport: Transport, bytes: usize) {
        let count = match transport {
            Transport::SharedMemory => &self.shared_memory_bytes,
            Transport::Tcp => &self.tcp_bytes,
        };
        count.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a completed transfer. `pushing` is the time since the transfer's first unit could be sent. `exposed` is
    /// the time since the request's prefill or encoding ended.
    pub fn record_handover(&self, pushing: Duration, exposed: Duration) {
        self.handed_over.fetch_add(1, Ordering::Relaxed);
        self.pushing_us.fetch_add(pushing.as_micros() as u64, Ordering::Relaxed);
        self.exposed_us.fetch_add(exposed.as_micros() as u64, Ordering::Relaxed);
    }

    pub fn record_failure(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a run or another message that has arrived with a wrong checksum.
    pub fn record_corrupt(&self) {
        self.corrupt.fetch_add(1, Ordering::Relaxed);
    }

    pub fn message(&self) -> pb::TransferCounts {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        pb::TransferCounts {
            shared_memory_bytes: count(&self.shared_memory_bytes),
            tcp_bytes: count(&self.tcp_bytes),
            handed_over: count(&self.handed_over),
            failed: count(&self.failed),
            pushing_us: count(&self.pushing_us),
            exposed_us: count(&self.exposed_us),
            corrupt: count(&self.corrupt),
        }
    }
}
