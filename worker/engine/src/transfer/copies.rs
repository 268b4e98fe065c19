//! One batch of copies: the pages and slots to read, and those to write.

use std::{collections::BTreeMap, time::Instant};

use tutti_kernels::DeviceError;
use tutti_models::{GroupShares, PausedPages};
use tutti_proto::{GraphKey, cluster::v1 as pb};
use tutti_scheduler::Scheduler;
use tutti_transfer::{Extent, HandOver, Run, Source, UnitIds, UnitKind};

use super::{TransferEvents, Transfers, outgoing::Outgoing};

/// Limit on the bytes that one batch copies in each direction inside a step. The limit of a batch between two steps is
/// at least as large.
pub(super) const BATCH_BYTES: usize = 8 << 20;

/// Bytes that a batch between two steps may copy, per second since the previous such batch: about a tenth of one
/// thread's memory bandwidth. The limit grows with the duration of the step, so that copies delay decodes by the same
/// share after any step. With a fixed limit, a long prefill in a group of ranks would take one step per batch to send,
/// because a group copies only between steps.
const COPY_BYTES_PER_SECOND: f64 = 400e6;

/// Copies of pages and slots that the device's thread runs between two steps or in a pause of a step.
#[derive(Default)]
pub(crate) struct PageCopies {
    /// Orders for the connectors of the group's other ranks. They are sent before the copies run.
    orders: Vec<pb::RankOrder>,
    reads: Vec<UnitCopy>,
    writes: Vec<UnitCopy>,
    /// Runs whose shares have arrived at another rank, which will write them. An element is (rank, run, ids of the
    /// pages or of the slot to write).
    rank_writes: Vec<(usize, Run, UnitIds)>,
    /// Bytes of `rank_writes` on each rank.
    rank_bytes: BTreeMap<usize, usize>,
}

/// A copy of consecutive pages of a request, or of its slot.
struct UnitCopy {
    run: Run,
    ids: UnitIds,
    /// The bytes to write, or room for the bytes to read.
    data: Vec<u8>,
}

impl PageCopies {
    pub fn is_empty(&self) -> bool {
        self.orders.is_empty()
            && self.reads.is_empty()
            && self.writes.is_empty()
            && self.rank_writes.is_empty()
    }

    /// Bytes that the copies move on one rank.
    pub fn bytes(&self) -> usize {
        let reads: usize = self.reads.iter().map(|copy| copy.data.capacity()).sum();
        let writes: usize = self.writes.iter().map(|copy| copy.data.len()).sum();
        reads + writes.max(self.rank_bytes.values().copied().max().unwrap_or(0))
    }

    /// Runs the copies. An error ends the worker, because copied and uncopied pages cannot be told apart.
    pub fn run(&mut self, pages: &mut dyn PausedPages) -> Result<(), DeviceError> {
        let failed = |e| DeviceError::Lost(format!("cannot copy pages for another worker: {e}"));
        if !self.orders.is_empty() {
            shares(pages)?.order(std::mem::take(&mut self.orders)).map_err(failed)?;
        }
        for UnitCopy { run, ids, data } in &mut self.reads {
            match run.extent {
                Extent::Share => shares(pages)?.read(run, ids, data),
                Extent::Whole => pages.read_units(ids, data),
            }
            .map_err(failed)?;
        }
        if !self.rank_writes.is_empty() {
            shares(pages)?.write_on_ranks(&self.rank_writes).map_err(failed)?;
        }
        for UnitCopy { run, ids, data } in &self.writes {
            match run.extent {
                Extent::Share => shares(pages)?.write(ids, data),
                Extent::Whole => pages.write_units(ids, data),
            }
            .map_err(failed)?;
        }
        Ok(())
    }
}

fn shares(pages: &mut dyn PausedPages) -> Result<&mut dyn GroupShares, DeviceError> {
    pages.group_shares().ok_or_else(|| DeviceError::Lost("shares are copied without a group".into()))
}

impl Transfers {
    /// Sets the byte limit of the next batch, which runs between two steps. The limit grows with the time since the
    /// previous call, and is at least `BATCH_BYTES`.
    pub fn between_steps(&mut self) {
        let now = Instant::now();
        let since = now - std::mem::replace(&mut self.turned, now);
        self.batch_bytes = BATCH_BYTES.max((since.as_secs_f64() * COPY_BYTES_PER_SECOND) as usize);
    }

    /// Decides the page copies to run now, and resets the byte limit to that of a batch inside a step. Holds back each
    /// request whose pages the connector has no room for. Embeddings need no copy, so this method sends them directly.
    pub fn start_copies(&mut self, scheduler: &mut Scheduler, events: &mut TransferEvents) -> PageCopies {
        let mut copies = PageCopies::default();
        let encoded =
            self.embeddings.send(&mut *self.connector, |key, held_back| scheduler.hold_back(key, held_back));
        for (key, end) in encoded {
            self.export(key, end, scheduler, events);
        }
        copies.orders = self.connector.orders();
        let batch_bytes = std::mem::replace(&mut self.batch_bytes, BATCH_BYTES);
        self.start_reads(batch_bytes, scheduler, &mut copies);
        let mut bytes = 0;
        while bytes < batch_bytes
            && let Some((run, source, of_run)) = self.unwritten.next(&self.incoming)
        {
            bytes += of_run;
            self.start_write(run, source, of_run, &mut copies);
        }
        copies
    }

    /// Adds reads of complete pages, as far as the connector has room, and of the slots of requests whose prefill is
    /// done.
    fn start_reads(&mut self, batch_bytes: usize, scheduler: &mut Scheduler, copies: &mut PageCopies) {
        // `room` is the number of bytes that the connector has room for, and `batch` the number that is left in this
        // batch. A batch reads at least one page.
        let (mut room, mut batch) = (self.connector.room(), Some(batch_bytes));
        let page_bytes =
            [Extent::Whole, Extent::Share].map(|extent| self.unit_bytes(extent, UnitKind::Pages));
        let has_pages = self.has_pages();
        for (&key, outgoing) in &mut self.outgoing {
            let bytes = page_bytes[usize::from(outgoing.extent == Extent::Share)];
            let whole = outgoing.whole_pages(self.page_tokens);
            if !has_pages {
                outgoing.sent = whole;
            }
            let in_batch = batch.map_or(0, |left| (left / bytes).max(usize::from(copies.reads.is_empty())));
            let count = whole.saturating_sub(outgoing.sent).min(room / bytes).min(in_batch);
            if count > 0 {
                let (first, extent) = (outgoing.sent, outgoing.extent);
                let run = Run { key, kind: UnitKind::Pages, extent, first, count };
                let ids = UnitIds::Pages(outgoing.table[first..first + count].to_vec());
                copies.reads.push(UnitCopy { run, ids, data: Vec::with_capacity(count * bytes) });
                outgoing.sent += count;
                room -= count * bytes;
                batch = batch.and_then(|left| left.checked_sub(count * bytes));
            }
            let held_back = outgoing.sent < whole && room < bytes;
            if held_back != outgoing.held_back {
                outgoing.held_back = held_back;
                scheduler.hold_back(key, held_back);
            }
        }
        if !self.has_slots() {
            return;
        }
        let slot_bytes = [Extent::Whole, Extent::Share].map(|extent| self.unit_bytes(extent, UnitKind::Slot));
        for (&key, outgoing) in &mut self.outgoing {
            let bytes = slot_bytes[usize::from(outgoing.extent == Extent::Share)];
            if outgoing.first.is_some() && !outgoing.slot_sent && room >= bytes {
                room -= bytes;
                outgoing.slot_sent = true;
                let run = Run { key, kind: UnitKind::Slot, extent: outgoing.extent, first: 0, count: 1 };
                let ids = UnitIds::Slot(outgoing.slot);
                copies.reads.push(UnitCopy { run, ids, data: Vec::with_capacity(bytes) });
            }
        }
    }

    fn start_write(&self, run: Run, source: Source, bytes: usize, copies: &mut PageCopies) {
        let Some(incoming) = self.incoming.get(&run.key) else { return };
        let ids = match (run.kind, incoming.pages.get(run.first..run.first + run.count)) {
            (UnitKind::Slot, _) => UnitIds::Slot(incoming.slot),
            (_, Some(pages)) => UnitIds::Pages(pages.to_vec()),
            (_, None) => return,
        };
        match source {
            Source::Here(data) => copies.writes.push(UnitCopy { run, ids, data }),
            Source::Rank(rank) => {
                copies.rank_writes.push((rank, run, ids));
                *copies.rank_bytes.entry(rank).or_default() += bytes;
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
        for UnitCopy { run, data, .. } in copies.reads {
            self.connector.send(run, data);
        }
        for UnitCopy { run, .. } in copies.writes {
            // A share is written on this rank alone, a whole run on all ranks.
            self.written(&run, (run.extent == Extent::Share).then_some(0));
        }
        for (rank, run, _) in copies.rank_writes {
            self.written(&run, Some(rank));
        }
        let slots = usize::from(self.has_slots());
        let done = |(key, outgoing): (&GraphKey, &Outgoing)| {
            let (first, since) = outgoing.first?;
            let (computed, pages) = (outgoing.computed, outgoing.whole_pages(self.page_tokens));
            let hand_over = HandOver { first: Some(first), computed, pages, slots };
            let all_sent = outgoing.sent == pages && (slots == 0 || outgoing.slot_sent);
            all_sent.then_some((*key, (hand_over, since)))
        };
        let done: Vec<_> = self.outgoing.iter().filter_map(done).collect();
        for (key, end) in done {
            self.outgoing.remove(&key);
            self.export(key, end, scheduler, events);
        }
        self.finish_imports(scheduler, events);
    }

    fn written(&mut self, run: &Run, rank: Option<usize>) {
        if let Some(incoming) = self.incoming.get_mut(&run.key) {
            incoming.written(rank, run);
        }
    }
}
