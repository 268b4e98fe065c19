//! Transfer of pages between this engine and others: decides which pages are copied, and which requests leave or
//! arrive.
//!
//! The engine core decides the copies under its lock, between two steps or in a step's [pauses](super::copy_hook). The
//! device's thread then runs the copies (`PageCopies`). Only planning frees pages, and the device's thread does the
//! planning as well, so no page changes owners between the decision and the copy. In a pause, pages are read only if
//! they were complete before the step, and written only if they belong to requests that still wait for their pages. The
//! copies therefore do not disturb the step. Each batch of copies is bounded, so that a decode waits for at most one
//! batch. A prefill does not wait for its copies: its pages stay valid until they are sent. It is held back only while
//! the courier has no room, so that a slow receiver does not take steps from other requests.
//!
//! In a group of ranks, a transfer from or to a group of as many ranks is one of shares: each rank copies its own
//! bytes. An import then completes once every rank has written every unit.

mod copies;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Instant,
};

use tutti_models::{PageLayout, ShareLayout};
use tutti_proto::{GraphKey, Rank, cluster::v1 as pb};
use tutti_runtime::{Error, ErrorKind};
use tutti_scheduler::{Ending, Outcome, Reserved, RowCommit, Scheduler, TransferError};

use super::{
    courier::{Arrival, Cargo, Courier, ExportSummary, ImportRequest, PageRun, RankRun},
    embeddings::EmbeddingTransfers,
    incoming::{Incoming, Missing, Received, Source, Unwritten},
    outgoing::{Extent, Outgoing},
};
use crate::{batch::RowResult, report};

/// Maximum number of failures that wait for their requests.
const REMEMBERED_FAILURES: usize = 1024;

pub(crate) struct Exchange {
    courier: Box<dyn Courier>,
    page_tokens: usize,
    page_bytes: usize,
    /// Bytes of a request's state in all slot planes; 0 if the model has none.
    slot_bytes: usize,
    share: ShareLayout,
    /// Names of the slot planes, for error messages.
    slot_planes: String,
    /// Requests that are prefilled here and decoded elsewhere.
    outgoing: BTreeMap<GraphKey, Outgoing>,
    /// Requests that are prefilled elsewhere and decoded here.
    incoming: BTreeMap<GraphKey, Incoming>,
    /// Received runs to write to the device.
    unwritten: Unwritten,
    /// Import requests whose pages are not all written yet.
    pending_imports: VecDeque<ImportRequest>,
    /// Exported requests that the receiving worker has not accepted yet, each with the ending to report once it has.
    unacknowledged: BTreeMap<GraphKey, Ending>,
    embeddings: EmbeddingTransfers,
    /// Failures of transfers whose requests have not arrived, the oldest first.
    failed_early: VecDeque<(GraphKey, TransferError)>,
    /// Limit on the bytes that the next batch copies in each direction.
    batch_bytes: usize,
    /// Time of the last batch between two steps.
    turned: Instant,
}

impl Exchange {
    /// Creates an exchange. `width` is the number of elements per embedding.
    pub fn new(courier: Box<dyn Courier>, layout: &PageLayout, share: ShareLayout, width: usize) -> Self {
        Self {
            courier,
            page_tokens: layout.page_tokens,
            // A model without pages sends no pages; 1 avoids a division by zero.
            page_bytes: layout.page_bytes().max(1),
            slot_bytes: layout.slot_bytes(),
            share,
            slot_planes: layout.slot_planes().collect::<Vec<_>>().join(", "),
            outgoing: BTreeMap::new(),
            incoming: BTreeMap::new(),
            unwritten: Unwritten::default(),
            pending_imports: VecDeque::new(),
            unacknowledged: BTreeMap::new(),
            embeddings: EmbeddingTransfers::new(width),
            failed_early: VecDeque::new(),
            batch_bytes: copies::BATCH_BYTES,
            turned: Instant::now(),
        }
    }

    /// True if every exported request has been accepted or has failed.
    pub fn is_idle(&self) -> bool {
        self.unacknowledged.is_empty()
    }

    /// True if a request is on its way to or from another worker, so that pages may have to be copied.
    pub fn is_active(&self) -> bool {
        !self.outgoing.is_empty() || !self.incoming.is_empty()
    }

    /// Keeps the failure of a transfer whose request has not arrived. Its push begins first, so it may fail first.
    fn remember_failure(&mut self, key: GraphKey, why: TransferError) {
        if self.failed_early.len() == REMEMBERED_FAILURES {
            self.failed_early.pop_front();
        }
        self.failed_early.push_back((key, why));
    }

    /// Takes the failure of a transfer that has failed before its request arrived.
    pub fn take_early_failure(&mut self, key: GraphKey) -> Option<TransferError> {
        let at = self.failed_early.iter().position(|(failed, _)| *failed == key)?;
        self.failed_early.remove(at).map(|(_, why)| why)
    }

    fn is_under_way(&self, key: GraphKey) -> bool {
        self.outgoing.contains_key(&key) || self.incoming.contains_key(&key) || self.embeddings.is_known(key)
    }

    /// Registers a request of `tokens` tokens that is prefilled for another worker, or for a group of `ranks` workers.
    /// There, the request's first `known` pages are valid already.
    pub fn will_send(&mut self, key: GraphKey, tokens: usize, Elsewhere { known, ranks }: Elsewhere) {
        // The last page is sent even if the other worker has it.
        let sent = known.min(tokens.div_ceil(self.page_tokens).saturating_sub(1));
        let extent = if self.share.is_shared_with(ranks) { Extent::Share } else { Extent::Whole };
        self.outgoing.insert(key, Outgoing::new(sent, extent));
    }

    /// Registers a request whose media are encoded here. The media take `tokens` tokens in sum.
    pub fn will_encode(&mut self, key: GraphKey, tokens: usize) {
        self.embeddings.will_send(key, tokens);
    }

    /// Registers a request that waits for the embeddings of `tokens` tokens.
    pub fn awaits_media(&mut self, key: GraphKey, tokens: usize) {
        self.embeddings.will_receive(key, tokens, &mut *self.courier);
    }

    /// Registers a request that holds reserved pages for another worker to fill.
    pub fn reserved(&mut self, reserved: Reserved) {
        let key = reserved.key;
        self.courier.reserved(key, Cargo::Pages, reserved.pages.len(), reserved.known);
        self.incoming.insert(key, Incoming::new(reserved, self.share.ranks));
    }

    /// Frees the room that a request's embeddings took here: the request's planes hold them now.
    pub fn media_consumed(&mut self, key: GraphKey) {
        self.embeddings.ended(key, &mut *self.courier);
    }

    /// Forgets a request that has ended here.
    pub fn ended(&mut self, key: GraphKey) {
        self.outgoing.remove(&key);
        self.incoming.remove(&key);
        self.embeddings.ended(key, &mut *self.courier);
        self.courier.ended(key);
    }

    /// Cancels an exported request that is not accepted yet, and returns its completion.
    pub fn cancel(&mut self, key: GraphKey, rank: Rank) -> Option<pb::Completion> {
        let mut ending = self.unacknowledged.remove(&key)?;
        self.courier.ended(key);
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
                self.embeddings.encoded(commit.row.key, commit.row.positions.start, &result.encoded);
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

    /// Takes the arrivals from other workers. `events` receives the resulting completions, and the requests that
    /// continue here.
    pub fn receive(&mut self, scheduler: &mut Scheduler, rank: Rank, events: &mut TransferEvents) {
        while self.unwritten.bytes() < self.batch_bytes
            && let Some(arrival) = self.courier.take()
        {
            match arrival {
                Arrival::Pages(run) => {
                    if let Some(run) = self.embeddings.fill(run) {
                        self.receive_run(run, Extent::Whole);
                    }
                }
                Arrival::Share(run) => self.receive_run(run, Extent::Share),
                Arrival::RankShare(RankRun { rank, key, cargo, first, count }) => {
                    let bytes = count * self.unit_bytes(Extent::Share, cargo);
                    self.will_write(Received { key, cargo, first, count, bytes, from: Source::Rank(rank) });
                }
                Arrival::Import(request) => self.pending_imports.push_back(request),
                Arrival::Accepted(key) => {
                    let ending = self.unacknowledged.remove(&key);
                    events.completions.extend(ending.map(|ending| report::completion(ending, rank)));
                }
                Arrival::Failed(key, why) => match self.unacknowledged.remove(&key) {
                    Some(mut ending) => {
                        ending.outcome = Outcome::TransferFailed(why);
                        events.completions.push(report::completion(ending, rank));
                    }
                    None if self.is_under_way(key) => scheduler.fail_transfer(key, why),
                    // The failure comes before the request, or late, from a rank, when the request continues here.
                    None => self.remember_failure(key, why),
                },
            }
        }
        self.finish_imports(scheduler, events);
    }

    /// Bytes of one unit that one rank copies.
    fn unit_bytes(&self, extent: Extent, cargo: Cargo) -> usize {
        match (extent, cargo) {
            (Extent::Whole, Cargo::Slot) => self.slot_bytes,
            (Extent::Share, Cargo::Slot) => self.share.slot_bytes,
            (Extent::Whole, Cargo::Pages | Cargo::Embeddings) => self.page_bytes,
            // The layout of a worker alone has no bytes; 1 avoids a division by zero.
            (Extent::Share, Cargo::Pages | Cargo::Embeddings) => self.share.page_bytes.max(1),
        }
    }

    fn receive_run(&mut self, PageRun { key, cargo, first, data }: PageRun, extent: Extent) {
        let (bytes, unit) = (data.len(), self.unit_bytes(extent, cargo));
        let count = if cargo == Cargo::Slot { usize::from(bytes == unit) } else { bytes / unit };
        let from = match extent {
            Extent::Whole => Source::Whole(data),
            Extent::Share => Source::Own(data),
        };
        self.will_write(Received { key, cargo, first, count, bytes, from });
    }

    /// Queues a run to be written. The run is dropped if no request waits for it, or if it would overwrite shared
    /// pages.
    fn will_write(&mut self, run: Received) {
        let Some(incoming) = self.incoming.get(&run.key) else { return };
        let may_write = match run.cargo {
            Cargo::Pages => incoming.may_write(run.first, run.count),
            Cargo::Slot => self.slot_bytes > 0 && run.count == 1,
            Cargo::Embeddings => false,
        };
        if may_write {
            self.unwritten.push(run);
        }
    }

    /// Answers each import request that has no received runs left to write, here or on other ranks. If the import
    /// succeeds, the imported request continues here.
    fn finish_imports(&mut self, scheduler: &mut Scheduler, events: &mut TransferEvents) {
        for request in std::mem::take(&mut self.pending_imports) {
            let key = request.key;
            if self.unwritten.has(key) || self.awaits_ranks(&request) {
                self.pending_imports.push_back(request);
                continue;
            }
            let outcome = if self.embeddings.has(key) {
                self.import_embeddings(scheduler, &request, events)
            } else {
                self.import(scheduler, &request, events)
            };
            (request.answer)(outcome);
        }
    }

    /// True if this rank has written all units of an import, and another rank has not. That rank then gets the rest of
    /// its share, or the transfer fails: the rank reports either.
    fn awaits_ranks(&self, request: &ImportRequest) -> bool {
        let has_slots = self.slot_bytes > 0;
        self.incoming.get(&request.key).is_some_and(|incoming| {
            incoming.pages.len() == request.pages
                && incoming.missing_at(0, has_slots).is_none()
                && incoming.awaited_rank(has_slots).is_some()
        })
    }

    fn import_embeddings(
        &mut self,
        scheduler: &mut Scheduler,
        request: &ImportRequest,
        events: &mut TransferEvents,
    ) -> Result<(), Error> {
        let (key, embeddings) = (request.key, self.embeddings.take(request)?);
        if !scheduler.media_here(key) {
            return Err(Error::unavailable(format!("{key} does not wait for embeddings here")));
        }
        events.embedded.push((key, embeddings));
        Ok(())
    }

    fn import(
        &mut self,
        scheduler: &mut Scheduler,
        request: &ImportRequest,
        events: &mut TransferEvents,
    ) -> Result<(), Error> {
        let ImportRequest { key, first, computed, pages, slots, .. } = *request;
        let refused = |why: String| Error::new(ErrorKind::InvalidArgument, why);
        let Some(incoming) = self.incoming.get(&key) else {
            return Err(Error::unavailable(format!("{key} does not wait for planes here")));
        };
        let wanted = incoming.pages.len();
        if pages != wanted {
            return Err(refused(format!("{pages} pages are handed over, but {wanted} are reserved")));
        }
        let missing = incoming.missing_at(0, self.slot_bytes > 0);
        if let Some(Missing::Page(missing)) = missing {
            return Err(refused(format!("page {missing} of {wanted} is missing")));
        }
        let wanted = usize::from(self.slot_bytes > 0);
        if slots != wanted {
            let planes = match self.slot_planes.as_str() {
                "" => "the model has no slot planes",
                planes => planes,
            };
            return Err(refused(format!(
                "{slots} slots are handed over, but {wanted} are wanted ({planes})"
            )));
        }
        if missing == Some(Missing::Slot) {
            return Err(refused(format!("the slot is missing, with the planes {}", self.slot_planes)));
        }
        let first = first.ok_or_else(|| refused("pages are handed over without a token".to_owned()))?;
        scheduler.complete_import(key, first, computed).map_err(refused)?;
        self.incoming.remove(&key);
        events.imported.push((key, first.token));
        Ok(())
    }

    /// Exports a request whose pages or embeddings have all been given to the courier. The request's ending is reported
    /// once the other worker accepts the request.
    fn export(
        &mut self,
        key: GraphKey,
        summary: ExportSummary,
        scheduler: &mut Scheduler,
        events: &mut TransferEvents,
    ) {
        // `None` if the request was cancelled meanwhile; the scheduler then reports its ending.
        if let Some(ending) = scheduler.complete_export(key) {
            self.courier.export(key, summary);
            self.unacknowledged.insert(key, ending);
            self.embeddings.ended(key, &mut *self.courier);
            events.exported.push(key);
        }
    }
}

/// The receiver of a request, as the prefilling engine knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Elsewhere {
    /// Number of the request's leading pages that are valid there.
    pub known: usize,
    /// Number of ranks in its group.
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
