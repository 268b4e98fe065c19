//! Memory of the worker's device, for heartbeats.
//!
//! A thread of its own reads it at the pace of heartbeats: a driver may take long to answer, and one whose GPU hangs
//! may never do. Heartbeats report the last reading.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use tutti_kernels::cuda::MemoryReader;
use tutti_proto::cluster::v1 as pb;
use tutti_runtime::{memory, process_usage};

/// Time between two readings.
const INTERVAL: Duration = Duration::from_secs(1);

/// The last reading. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct LastReading(Arc<Bytes>);

#[derive(Debug, Default)]
struct Bytes {
    used: AtomicU64,
    /// 0 before the first reading, and once there are no more.
    total: AtomicU64,
}

impl LastReading {
    /// The last reading; `None` if there is none.
    pub fn get(&self) -> Option<pb::DeviceMemory> {
        let total_bytes = self.0.total.load(Relaxed);
        (total_bytes > 0).then(|| pb::DeviceMemory { used_bytes: self.0.used.load(Relaxed), total_bytes })
    }

    /// Starts the thread that reads. It ends when `read` returns `None`, or when all clones of this value are dropped.
    pub fn follow(&self, mut read: impl FnMut() -> Option<pb::DeviceMemory> + Send + 'static) {
        let last = Arc::downgrade(&self.0);
        let read_on = move || {
            while let Some(memory) = read() {
                let Some(last) = last.upgrade() else { return };
                last.used.store(memory.used_bytes, Relaxed);
                last.total.store(memory.total_bytes, Relaxed);
                drop(last);
                thread::sleep(INTERVAL);
            }
            // Old figures would look like those of now.
            if let Some(last) = last.upgrade() {
                last.total.store(0, Relaxed);
            }
        };
        if let Err(error) = thread::Builder::new().name("memory".into()).spawn(read_on) {
            tracing::warn!(%error, "heartbeats lack the memory of the device");
        }
    }
}

/// Returns a function that reads the memory of a GPU.
pub fn of_gpu(reader: MemoryReader) -> impl FnMut() -> Option<pb::DeviceMemory> {
    move || {
        let memory = reader.read()?;
        let used_bytes = memory.total.saturating_sub(memory.free);
        Some(pb::DeviceMemory { used_bytes, total_bytes: memory.total })
    }
}

/// Reads the memory of this process, and its closest bound.
pub fn of_host() -> Option<pb::DeviceMemory> {
    Some(pb::DeviceMemory {
        used_bytes: process_usage::resident_bytes()?,
        total_bytes: memory::allocatable()?.total,
    })
}

#[cfg(test)]
mod tests;
