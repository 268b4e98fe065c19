//! Read-ahead: asks the system to read the tensors that are loaded next, while the device packs the current one.
//!
//! A page fault reads little more than one page. The device's threads fault at different places of a tensor, so the
//! system does not detect a sequential read. Requests stay a bounded number of bytes ahead of the loader, so that they
//! do not evict pages that are still to be used.

use std::{
    collections::VecDeque,
    ops::Range,
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    thread,
};

use memmap2::{Advice, Mmap};

/// Bytes that are requested ahead of the loader.
const AHEAD: u64 = 256 << 20;
/// Bytes per request. Per request, Linux reads at most the device's read-ahead size and ignores the rest. This is the
/// default of that size.
const REQUEST: usize = 128 << 10;

/// A range of a mapped file that will be read.
pub(crate) struct Extent {
    pub map: Arc<Mmap>,
    /// Range of bytes in the file.
    pub bytes: Range<usize>,
}

/// The extents that are still to be requested, and the thread that requests them. The loader does not make the requests
/// itself, because a request can wait for the disk.
pub(super) struct ReadAhead {
    waiting: VecDeque<Extent>,
    /// Bytes requested so far.
    requested: u64,
    /// `None` if the thread could not be started. Nothing is then read ahead.
    requests: Option<Sender<Extent>>,
}

impl ReadAhead {
    /// Starts to read `extents`, which are listed in the order of loading.
    pub fn start(extents: VecDeque<Extent>) -> Self {
        let (requests, extents_to_read) = channel::<Extent>();
        // The thread ends when `requests` is dropped.
        let spawned = thread::Builder::new().name("read-ahead".into()).spawn(move || {
            for Extent { map, bytes } in extents_to_read {
                for start in bytes.clone().step_by(REQUEST) {
                    // Without the advice, loading only takes longer.
                    let _ = map.advise_range(Advice::WillNeed, start, REQUEST.min(bytes.end - start));
                }
            }
        });
        let requests = match spawned {
            Ok(_) => Some(requests),
            Err(error) => {
                tracing::debug!(%error, "weights are not read ahead: no thread");
                None
            }
        };
        let mut ahead = Self { waiting: extents, requested: 0, requests };
        ahead.advance(0);
        ahead
    }

    /// Requests more. `loaded` is the number of bytes of all extents that have been loaded so far.
    pub fn advance(&mut self, loaded: u64) {
        let Some(requests) = &self.requests else { return };
        while self.requested < loaded + AHEAD {
            let Some(mut extent) = self.waiting.pop_front() else { return };
            // A tensor larger than the window, such as an embedding, is requested piece by piece.
            let room = usize::try_from(loaded + AHEAD - self.requested).unwrap_or(usize::MAX);
            if extent.bytes.len() > room {
                let rest =
                    Extent { map: extent.map.clone(), bytes: extent.bytes.start + room..extent.bytes.end };
                extent.bytes.end = rest.bytes.start;
                self.waiting.push_front(rest);
            }
            self.requested += extent.bytes.len() as u64;
            if requests.send(extent).is_err() {
                return;
            }
        }
    }
}
