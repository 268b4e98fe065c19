//! Transfer of media embeddings from the engine that encodes the media to the engine that prefills. Both may be the
//! same engine.
//!
//! Embeddings need no page copies: an encoder's step returns embeddings to the host, and a prefill step takes them as
//! inputs. A row, here, is the embedding of one token.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use tutti_proto::GraphKey;
use tutti_runtime::{Error, ErrorKind};

use super::courier::{Cargo, Courier, ExportSummary, ImportRequest, PageRun};

/// Maximum bytes per run of embedding rows, unless one row is larger.
const RUN_BYTES: usize = 1 << 20;
/// Maximum bytes of embeddings that requests may hold here. A request holds its bytes from the reservation until its
/// planes hold the embeddings, or until the request ends. One request may hold more if no other request holds bytes.
/// Further requests wait, and nothing is encoded for them yet.
const MAX_HELD_BYTES: usize = 256 << 20;

#[derive(Default)]
pub(super) struct EmbeddingTransfers {
    row_bytes: usize,
    /// Requests that are encoded here.
    outgoing: BTreeMap<GraphKey, Outgoing>,
    /// Requests that are prefilled here and have room for their embeddings.
    incoming: BTreeMap<GraphKey, Incoming>,
    /// Requests that wait for room, in order of arrival, with their numbers of embedding rows.
    queue: VecDeque<(GraphKey, usize)>,
    /// Bytes that `incoming` holds.
    held: usize,
}

struct Outgoing {
    /// Number of embedding rows of all the request's items.
    rows: usize,
    encoded: usize,
    /// Encoded rows that are not sent yet.
    unsent: VecDeque<PageRun>,
    /// Time at which the most recently encoded rows were committed.
    since: Instant,
    /// True while the scheduler leaves the request out of steps, because the request has unsent rows.
    held_back: bool,
}

struct Incoming {
    bytes: usize,
    /// `None` once the embeddings have been taken.
    filling: Option<Filling>,
}

struct Filling {
    data: Vec<u8>,
    /// True for each embedding row that has arrived.
    written: Vec<bool>,
}

impl EmbeddingTransfers {
    pub fn new(width: usize) -> Self {
        Self { row_bytes: width * size_of::<f32>(), ..Self::default() }
    }

    /// Registers an encoder's graph whose items have `rows` embedding rows in sum.
    pub fn will_send(&mut self, key: GraphKey, rows: usize) {
        let (unsent, since) = (VecDeque::new(), Instant::now());
        self.outgoing.insert(key, Outgoing { rows, encoded: 0, unsent, since, held_back: false });
    }

    /// Registers a request that waits for `rows` embedding rows.
    pub fn will_receive(&mut self, key: GraphKey, rows: usize, courier: &mut dyn Courier) {
        self.queue.push_back((key, rows));
        self.grant(courier);
    }

    fn grant(&mut self, courier: &mut dyn Courier) {
        while let Some(&(key, rows)) = self.queue.front() {
            let bytes = rows * self.row_bytes;
            if self.held > 0 && self.held + bytes > MAX_HELD_BYTES {
                return;
            }
            self.queue.pop_front();
            self.held += bytes;
            let filling = Some(Filling { data: vec![0; bytes], written: vec![false; rows] });
            self.incoming.insert(key, Incoming { bytes, filling });
            courier.reserved(key, Cargo::Embeddings, rows, 0);
        }
    }

    /// Removes a request that has ended here, whether its media were encoded here or awaited here.
    pub fn ended(&mut self, key: GraphKey, courier: &mut dyn Courier) {
        self.outgoing.remove(&key);
        self.queue.retain(|(waiting, _)| *waiting != key);
        if let Some(incoming) = self.incoming.remove(&key) {
            self.held -= incoming.bytes;
        }
        self.grant(courier);
    }

    /// Queues the encoded rows in `values` to be sent. `first` is the index of their first row within the request.
    pub fn encoded(&mut self, key: GraphKey, first: usize, values: &[f32]) {
        let Some(outgoing) = self.outgoing.get_mut(&key) else { return };
        let at_once = (RUN_BYTES / self.row_bytes).max(1);
        for (run, values) in values.chunks(at_once * self.row_bytes / size_of::<f32>()).enumerate() {
            let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let first = first + run * at_once;
            outgoing.unsent.push_back(PageRun { key, cargo: Cargo::Embeddings, first, data });
        }
        outgoing.encoded = first + size_of_val(values) / self.row_bytes;
        outgoing.since = Instant::now();
    }

    /// Sends as many embedding rows as the courier has room for. Calls `hold_back` for a request that begins or ceases
    /// to have unsent rows. Returns the requests whose rows have all been sent.
    pub fn send(
        &mut self,
        courier: &mut dyn Courier,
        mut hold_back: impl FnMut(GraphKey, bool),
    ) -> Vec<(GraphKey, ExportSummary)> {
        let mut sent = Vec::new();
        for (&key, outgoing) in &mut self.outgoing {
            while outgoing.unsent.front().is_some_and(|run| run.data.len() <= courier.room()) {
                outgoing.unsent.pop_front().into_iter().for_each(|run| courier.send(run));
            }
            let held_back = !outgoing.unsent.is_empty();
            if held_back != outgoing.held_back {
                outgoing.held_back = held_back;
                hold_back(key, held_back);
            }
            if outgoing.encoded == outgoing.rows && !held_back {
                let (computed, since) = (outgoing.rows, outgoing.since);
                sent.push((key, ExportSummary { first: None, computed, pages: computed, slots: 0, since }));
            }
        }
        sent.iter().for_each(|(key, _)| drop(self.outgoing.remove(key)));
        sent
    }

    /// Stores a run of embedding rows for a request that waits for embeddings. Returns the run if it belongs to no such
    /// request.
    pub fn fill(&mut self, run: PageRun) -> Option<PageRun> {
        let incoming = self.incoming.get_mut(&run.key).filter(|_| run.cargo == Cargo::Embeddings);
        let Some(incoming) = incoming else { return Some(run) };
        // If the embeddings have been taken already, the run is a repetition and is dropped.
        let filling = incoming.filling.as_mut()?;
        let (at, rows) = (run.first * self.row_bytes, run.data.len() / self.row_bytes);
        if let Some(slot) = filling.data.get_mut(at..at + run.data.len()) {
            slot.copy_from_slice(&run.data);
            filling.written[run.first..run.first + rows].fill(true);
        }
        None
    }

    /// True if a request waits for embeddings here, or has received them.
    pub fn has(&self, key: GraphKey) -> bool {
        self.incoming.contains_key(&key)
    }

    /// True if a request's embeddings are made here, awaited here, or have been received here.
    pub fn is_known(&self, key: GraphKey) -> bool {
        self.outgoing.contains_key(&key)
            || self.has(key)
            || self.queue.iter().any(|(waiting, _)| *waiting == key)
    }

    /// Takes a request's embeddings if all rows have arrived and the sender states the number of rows correctly. On an
    /// error, nothing changes.
    pub fn take(&mut self, request: &ImportRequest) -> Result<Vec<f32>, Error> {
        let ImportRequest { key, first, computed, pages, .. } = *request;
        let refused = |why: String| Error::new(ErrorKind::InvalidArgument, why);
        let incoming = self.incoming.get_mut(&key);
        let Some(filling) = incoming.and_then(|incoming| incoming.filling.take()) else {
            return Err(Error::unavailable(format!("{key} does not wait for embeddings here")));
        };
        let rows = filling.written.len();
        let problem = if first.is_some() {
            Some("a token is handed over with embeddings".to_owned())
        } else if (computed, pages) != (rows, rows) {
            Some(format!("{pages} embeddings of {computed} tokens are handed over, but {rows} are wanted"))
        } else {
            let missing = filling.written.iter().position(|written| !written);
            missing.map(|missing| format!("embedding {missing} of {rows} is missing"))
        };
        if let Some(why) = problem {
            if let Some(incoming) = self.incoming.get_mut(&key) {
                incoming.filling = Some(filling);
            }
            return Err(refused(why));
        }
        Ok(filling.data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}
