//! Transfer of media embeddings from the engine that encodes the media to the engine that prefills. Both may be the
//! same engine.
//!
//! Embeddings need no page copies: an encoder's step returns embeddings to the host, and a prefill step takes them as
//! inputs. Rows of different kinds of media differ in width, so a unit, here, is a divisor of all widths: `unit_bytes`.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use tutti_proto::GraphKey;
use tutti_runtime::{Error, ErrorKind};
use tutti_transfer::{Connector, Extent, Filled, HandOver, Run, UnitKind};

/// Maximum bytes per run of units. If one unit is larger, a run is one unit.
const RUN_BYTES: usize = 1 << 20;

#[derive(Default)]
pub(super) struct EmbeddingTransfers {
    /// Bytes per unit; 0 if the model takes only text.
    unit_bytes: usize,
    /// Maximum bytes of embeddings that requests may hold here. A request holds its bytes from the reservation until
    /// its planes hold the embeddings, or until the request ends. A single request may hold more if no other request
    /// holds any. Further requests wait, and nothing is encoded for them yet.
    most: usize,
    /// Requests that are encoded here.
    outgoing: BTreeMap<GraphKey, Outgoing>,
    /// Requests that are prefilled here and have a buffer for their embeddings.
    incoming: BTreeMap<GraphKey, Incoming>,
    /// Requests that wait for a buffer, in order of arrival, with their numbers of units.
    queue: VecDeque<(GraphKey, usize)>,
    /// Bytes that `incoming` holds.
    held: usize,
}

struct Outgoing {
    /// Number of units of all the request's items.
    units: usize,
    /// Number of encoded units.
    encoded: usize,
    /// Encoded units that are not sent yet.
    unsent: VecDeque<(Run, Vec<u8>)>,
    /// Time at which the most recently encoded units were committed.
    since: Instant,
    /// True while the scheduler leaves the request out of steps, because the request has unsent units.
    held_back: bool,
}

struct Incoming {
    bytes: usize,
    /// Buffer for the units, and a record of those that have arrived. `None` once the embeddings have been taken.
    units: Option<(Vec<u8>, Filled)>,
}

impl EmbeddingTransfers {
    pub fn new(unit_bytes: usize, most: usize) -> Self {
        Self { unit_bytes, most, ..Self::default() }
    }

    /// Number of units of `values` elements.
    fn units(&self, values: usize) -> usize {
        (values * size_of::<f32>()).checked_div(self.unit_bytes).unwrap_or(0)
    }

    /// Registers an encoder's graph whose items' rows have `values` elements in total.
    pub fn will_send(&mut self, key: GraphKey, values: usize) {
        let (units, unsent, since) = (self.units(values), VecDeque::new(), Instant::now());
        self.outgoing.insert(key, Outgoing { units, encoded: 0, unsent, since, held_back: false });
    }

    /// Registers a request that waits for rows of `values` elements.
    pub fn will_receive(&mut self, key: GraphKey, values: usize, connector: &mut dyn Connector) {
        self.queue.push_back((key, self.units(values)));
        self.grant(connector);
    }

    fn grant(&mut self, connector: &mut dyn Connector) {
        while let Some(&(key, units)) = self.queue.front() {
            let bytes = units * self.unit_bytes;
            if self.held > 0 && self.held + bytes > self.most {
                return;
            }
            self.queue.pop_front();
            self.held += bytes;
            let room = Some((vec![0; bytes], Filled::new(units, 0)));
            self.incoming.insert(key, Incoming { bytes, units: room });
            connector.reserve(key, UnitKind::Embeddings, units, 0);
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

    /// Queues encoded rows to be sent. A request's calls are committed in order, so its rows arrive here in order.
    pub fn encoded(&mut self, key: GraphKey, values: &[f32]) {
        let Some(outgoing) = self.outgoing.get_mut(&key) else { return };
        let unit_bytes = self.unit_bytes.max(size_of::<f32>());
        let at_once = (RUN_BYTES / unit_bytes).max(1);
        for values in values.chunks(at_once * unit_bytes / size_of::<f32>()) {
            let data: Vec<_> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let (first, count) = (outgoing.encoded, data.len() / unit_bytes);
            let run = Run { key, kind: UnitKind::Embeddings, extent: Extent::Whole, first, count };
            outgoing.unsent.push_back((run, data));
            outgoing.encoded += count;
        }
        outgoing.since = Instant::now();
    }

    /// Sends as many units as the connector has room for. Calls `hold_back` for each request that has become
    /// blocked by unsent units, and for each request that no longer is. Returns the requests whose units have all been
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
            if outgoing.encoded == outgoing.units && !held_back {
                let (computed, since) = (outgoing.units, outgoing.since);
                sent.push((key, (HandOver { first: None, computed, pages: computed, slots: 0 }, since)));
            }
        }
        sent.iter().for_each(|(key, _)| drop(self.outgoing.remove(key)));
        sent
    }

    /// Stores a run of units for a request that waits for embeddings. Drops a run that no request waits for.
    pub fn fill(&mut self, run: &Run, data: &[u8]) {
        let incoming = self.incoming.get_mut(&run.key);
        // If the embeddings have been taken already, the run is a repetition and is dropped.
        let Some((room, filled)) = incoming.and_then(|incoming| incoming.units.as_mut()) else { return };
        let at = run.first * self.unit_bytes;
        if data.len() == run.count * self.unit_bytes
            && let Some(units) = room.get_mut(at..at + data.len())
        {
            units.copy_from_slice(data);
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

    /// Returns a request's embeddings if all units have arrived and the sender states the right number of them. On an
    /// error, nothing changes.
    pub fn take(&mut self, key: GraphKey, hand_over: &HandOver) -> Result<Vec<f32>, Error> {
        let HandOver { first, computed, pages, .. } = *hand_over;
        let refused = |why: String| Error::new(ErrorKind::InvalidArgument, why);
        let mut incoming = self.incoming.get_mut(&key);
        let Some((_, filled)) = incoming.as_ref().and_then(|incoming| incoming.units.as_ref()) else {
            return Err(Error::unavailable(format!("{key} does not wait for embeddings here")));
        };
        let units = filled.count();
        let problem = if first.is_some() {
            Some("a token is handed over with embeddings".to_owned())
        } else if (computed, pages) != (units, units) {
            Some(format!("{pages} embeddings of {computed} units are handed over, but {units} are wanted"))
        } else {
            filled.missing().map(|missing| format!("unit {missing} of {units} of embeddings is missing"))
        };
        if let Some(why) = problem {
            return Err(refused(why));
        }
        let data = incoming
            .as_mut()
            .and_then(|incoming| incoming.units.take())
            .map_or_else(Vec::new, |(data, _)| data);
        Ok(data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}
