//! The copies of one batch: which pages and slots are read and written now.

use std::time::Instant;

use tutti_models::{ShareRun, ShareUnits};
use tutti_scheduler::Scheduler;

use super::{Exchange, TransferEvents};
use crate::transfer::{
    courier::{Cargo, ExportSummary, PageRun},
    incoming::{Received, Source},
    outgoing::{Extent, Outgoing},
    page_copies::{PageCopies, UnitCopy},
};

/// Limit on the bytes that one batch copies in each direction inside a step, and the least limit between two steps.
pub(super) const BATCH_BYTES: usize = 8 << 20;

/// Bytes per second of the previous step that a batch between two steps may copy: about a tenth of one thread's memory
/// bandwidth. After a long step a larger batch delays decodes by the same share, and without it a group of ranks, which
/// copies nothing inside its steps, would send a long prefill in as many steps as it has batches.
const COPY_BYTES_PER_SECOND: f64 = 400e6;

impl Exchange {
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
        copies.orders = self.courier.orders();
        let batch_bytes = std::mem::replace(&mut self.batch_bytes, BATCH_BYTES);
        self.start_reads(batch_bytes, scheduler, &mut copies);
        let mut bytes = 0;
        while bytes < batch_bytes
            && let Some(run) = self.unwritten.next(&self.incoming)
        {
            bytes += run.bytes;
            self.start_write(run, &mut copies);
        }
        copies
    }

    /// Adds the pages that are complete, as far as the courier has room, and the slots of requests whose prefill is
    /// done.
    fn start_reads(&mut self, batch_bytes: usize, scheduler: &mut Scheduler, copies: &mut PageCopies) {
        // Bytes that the courier takes, and bytes of this batch, which reads one page at least.
        let (mut room, mut batch) = (self.courier.room(), Some(batch_bytes));
        let page_bytes = [Extent::Whole, Extent::Share].map(|extent| self.unit_bytes(extent, Cargo::Pages));
        for (&key, outgoing) in &mut self.outgoing {
            let bytes = page_bytes[usize::from(outgoing.extent == Extent::Share)];
            let whole = outgoing.whole_pages(self.page_tokens);
            let in_batch = batch.map_or(0, |left| (left / bytes).max(usize::from(copies.reads.is_empty())));
            let count = whole.saturating_sub(outgoing.sent).min(room / bytes).min(in_batch);
            if count > 0 {
                let (first, extent) = (outgoing.sent, outgoing.extent);
                let units = ShareUnits::Pages(outgoing.table[first..first + count].to_vec());
                let data = Vec::with_capacity(count * bytes);
                copies.reads.push(UnitCopy { run: ShareRun { key, first, units }, extent, data });
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
        if self.slot_bytes == 0 {
            return;
        }
        let slot_bytes = [Extent::Whole, Extent::Share].map(|extent| self.unit_bytes(extent, Cargo::Slot));
        for (&key, outgoing) in &mut self.outgoing {
            let bytes = slot_bytes[usize::from(outgoing.extent == Extent::Share)];
            if outgoing.first.is_some() && !outgoing.slot_sent && room >= bytes {
                room -= bytes;
                outgoing.slot_sent = true;
                let run = ShareRun { key, first: 0, units: ShareUnits::Slot(outgoing.slot) };
                let data = Vec::with_capacity(bytes);
                copies.reads.push(UnitCopy { run, extent: outgoing.extent, data });
            }
        }
    }

    fn start_write(&self, run: Received, copies: &mut PageCopies) {
        let Received { key, cargo, first, count, bytes, from } = run;
        let Some(incoming) = self.incoming.get(&key) else { return };
        let units = match (cargo, incoming.pages.get(first..first + count)) {
            (Cargo::Slot, _) => ShareUnits::Slot(incoming.slot),
            (_, Some(pages)) => ShareUnits::Pages(pages.to_vec()),
            (_, None) => return,
        };
        let run = ShareRun { key, first, units };
        match from {
            Source::Whole(data) => copies.writes.push(UnitCopy { run, extent: Extent::Whole, data }),
            Source::Own(data) => copies.writes.push(UnitCopy { run, extent: Extent::Share, data }),
            Source::Rank(rank) => copies.rank_writes.push((rank, run, bytes)),
        }
    }

    /// Records that the copies have run.
    pub fn finish_copies(
        &mut self,
        copies: PageCopies,
        scheduler: &mut Scheduler,
        events: &mut TransferEvents,
    ) {
        for UnitCopy { run: ShareRun { key, first, units }, extent, data } in copies.reads {
            let run = PageRun { key, cargo: cargo_of(&units), first, data };
            match extent {
                Extent::Whole => self.courier.send(run),
                Extent::Share => self.courier.send_share(run),
            }
        }
        for UnitCopy { run, extent, .. } in copies.writes {
            // Shares are written by each rank for itself.
            self.written(&run, (extent == Extent::Share).then_some(0));
        }
        for (rank, run, _) in copies.rank_writes {
            self.written(&run, Some(rank));
        }
        let done = |(key, outgoing): (&tutti_proto::GraphKey, &Outgoing)| {
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

    fn written(&mut self, ShareRun { key, first, units }: &ShareRun, rank: Option<usize>) {
        if let Some(incoming) = self.incoming.get_mut(key) {
            incoming.written(rank, cargo_of(units), *first, units.count());
        }
    }
}

fn cargo_of(units: &ShareUnits) -> Cargo {
    match units {
        ShareUnits::Pages(_) => Cargo::Pages,
        ShareUnits::Slot(_) => Cargo::Slot,
    }
}
