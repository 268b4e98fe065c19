//! Embeddings of media on their way from the engine that encodes them to the one that prefills, which may be the same.
//!
//! Nothing is copied on the device for them: an encoder's rows come to the host with its step, and go to the device as
//! inputs of prefill steps.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use tutti_proto::GraphKey;
use tutti_runtime::{Error, ErrorKind};

use crate::courier::{Cargo, Courier, ImportRequest, ExportSummary, PageRun};

/// Bytes of one run of rows, unless one row is larger.
const RUN: usize = 1 << 20;
/// Bytes of embeddings that requests here may hold, from before they come until the request ends; and one request's, however
/// many. Others wait before anything is encoded for them.
const HELD: usize = 256 << 20;

#[derive(Default)]
pub(super) struct Tensors {
    row_bytes: usize,
    /// Encoded here.
    outgoing: BTreeMap<GraphKey, Outgoing>,
    /// To be prefilled here.
    incoming: BTreeMap<GraphKey, Incoming>,
    /// Those of them that wait for room, in the order in which they came, and their rows.
    queue: VecDeque<(GraphKey, usize)>,
    /// Bytes of those that do not.
    held: usize,
}

struct Outgoing {
    /// In all.
    rows: usize,
    encoded: usize,
    /// What the courier has no room for.
    unsent: VecDeque<PageRun>,
    /// When the last row was committed.
    since: Instant,
    /// Whether the scheduler holds it back.
    held_back: bool,
}

struct Incoming {
    bytes: usize,
    /// None once it has been taken over.
    filling: Option<Filling>,
}

struct Filling {
    data: Vec<u8>,
    /// Which rows have come.
    written: Vec<bool>,
}

impl Tensors {
    pub fn new(width: usize) -> Self {
        Self { row_bytes: width * size_of::<f32>(), ..Self::default() }
    }

    /// An encoder's graph was accepted, whose items have so many rows in all.
    pub fn will_send(&mut self, key: GraphKey, rows: usize) {
        let (unsent, since) = (VecDeque::new(), Instant::now());
        self.outgoing.insert(key, Outgoing { rows, encoded: 0, unsent, since, held_back: false });
    }

    /// A request was accepted that waits for so many rows.
    pub fn will_receive(&mut self, key: GraphKey, rows: usize, courier: &mut dyn Courier) {
        self.queue.push_back((key, rows));
        self.grant(courier);
    }

    fn grant(&mut self, courier: &mut dyn Courier) {
        while let Some(&(key, rows)) = self.queue.front() {
            let bytes = rows * self.row_bytes;
            if self.held > 0 && self.held + bytes > HELD {
                return;
            }
            self.queue.pop_front();
            self.held += bytes;
            let filling = Some(Filling { data: vec![0; bytes], written: vec![false; rows] });
            self.incoming.insert(key, Incoming { bytes, filling });
            courier.reserved(key, Cargo::Embeddings, rows, 0);
        }
    }

    /// A request has ended here, on whichever side.
    pub fn ended(&mut self, key: GraphKey, courier: &mut dyn Courier) {
        self.outgoing.remove(&key);
        self.queue.retain(|(waiting, _)| *waiting != key);
        if let Some(incoming) = self.incoming.remove(&key) {
            self.held -= incoming.bytes;
        }
        self.grant(courier);
    }

    /// Rows from `first` on have been encoded.
    pub fn encoded(&mut self, key: GraphKey, first: usize, values: &[f32]) {
        let Some(outgoing) = self.outgoing.get_mut(&key) else { return };
        let at_once = (RUN / self.row_bytes).max(1);
        for (run, values) in values.chunks(at_once * self.row_bytes / size_of::<f32>()).enumerate() {
            let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            outgoing.unsent.push_back(PageRun { key, first: first + run * at_once, data });
        }
        outgoing.encoded = first + size_of_val(values) / self.row_bytes;
        outgoing.since = Instant::now();
    }

    /// Gives the courier what it has room for. Whoever has more is held back, by `hold_back`. Gives those of whom it has all.
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
                sent.push((key, ExportSummary { first: None, computed, pages: computed, since }));
            }
        }
        sent.iter().for_each(|(key, _)| drop(self.outgoing.remove(key)));
        sent
    }

    /// Takes rows for a request that waits for them; gives others back.
    pub fn fill(&mut self, run: PageRun) -> Option<PageRun> {
        let Some(incoming) = self.incoming.get_mut(&run.key) else { return Some(run) };
        // What comes again behind the hand-over is known.
        let filling = incoming.filling.as_mut()?;
        let (at, rows) = (run.first * self.row_bytes, run.data.len() / self.row_bytes);
        if let Some(slot) = filling.data.get_mut(at..at + run.data.len()) {
            slot.copy_from_slice(&run.data);
            filling.written[run.first..run.first + rows].fill(true);
        }
        None
    }

    /// Whether a request waits for rows, or did.
    pub fn has(&self, key: GraphKey) -> bool {
        self.incoming.contains_key(&key)
    }

    /// The rows of a request, if all of them are here and the sender counts as many. Nothing has changed if not.
    pub fn take(&mut self, request: &ImportRequest) -> Result<Vec<f32>, Error> {
        let ImportRequest { key, first, computed, pages, .. } = *request;
        let refused = |why: String| Error::new(ErrorKind::InvalidArgument, why);
        let incoming = self.incoming.get_mut(&key);
        let Some(filling) = incoming.and_then(|incoming| incoming.filling.take()) else {
            return Err(Error::unavailable(format!("{key} waits for no embeddings here")));
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
