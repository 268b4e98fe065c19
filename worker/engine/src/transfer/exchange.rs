//! Transfer of pages between this engine and others: decides which pages are copied, and which requests leave or
//! arrive.
//!
//! The engine core decides the copies under its lock, between two steps or in a step's [pauses](super::copy_hook). The
//! device's thread then runs the copies ([`PageCopies`]). Only planning frees pages, and the device's thread does the
//! planning as well, so no page changes owners between the decision and the copy. In a pause, pages are read only if
//! they were complete before the step, and written only if they belong to requests that still wait for their pages. The
//! copies therefore do not disturb the step. Each batch of copies is bounded, so that a decode waits for at most one
//! batch. A prefill does not wait for its copies: its pages stay valid until they are sent. It is held back only while
//! the courier has no room, so that a slow receiver does not take steps from other requests.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Instant,
};

use tutti_models::PageLayout;
use tutti_proto::{GraphKey, Rank, cluster::v1 as pb};
use tutti_runtime::{Error, ErrorKind};
use tutti_scheduler::{Ending, Outcome, Reserved, RowCommit, Scheduler};

use super::{
    courier::{Arrival, Cargo, Courier, ExportSummary, ImportRequest, PageRun},
    embeddings::EmbeddingTransfers,
    page_copies::{PageCopies, Pages, Slot},
    requests::{Incoming, Outgoing},
};
use crate::{batch::RowResult, report};

/// Limit on the bytes that one batch copies in each direction inside a step, and the least limit between two steps.
const BATCH_BYTES: usize = 8 << 20;

/// Bytes per second of the previous step that a batch between two steps may copy: about a tenth of one thread's memory
/// bandwidth. After a long step a larger batch delays decodes by the same share, and without it a group of ranks, which
/// copies nothing inside its steps, would send a long prefill in as many steps as it has batches.
const COPY_BYTES_PER_SECOND: f64 = 400e6;

pub(crate) struct Exchange {
    courier: Box<dyn Courier>,
    page_tokens: usize,
    page_bytes: usize,
    /// Bytes of a request's state in all slot planes; 0 if the model has none.
    slot_bytes: usize,
    /// Names of the slot planes, for error messages.
    slot_planes: String,
    /// Requests that are prefilled here and decoded elsewhere.
    outgoing: BTreeMap<GraphKey, Outgoing>,
    /// Requests that are prefilled elsewhere and decoded here.
    incoming: BTreeMap<GraphKey, Incoming>,
    /// Runs of received pages to write to the device, in order of arrival.
    to_write: VecDeque<PageRun>,
    /// Bytes in `to_write`.
    unwritten: usize,
    /// Import requests whose pages are not all written yet.
    pending_imports: VecDeque<ImportRequest>,
    /// Exported requests that the receiving worker has not accepted yet, each with the ending to report once it has.
    unacknowledged: BTreeMap<GraphKey, Ending>,
    embeddings: EmbeddingTransfers,
    /// Limit on the bytes that the next batch copies in each direction.
    batch_bytes: usize,
    /// Time of the last batch between two steps.
    turned: Instant,
}

impl Exchange {
    /// Creates an exchange. `width` is the number of elements per embedding.
    pub fn new(courier: Box<dyn Courier>, layout: &PageLayout, width: usize) -> Self {
        Self {
            courier,
            page_tokens: layout.page_tokens,
            // A model without pages sends no pages; 1 avoids a division by zero.
            page_bytes: layout.page_bytes().max(1),
            slot_bytes: layout.slot_bytes(),
            slot_planes: layout.slot_planes().collect::<Vec<_>>().join(", "),
            outgoing: BTreeMap::new(),
            incoming: BTreeMap::new(),
            to_write: VecDeque::new(),
            unwritten: 0,
            pending_imports: VecDeque::new(),
            unacknowledged: BTreeMap::new(),
            embeddings: EmbeddingTransfers::new(width),
            batch_bytes: BATCH_BYTES,
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

    /// Registers a request of `tokens` tokens that is prefilled for another worker. That worker already has the
    /// request's first `known_elsewhere` pages.
    pub fn will_send(&mut self, key: GraphKey, tokens: usize, known_elsewhere: usize) {
        // The last page is sent even if the other worker has it.
        let sent = known_elsewhere.min(tokens.div_ceil(self.page_tokens).saturating_sub(1));
        self.outgoing.insert(key, Outgoing::new(sent));
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
        let Reserved { key, pages, known, slot, .. } = reserved;
        self.courier.reserved(key, Cargo::Pages, pages.len(), known);
        let written = (0..pages.len()).map(|index| index < known).collect();
        let pages = pages.into();
        self.incoming.insert(key, Incoming { pages, first_own: known, written, slot, slot_written: false });
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
        while self.unwritten < self.batch_bytes
            && let Some(arrival) = self.courier.take()
        {
            match arrival {
                Arrival::Pages(run) => {
                    // A run is dropped if no request waits for it, or if it would overwrite shared pages.
                    if let Some(run) = self.embeddings.fill(run).filter(|run| self.may_write(run)) {
                        self.unwritten += run.data.len();
                        self.to_write.push_back(run);
                    }
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
                    None => scheduler.fail_transfer(key, why),
                },
            }
        }
        self.finish_imports(scheduler, events);
    }

    /// True if the run's pages belong to a waiting request and none of them is shared, or if the run is the slot of a
    /// waiting request.
    fn may_write(&self, run: &PageRun) -> bool {
        let Some(incoming) = self.incoming.get(&run.key) else { return false };
        let end = run.first.saturating_add(run.data.len() / self.page_bytes);
        match run.cargo {
            Cargo::Pages => run.first >= incoming.first_own && end <= incoming.pages.len(),
            Cargo::Slot => self.slot_bytes > 0 && run.data.len() == self.slot_bytes,
            Cargo::Embeddings => false,
        }
    }

    /// Answers each import request that has no received pages left to write. If the import succeeds, the imported
    /// request continues here.
    fn finish_imports(&mut self, scheduler: &mut Scheduler, events: &mut TransferEvents) {
        for request in std::mem::take(&mut self.pending_imports) {
            let key = request.key;
            if self.to_write.iter().any(|run| run.key == key) {
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
        if let Some(missing) = incoming.written.iter().position(|written| !written) {
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
        if wanted > 0 && !incoming.slot_written {
            return Err(refused(format!("the slot is missing, with the planes {}", self.slot_planes)));
        }
        let first = first.ok_or_else(|| refused("pages are handed over without a token".to_owned()))?;
        scheduler.complete_import(key, first, computed).map_err(refused)?;
        self.incoming.remove(&key);
        events.imported.push((key, first.token));
        Ok(())
    }

    /// Sets the limit of the next batch, which is between two steps.
    pub fn between_steps(&mut self) {
        let now = Instant::now();
        let since = now - std::mem::replace(&mut self.turned, now);
        self.batch_bytes = BATCH_BYTES.max((since.as_secs_f64() * COPY_BYTES_PER_SECOND) as usize);
    }

    /// Decides the page copies to run now, and sets the limit of a batch inside a step. Holds back requests with pages
    /// for which the courier has no room. Embeddings need no copy, so this method sends them directly.
    pub fn start_copies(&mut self, scheduler: &mut Scheduler, events: &mut TransferEvents) -> PageCopies {
        let mut copies = PageCopies::default();
        let encoded =
            self.embeddings.send(&mut *self.courier, |key, held_back| scheduler.hold_back(key, held_back));
        for (key, summary) in encoded {
            self.export(key, summary, scheduler, events);
        }
        let batch_bytes = std::mem::replace(&mut self.batch_bytes, BATCH_BYTES);
        // Pages that the courier takes, and pages of this batch.
        let mut room = self.courier.room() / self.page_bytes;
        let mut batch = room.min((batch_bytes / self.page_bytes).max(1));
        for (&key, outgoing) in &mut self.outgoing {
            let whole = outgoing.whole_pages(self.page_tokens);
            let count = whole.saturating_sub(outgoing.sent).min(batch);
            if count > 0 {
                let first = outgoing.sent;
                let pages = outgoing.table[first..first + count].to_vec();
                copies.reads.push((Pages { key, first, pages }, Vec::with_capacity(count * self.page_bytes)));
                outgoing.sent += count;
                (room, batch) = (room - count, batch - count);
            }
            let held_back = outgoing.sent < whole && room == 0;
            if held_back != outgoing.held_back {
                outgoing.held_back = held_back;
                scheduler.hold_back(key, held_back);
            }
        }
        self.start_slot_reads(&mut copies);
        let mut bytes = 0;
        while bytes < batch_bytes
            && let Some(PageRun { key, cargo, first, data }) = self.to_write.pop_front()
        {
            self.unwritten -= data.len();
            // The run is dropped if the request has ended since the run arrived, because the request's pages may then
            // belong to another request.
            let Some(incoming) = self.incoming.get(&key) else { continue };
            if cargo == Cargo::Slot {
                bytes += data.len();
                copies.slot_writes.push((Slot { key, slot: incoming.slot }, data));
                continue;
            }
            let Some(pages) = incoming.pages.get(first..first + data.len() / self.page_bytes) else {
                continue;
            };
            bytes += data.len();
            copies.writes.push((Pages { key, first, pages: pages.to_vec() }, data));
        }
        copies
    }

    /// Adds the slots of requests whose prefill is done, as far as the courier has room.
    fn start_slot_reads(&mut self, copies: &mut PageCopies) {
        if self.slot_bytes == 0 {
            return;
        }
        let reading: usize = copies.reads.iter().map(|(_, data)| data.capacity()).sum();
        let mut room = self.courier.room().saturating_sub(reading);
        for (&key, outgoing) in &mut self.outgoing {
            if outgoing.first.is_some() && !outgoing.slot_sent && room >= self.slot_bytes {
                room -= self.slot_bytes;
                outgoing.slot_sent = true;
                let slot = Slot { key, slot: outgoing.slot };
                copies.slot_reads.push((slot, Vec::with_capacity(self.slot_bytes)));
            }
        }
    }

    /// Records that the copies have run.
    pub fn finish_copies(
        &mut self,
        copies: PageCopies,
        scheduler: &mut Scheduler,
        events: &mut TransferEvents,
    ) {
        for (Pages { key, first, .. }, data) in copies.reads {
            self.courier.send(PageRun { key, cargo: Cargo::Pages, first, data });
        }
        for (Slot { key, .. }, data) in copies.slot_reads {
            self.courier.send(PageRun { key, cargo: Cargo::Slot, first: 0, data });
        }
        for (Slot { key, .. }, _) in copies.slot_writes {
            if let Some(incoming) = self.incoming.get_mut(&key) {
                incoming.slot_written = true;
            }
        }
        for (Pages { key, first, pages }, _) in copies.writes {
            if let Some(incoming) = self.incoming.get_mut(&key) {
                incoming.written[first..first + pages.len()].fill(true);
            }
        }
        let done = |(key, outgoing): (&GraphKey, &Outgoing)| {
            let (first, since) = outgoing.first?;
            let pages = outgoing.whole_pages(self.page_tokens);
            let (computed, slots) = (outgoing.computed, usize::from(self.slot_bytes > 0));
            let summary = ExportSummary { first: Some(first), computed, pages, slots, since };
            let all_sent = outgoing.sent == pages && (slots == 0 || outgoing.slot_sent);
            all_sent.then_some((*key, summary))
        };
        let done: Vec<_> = self.outgoing.iter().filter_map(done).collect();
        for (key, summary) in done {
            self.outgoing.remove(&key);
            self.export(key, summary, scheduler, events);
        }
        self.finish_imports(scheduler, events);
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
