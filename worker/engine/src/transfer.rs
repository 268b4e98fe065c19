//! Transfer of divided requests: the engine decides which pages are copied and when, and which requests leave or
//! arrive. A [connector](tutti_transfer::Connector) moves the bytes.
//!
//! - [`copies`]: the copies of one batch between device and host.
//! - [`copy_hook`]: runs copies inside a step, between layers.
//! - [`embeddings`]: the transfer of media embeddings, which are not stored in pages.
//! - [`outgoing`]: requests that leave.
//! - [`incoming`]: requests that arrive, and the received runs.
//!
//! The engine core decides the copies under its lock, between two steps or in a step's [pauses](copy_hook). The
//! device's thread then runs the copies (`PageCopies`). Only planning frees pages, and the device's thread does the
//! planning as well, so no page changes owners between the decision and the copy. In a pause, pages are read only if
//! they were complete before the step, and written only if they belong to requests that still wait for their pages. The
//! copies therefore do not disturb the step. Each batch of copies is bounded, so that a decode waits for at most one
//! batch. A prefill does not wait for its copies: its pages stay valid until they are sent. It is held back only while
//! the connector has no room, so that a slow receiver does not take steps from other requests.
//!
//! Between two groups with the same number of ranks, each rank transfers its own share of the bytes. An import then
//! completes once every rank has written every unit.

mod copies;
mod copy_hook;
mod embeddings;
mod incoming;
mod outgoing;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Instant,
};

use tutti_models::PageLayout;
use tutti_proto::{GraphKey, Rank, cluster::v1 as pb};
use tutti_runtime::{Error, ErrorKind};
use tutti_scheduler::{Ending, Outcome, Reserved, RowCommit, Scheduler, TransferError};
use tutti_transfer::{Connector, Event, Extent, HandOver, Import, Run, Source, UnitKind, Units};

pub(crate) use self::{
    copies::PageCopies,
    copy_hook::{CopyHints, CopyHook},
};
use self::{
    embeddings::EmbeddingTransfers,
    incoming::{Incoming, Unwritten},
    outgoing::Outgoing,
};
use crate::{batch::RowResult, report};

/// Maximum number of remembered failures of transfers whose requests have not arrived.
const REMEMBERED_FAILURES: usize = 1024;

/// The transfers between this engine and others.
pub(crate) struct Transfers {
    connector: Box<dyn Connector>,
    page_tokens: usize,
    units: Units,
    /// Names of the slot planes, for error messages.
    slot_planes: String,
    /// Requests that are prefilled here and decoded elsewhere.
    outgoing: BTreeMap<GraphKey, Outgoing>,
    /// Requests that are prefilled elsewhere and decoded here.
    incoming: BTreeMap<GraphKey, Incoming>,
    /// Received runs to write to the device.
    unwritten: Unwritten,
    /// Imports that wait until all their pages are written.
    pending_imports: VecDeque<Import>,
    /// Exported requests that the receiving worker has not accepted yet. Each has the ending to report once the worker
    /// has accepted it.
    unacknowledged: BTreeMap<GraphKey, Ending>,
    embeddings: EmbeddingTransfers,
    /// Failures of transfers that failed before their requests arrived here, the oldest first.
    failed_early: VecDeque<(GraphKey, TransferError)>,
    /// Limit on the bytes that the next batch copies in each direction.
    batch_bytes: usize,
    /// Time of the last batch that ran between two steps.
    turned: Instant,
}

impl Transfers {
    /// Creates the transfers of pages and slots in `layout`, and of embeddings, through `connector`. Requests may hold
    /// up to `embedding_bytes` of embeddings.
    pub fn new(
        connector: Box<dyn Connector>,
        layout: &PageLayout,
        units: Units,
        embedding_bytes: usize,
    ) -> Self {
        Self {
            connector,
            page_tokens: layout.page_tokens,
            slot_planes: layout.slot_planes().collect::<Vec<_>>().join(", "),
            outgoing: BTreeMap::new(),
            incoming: BTreeMap::new(),
            unwritten: Unwritten::default(),
            pending_imports: VecDeque::new(),
            unacknowledged: BTreeMap::new(),
            embeddings: EmbeddingTransfers::new(units.embeddings.unit_bytes, embedding_bytes),
            failed_early: VecDeque::new(),
            batch_bytes: copies::BATCH_BYTES,
            turned: Instant::now(),
            units,
        }
    }

    /// True if every exported request has been accepted or has failed.
    pub fn is_idle(&self) -> bool {
        self.unacknowledged.is_empty()
    }

    /// True if a request is being transferred to or from another worker, so that pages may have to be copied.
    pub fn is_active(&self) -> bool {
        !self.outgoing.is_empty() || !self.incoming.is_empty()
    }

    /// Keeps the failure of a transfer whose request has not arrived here. The sender may send before the request
    /// arrives here, so the transfer may also fail before the request arrives.
    fn remember_failure(&mut self, key: GraphKey, why: TransferError) {
        if self.failed_early.len() == REMEMBERED_FAILURES {
            self.failed_early.pop_front();
        }
        self.failed_early.push_back((key, why));
    }

    /// Takes the failure of a transfer that failed before its request arrived here.
    pub fn take_early_failure(&mut self, key: GraphKey) -> Option<TransferError> {
        let at = self.failed_early.iter().position(|(failed, _)| *failed == key)?;
        self.failed_early.remove(at).map(|(_, why)| why)
    }

    fn is_under_way(&self, key: GraphKey) -> bool {
        self.outgoing.contains_key(&key) || self.incoming.contains_key(&key) || self.embeddings.is_known(key)
    }

    /// Registers a request of `tokens` tokens that is prefilled for another worker, or for a group of `ranks` workers.
    /// The receiver already has the request's first `known` pages.
    pub fn will_send(&mut self, key: GraphKey, tokens: usize, Elsewhere { known, ranks }: Elsewhere) {
        // The last page is sent even if the receiver already has it.
        let sent = known.min(tokens.div_ceil(self.page_tokens).saturating_sub(1));
        let extent = if self.units.share.is_shared_with(ranks) { Extent::Share } else { Extent::Whole };
        self.outgoing.insert(key, Outgoing::new(sent, extent));
    }

    /// Registers a request whose media are encoded here. `values` is the number of elements of all their rows.
    pub fn will_encode(&mut self, key: GraphKey, values: usize) {
        self.embeddings.will_send(key, values);
    }

    /// Registers a request that waits for rows of `values` elements.
    pub fn awaits_media(&mut self, key: GraphKey, values: usize) {
        self.embeddings.will_receive(key, values, &mut *self.connector);
    }

    /// Registers a request that holds reserved pages for another worker to fill.
    pub fn reserved(&mut self, mut reserved: Reserved) {
        let key = reserved.key;
        if !self.has_pages() {
            reserved.known = reserved.pages.len();
        }
        self.connector.reserve(key, UnitKind::Pages, reserved.pages.len(), reserved.known);
        self.incoming.insert(key, Incoming::new(reserved, self.units.share.share.world_size));
    }

    /// Frees the buffer for a request's embeddings, because the request's planes hold them now.
    pub fn media_consumed(&mut self, key: GraphKey) {
        self.embeddings.ended(key, &mut *self.connector);
    }

    /// Forgets a request that has ended here.
    pub fn ended(&mut self, key: GraphKey) {
        self.outgoing.remove(&key);
        self.incoming.remove(&key);
        self.embeddings.ended(key, &mut *self.connector);
        self.connector.end(key);
    }

    /// Cancels an exported request that is not accepted yet, and returns its completion.
    pub fn cancel(&mut self, key: GraphKey, rank: Rank) -> Option<pb::Completion> {
        let mut ending = self.unacknowledged.remove(&key)?;
        self.connector.end(key);
        ending.outcome = Outcome::Cancelled;
        Some(report::completion(ending, rank))
    }

    /// Records a committed step and its results.
    pub fn committed<'a>(
        &mut self,
        commits: &[RowCommit],
        results: impl Iterator<Item = Option<&'a RowResult>>,
    ) {
        for (commit, result) in commits.iter().zip(results) {
            if let Some(result) = result.filter(|result| !result.encoded.is_empty()) {
                self.embeddings.encoded(commit.row.key, &result.encoded);
            }
        }
        if self.outgoing.is_empty() {
            return;
        }
        for commit in commits.iter().filter(|commit| commit.ending.is_none()) {
            if let Some(outgoing) = self.outgoing.get_mut(&commit.row.key) {
                outgoing.computed = commit.row.positions.end;
                outgoing.table = Arc::clone(&commit.row.block_table);
                outgoing.slot = commit.row.slot;
                outgoing.first = commit.sampled.map(|first| (first, Instant::now()));
            }
        }
    }

    /// Handles the events of the connector. `events` receives the resulting completions, and the requests that continue
    /// here.
    pub fn receive(&mut self, scheduler: &mut Scheduler, rank: Rank, events: &mut TransferEvents) {
        while self.unwritten.bytes() < self.batch_bytes
            && let Some(event) = self.connector.next_event()
        {
            match event {
                Event::Arrived(run, source) => self.arrived(run, source),
                Event::Import(import) => self.pending_imports.push_back(import),
                Event::Accepted(key) => {
                    let ending = self.unacknowledged.remove(&key);
                    events.completions.extend(ending.map(|ending| report::completion(ending, rank)));
                }
                Event::Failed(key, why) => match self.unacknowledged.remove(&key) {
                    Some(mut ending) => {
                        ending.outcome = Outcome::TransferFailed(why);
                        events.completions.push(report::completion(ending, rank));
                    }
                    None if self.is_under_way(key) => scheduler.fail_transfer(key, why),
                    // Either the transfer failed before its request arrived, or a rank reported it late, after the
                    // request has continued here.
                    None => self.remember_failure(key, why),
                },
            }
        }
        self.finish_imports(scheduler, events);
    }

    /// False for a model without paged planes, whose pages hold nothing and are not sent.
    fn has_pages(&self) -> bool {
        self.units.whole.bytes_of(UnitKind::Pages) > 0
    }

    fn has_slots(&self) -> bool {
        self.units.whole.slot_bytes > 0
    }

    /// Bytes per unit that one rank copies. At least 1, because callers divide by the result and a model without pages
    /// has 0 bytes per page.
    fn unit_bytes(&self, extent: Extent, kind: UnitKind) -> usize {
        self.units.of(kind, extent).bytes_of(kind).max(1)
    }

    /// Handles a received run. Embeddings are stored at once, and other runs are queued to be written. Drops a run of
    /// the wrong length, a run that no request waits for, and a run that would overwrite shared pages.
    fn arrived(&mut self, run: Run, source: Source) {
        let source = match (run.kind, source) {
            (UnitKind::Embeddings, Source::Here(data)) => return self.embeddings.fill(&run, &data),
            (_, source) => source,
        };
        let Some(incoming) = self.incoming.get(&run.key) else { return };
        let may_write = match run.kind {
            UnitKind::Pages => incoming.may_write(run.first, run.count),
            UnitKind::Slot => self.has_slots() && run.count == 1,
            UnitKind::Embeddings => false,
        };
        let bytes = run.count * self.unit_bytes(run.extent, run.kind);
        let is_whole = match &source {
            Source::Here(data) => data.len() == bytes,
            Source::Rank(_) => true,
        };
        if may_write && is_whole {
            self.unwritten.push(run, source, bytes);
        }
    }

    /// Answers each import that has no received runs left to write, here or on other ranks. If the import
    /// succeeds, the imported request continues here.
    fn finish_imports(&mut self, scheduler: &mut Scheduler, events: &mut TransferEvents) {
        for import in std::mem::take(&mut self.pending_imports) {
            let Import { key, hand_over, .. } = import;
            if self.unwritten.has(key) || self.awaits_ranks(key, &hand_over) {
                self.pending_imports.push_back(import);
                continue;
            }
            let outcome = if self.embeddings.has(key) {
                self.import_embeddings(scheduler, key, &hand_over, events)
            } else {
                self.import(scheduler, key, &hand_over, events)
            };
            (import.answer)(outcome);
        }
    }

    /// True if this rank has written all units of an import, but another rank has not. The other rank will report that
    /// it has written the rest, or that the transfer failed.
    fn awaits_ranks(&self, key: GraphKey, hand_over: &HandOver) -> bool {
        self.incoming.get(&key).is_some_and(|incoming| {
            incoming.pages.len() == hand_over.pages && incoming.awaits_ranks(self.has_slots())
        })
    }

    fn import_embeddings(
        &mut self,
        scheduler: &mut Scheduler,
        key: GraphKey,
        hand_over: &HandOver,
        events: &mut TransferEvents,
    ) -> Result<(), Error> {
        let embeddings = self.embeddings.take(key, hand_over)?;
        if !scheduler.media_here(key) {
            return Err(Error::unavailable(format!("{key} does not wait for embeddings here")));
        }
        events.embedded.push((key, embeddings));
        Ok(())
    }

    fn import(
        &mut self,
        scheduler: &mut Scheduler,
        key: GraphKey,
        hand_over: &HandOver,
        events: &mut TransferEvents,
    ) -> Result<(), Error> {
        let HandOver { first, computed, pages, slots } = *hand_over;
        let refused = |why: String| Error::new(ErrorKind::InvalidArgument, why);
        let Some(incoming) = self.incoming.get(&key) else {
            return Err(Error::unavailable(format!("{key} does not wait for planes here")));
        };
        let wanted = incoming.pages.len();
        if pages != wanted {
            return Err(refused(format!("{pages} pages are handed over, but {wanted} are reserved")));
        }
        if let Some(missing) = incoming.own().missing() {
            return Err(refused(format!("page {missing} of {wanted} is missing")));
        }
        let wanted = usize::from(self.has_slots());
        if slots != wanted {
            let planes = match self.slot_planes.as_str() {
                "" => "the model has no slot planes",
                planes => planes,
            };
            return Err(refused(format!(
                "{slots} slots are handed over, but {wanted} are wanted ({planes})"
            )));
        }
        if self.has_slots() && !incoming.own().has_slot() {
            return Err(refused(format!("the slot is missing, with the planes {}", self.slot_planes)));
        }
        let first = first.ok_or_else(|| refused("pages are handed over without a token".to_owned()))?;
        scheduler.complete_import(key, first, computed).map_err(refused)?;
        self.incoming.remove(&key);
        events.imported.push((key, first.token));
        Ok(())
    }

    /// Exports a request whose pages or embeddings have all been given to the connector. The request's ending is
    /// reported once the other worker accepts the request.
    fn export(
        &mut self,
        key: GraphKey,
        (hand_over, since): (HandOver, Instant),
        scheduler: &mut Scheduler,
        events: &mut TransferEvents,
    ) {
        // `None` if the request was cancelled in the meantime. The scheduler then reports its ending.
        if let Some(ending) = scheduler.complete_export(key) {
            self.connector.export(key, hand_over, since);
            self.unacknowledged.insert(key, ending);
            self.embeddings.ended(key, &mut *self.connector);
            events.exported.push(key);
        }
    }
}

/// The receiver of a request, as far as the prefilling engine knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Elsewhere {
    /// Number of the request's leading pages that the receiver already has.
    pub known: usize,
    /// Number of ranks in the receiver's group.
    pub ranks: usize,
}

/// Changes to the engine's requests that a transfer caused.
#[derive(Default)]
pub(crate) struct TransferEvents {
    pub completions: Vec<pb::Completion>,
    /// Requests that continue here, each with the token that was sampled at the end of its prefill.
    pub imported: Vec<(GraphKey, u32)>,
    /// Requests whose embeddings have arrived, each with the embeddings.
    pub embedded: Vec<(GraphKey, Vec<f32>)>,
    /// Requests that have left this engine. Their completions come once the other workers have accepted the requests.
    pub exported: Vec<GraphKey>,
}
