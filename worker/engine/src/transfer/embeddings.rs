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
use tutti_transfer::{Connector, Extent, Filled, HandOver, Run, UnitKind};

/// Maximum bytes per run of embedding rows. If one row is larger, a run is one row.
const RUN_BYTES: usize = 1 << 20;
/// Maximum bytes of embeddings that requests may hold here. A request holds its bytes from the reservation until its
/// planes hold the embeddings, or until the request ends. A single request may hold more if no other request holds any.
/// Further requests wait, and nothing is encoded for them yet.
const MAX_HELD_BYTES: usize = 256 << 20;

#[derive(Default)]
pub(super) struct EmbeddingTransfers {
    row_bytes: usize,
    /// Requests that are encoded here.
    outgoing: BTreeMap<GraphKey, Outgoing>,
    /// Requests that are prefilled here and have a buffer for their embeddings.
    incoming: BTreeMap<GraphKey, Incoming>,
    /// Requests that wait for a buffer, in order of arrival, with their numbers of embedding rows.
    queue: VecDeque<(GraphKey, usize)>,
    /// Bytes that `incoming` holds.
    held: usize,
}

struct Outgoing {
    /// Number of embedding rows of all the request's items.
    rows: usize,
    encoded: usize,
    /// Encoded rows that are not sent yet.
    unsent: VecDeque<(Run, Vec<u8>)>,
    /// Time at which the most recently encoded rows were committed.
    since: Instant,
    /// True while the scheduler leaves the request out of steps, because the request has unsent rows.
    held_back: bool,
}

struct Incoming {
    bytes: usize,
    /// Buffer for the rows, and a record of the rows that have arrived. `None` once the embeddings have been taken.
    rows: Option<(Vec<u8>, Filled)>,
}

impl EmbeddingTransfers {
    pub fn new(row_bytes: usize) -> Self {
        Self { row_bytes, ..Self::default() }
    }

    /// Registers an encoder's graph whose items have `rows` embedding rows in total.
    pub fn will_send(&mut self, key: GraphKey, rows: usize) {
        let (unsent, since) = (VecDeque::new(), Instant::now());
        self.outgoing.insert(key, Outgoing { rows, encoded: 0, unsent, since, held_back: false });
    }

    /// Registers a request that waits for `rows` embedding rows.
    pub fn will_receive(&mut self, key: GraphKey, rows: usize, connector: &mut dyn Connector) {
        self.queue.push_back((key, rows));
        self.grant(connector);
    }

    fn grant(&mut self, connector: &mut dyn Connector) {
        while let Some(&(key, rows)) = self.queue.front() {
            let bytes = rows * self.row_bytes;
            if self.held > 0 && self.held + bytes > MAX_HELD_BYTES {
                return;
            }
            self.queue.pop_front();
            self.held += bytes;
            let room = Some((vec![0; bytes], Filled::new(rows, 0)));
            self.incoming.insert(key, Incoming { bytes, rows: room });
            connector.reserve(key, UnitKind::Embeddings, rows, 0);
        }
    }

    /// Removes a request that has ended here, whether its media were encoded here or awaited here.
    pub fn ended(&mut self, key: GraphKey, connector: &mut dyn Connector) {
        self.outgoing.remove(&key);
        self.queue.retain(|(waiting, _)| *waiting != key);
        if let Some(incoming) = self.incoming.remove(&key) {
            self.held -= incoming.bytes;
        }
        self.grant(connector);
    }

    /// Queues the encoded rows in `values` to be sent. `first` is the index of the first of these rows within the
    /// request.
    pub fn encoded(&mut self, key: GraphKey, first: usize, values: &[f32]) {
        let Some(outgoing) = self.outgoing.get_mut(&key) else { return };
        let at_once = (RUN_BYTES / self.row_bytes).max(1);
        for (run, values) in values.chunks(at_once * self.row_bytes / size_of::<f32>()).enumerate() {
            let data: Vec<_> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let (first, count) = (first + run * at_once, data.len() / self.row_bytes);
            let run = Run { key, kind: UnitKind::Embeddings, extent: Extent::Whole, first, count };
            outgoing.unsent.push_back((run, data));
        }
        outgoing.encoded = first + size_of_val(values) / self.row_bytes;
        outgoing.since = Instant::now();
    }

    /// Sends as many embedding rows as the connector has room for. Calls `hold_back` for each request that has become
    /// blocked by unsent rows, and for each request that no longer is. Returns the requests whose rows have all been
    /// sent.
    pub fn send(
        &mut self,
        connector: &mut dyn Connector,
        mut hold_back: impl FnMut(GraphKey, bool),
    ) -> Vec<(GraphKey, (HandOver, Instant))> {
        let mut sent = Vec::new();
        for (&key, outgoing) in &mut self.outgoing {
            while outgoing.unsent.front().is_some_and(|(_, data)| data.len() <= connector.room()) {
                outgoing.unsent.pop_front().into_iter().for_each(|(run, data)| connector.send(run, data));
            }
            let held_back = !outgoing.unsent.is_empty();
            if held_back != outgoing.held_back {
                outgoing.held_back = held_back;
                hold_back(key, held_back);
            }
            if outgoing.encoded == outgoing.rows && !held_back {
                let (computed, since) = (outgoing.rows, outgoing.since);
                sent.push((key, (HandOver { first: None, computed, pages: computed, slots: 0 }, since)));
            }
        }
        sent.iter().for_each(|(key, _)| drop(self.outgoing.remove(key)));
        sent
    }

    /// Stores a run of embedding rows for a request that waits for embeddings. Drops a run that no request waits for.
    pub fn fill(&mut self, run: &Run, data: &[u8]) {
        let incoming = self.incoming.get_mut(&run.key);
        // If the embeddings have been taken already, the run is a repetition and is dropped.
        let Some((room, filled)) = incoming.and_then(|incoming| incoming.rows.as_mut()) else { return };
        let at = run.first * self.row_bytes;
        if data.len() == run.count * self.row_bytes
            && let Some(rows) = room.get_mut(at..at + data.len())
        {
            rows.copy_from_slice(data);
            filled.fill(run);
        }
    }

    /// True if a request has, or has used, a buffer for its embeddings here.
    pub fn has(&self, key: GraphKey) -> bool {
        self.incoming.contains_key(&key)
    }

    /// True if a request's embeddings are encoded here or sent to this engine. This includes a request that waits for a
    /// buffer.
    pub fn is_known(&self, key: GraphKey) -> bool {
        self.outgoing.contains_key(&key)
            || self.has(key)
            || self.queue.iter().any(|(waiting, _)| *waiting == key)
    }

    /// Returns a request's embeddings if all rows have arrived and the sender states the right number of rows. On an
    /// error, nothing changes.
    pub fn take(&mut self, key: GraphKey, hand_over: &HandOver) -> Result<Vec<f32>, Error> {
        let HandOver { first, computed, pages, .. } = *hand_over;
        let refused = |why: String| Error::new(ErrorKind::InvalidArgument, why);
        let mut incoming = self.incoming.get_mut(&key);
        let Some((_, filled)) = incoming.as_ref().and_then(|incoming| incoming.rows.as_ref()) else {
            return Err(Error::unavailable(format!("{key} does not wait for embeddings here")));
        };
        let rows = filled.count();
        let problem = if first.is_some() {
            Some("a token is handed over with embeddings".to_owned())
        } else if (computed, pages) != (rows, rows) {
            Some(format!("{pages} embeddings of {computed} tokens are handed over, but {rows} are wanted"))
        } else {
            filled.missing().map(|missing| format!("embedding {missing} of {rows} is missing"))
        };
        if let Some(why) = problem {
            return Err(refused(why));
        }
        let data = incoming
            .as_mut()
            .and_then(|incoming| incoming.rows.take())
            .map_or_else(Vec::new, |(data, _)| data);
        Ok(data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}
