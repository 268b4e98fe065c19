//! Read-ahead: asks the system to read the next tensors from the files while the device packs the current tensor.
//!
//! Without read-ahead, a page fault reads little more than one page. The system does not detect a sequential read,
//! because the device's threads fault at different places of a tensor. Requests stay a bounded number of bytes ahead of
//! the loader, so that they do not evict pages that the loader has not used yet.

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
/// Bytes per request: the default read-ahead size of a disk. Linux reads at most that size per request and ignores the
/// rest.
const REQUEST: usize = 128 << 10;

/// A range of a mapped file that will be read.
pub(crate) struct Extent {
    pub map: Arc<Mmap>,
    /// Range of bytes in the file.
    pub bytes: Range<usize>,
}

/// The extents that are not requested yet, and the thread that requests them. The loader's thread makes no requests,
/// because a request can wait for the disk.
pub(super) struct ReadAhead {
    waiting: VecDeque<Extent>,
    /// Bytes requested so far.
    requested: u64,
    /// Channel to the thread; `None` if the thread could not be started. Nothing is then read ahead.
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
                    // If the advice fails, loading only takes longer.
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

    /// Requests further extents. `loaded` is the number of bytes that the loader has loaded so far.
    pub fn advance(&mut self, loaded: u64) {
        let Some(requests) = &self.requests else { return };
        while self.requested < loaded + AHEAD {
            let Some(mut extent) = self.waiting.pop_front() else { return };
            // An extent with more bytes than the limit leaves is requested piece by piece. An embedding is an example.
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
