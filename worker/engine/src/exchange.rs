//! Requests that are divided between this engine and another: which of their pages are to be copied, and what follows.
//! Embeddings of media, which are no pages, are [`tensors`].
//!
//! Decided under the desk's lock, between steps or in a step's [pauses](crate::beside); the copying itself ([`Errands`]) is
//! the device's thread's, right after. Pages are given up by plans alone, which that thread makes, so no page changes hands
//! between the two; and what is copied in a pause is of no row of the step: pages that are whole since the step before, or
//! that a request waits for. Pieces are bounded: whoever decodes waits for no more than one at a time.

mod tensors;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Instant,
};

use tutti_kernels::{DeviceError, PageId};
use tutti_models::{PageLayout, PausedPages};
use tutti_proto::{GraphKey, Rank, cluster::v1 as pb};
use tutti_runtime::{Error, ErrorKind};
use tutti_scheduler::{self as scheduler, Ending, Outcome, OutputToken, Reserved, RowCommit, Scheduler};

use self::tensors::Tensors;
use crate::{
    batch::RowResult,
    courier::{Arrival, Cargo, Courier, HandOver, HandedOver, PageRun},
    report,
};

/// Bytes that are copied each way at a time.
const PIECE: usize = 8 << 20;

pub(crate) struct Exchange {
    courier: Box<dyn Courier>,
    page_tokens: usize,
    page_bytes: usize,
    /// Prefilled here, to be decoded elsewhere.
    outgoing: BTreeMap<GraphKey, Outgoing>,
    /// Prefilled elsewhere, to be decoded here.
    incoming: BTreeMap<GraphKey, Incoming>,
    /// Pages to be written, in the order in which they came.
    to_write: VecDeque<PageRun>,
    /// Bytes of those.
    unwritten: usize,
    /// Hand-overs behind pages that are to be written.
    to_settle: VecDeque<HandOver>,
    /// Ended here, once the other side has taken over.
    untaken: BTreeMap<GraphKey, Ending>,
    tensors: Tensors,
}

#[derive(Default)]
struct Outgoing {
    table: Arc<[scheduler::PageId]>,
    /// Tokens whose planes stand in the pages.
    computed: usize,
    /// Pages that the courier has, or that the other side had before.
    sent: usize,
    /// Once the prefill is done.
    first: Option<(OutputToken, Instant)>,
    /// Whether the scheduler holds it back.
    held_back: bool,
}

struct Incoming {
    pages: Arc<[scheduler::PageId]>,
    /// Those before this one are known here, and others read them: they are never written.
    first_own: usize,
    /// Which of them hold what they should.
    written: Vec<bool>,
}

/// What the device's thread copies before the next step.
#[derive(Default)]
pub(crate) struct Errands {
    reads: Vec<(Pages, Vec<u8>)>,
    writes: Vec<(Pages, Vec<u8>)>,
}

/// Some of a request's pages on the device.
struct Pages {
    key: GraphKey,
    first: usize,
    pages: Vec<PageId>,
}

impl Errands {
    pub fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty()
    }

    /// Bytes that they copy.
    pub fn bytes(&self) -> usize {
        let read = self.reads.iter().map(|(_, data)| data.capacity()).sum::<usize>();
        read + self.writes.iter().map(|(_, data)| data.len()).sum::<usize>()
    }

    /// An error is the end of the worker: what it copied cannot be told from what it did not.
    pub fn run(&mut self, pages: &mut dyn PausedPages) -> Result<(), DeviceError> {
        let failed = |e| DeviceError::Lost(format!("cannot copy pages for another worker: {e}"));
        for (read, data) in &mut self.reads {
            pages.read_pages(&read.pages, data).map_err(failed)?;
        }
        for (written, data) in &self.writes {
            pages.write_pages(&written.pages, data).map_err(failed)?;
        }
        Ok(())
    }
}

fn on_device(pages: &[scheduler::PageId]) -> Vec<PageId> {
    pages.iter().map(|page| PageId(page.0)).collect()
}

impl Outgoing {
    /// Pages that nothing will change any more.
    fn whole_pages(&self, page_tokens: usize) -> usize {
        match self.first {
            Some(_) => self.computed.div_ceil(page_tokens),
            None => self.computed / page_tokens,
        }
    }
}

impl Exchange {
    /// Embeddings of media are so many elements wide.
    pub fn new(courier: Box<dyn Courier>, layout: &PageLayout, width: usize) -> Self {
        Self {
            courier,
            page_tokens: layout.page_tokens,
            // Where there are no pages, none will ever be sent.
            page_bytes: layout.page_bytes().max(1),
            outgoing: BTreeMap::new(),
            incoming: BTreeMap::new(),
            to_write: VecDeque::new(),
            unwritten: 0,
            to_settle: VecDeque::new(),
            untaken: BTreeMap::new(),
            tensors: Tensors::new(width),
        }
    }

    /// Whether nothing is left that the conductor is to be told of.
    pub fn is_idle(&self) -> bool {
        self.untaken.is_empty()
    }

    /// Whether any request is on its way from or to another worker, so that there may be something to copy.
    pub fn is_active(&self) -> bool {
        !self.outgoing.is_empty() || !self.incoming.is_empty()
    }

    /// A request of so many tokens that is prefilled for another worker was accepted; the first pages are there already.
    pub fn will_send(&mut self, key: GraphKey, tokens: usize, known_elsewhere: usize) {
        // The last page always goes, and the hand-over behind it.
        let sent = known_elsewhere.min(tokens.div_ceil(self.page_tokens).saturating_sub(1));
        self.outgoing.insert(key, Outgoing { sent, ..Outgoing::default() });
    }

    /// A request was accepted whose media are encoded here, so many tokens of them, for whoever prefills it.
    pub fn will_encode(&mut self, key: GraphKey, tokens: usize) {
        self.tensors.will_send(key, tokens);
    }

    /// A request was accepted that waits for so many tokens' embeddings.
    pub fn awaits_media(&mut self, key: GraphKey, tokens: usize) {
        self.tensors.will_receive(key, tokens, &mut *self.courier);
    }

    /// A request holds the pages that another worker is to fill.
    pub fn reserved(&mut self, reserved: Reserved) {
        let Reserved { key, pages, known, .. } = reserved;
        self.courier.reserved(key, Cargo::Pages, pages.len(), known);
        let written = (0..pages.len()).map(|place| place < known).collect();
        self.incoming.insert(key, Incoming { pages: pages.into(), first_own: known, written });
    }

    /// A request has ended here.
    pub fn ended(&mut self, key: GraphKey) {
        self.outgoing.remove(&key);
        self.incoming.remove(&key);
        self.tensors.ended(key, &mut *self.courier);
        self.courier.ended(key);
    }

    /// Cancels a request that has ended here and waits for the other side. Gives its completion.
    pub fn cancel(&mut self, key: GraphKey, rank: Rank) -> Option<pb::Completion> {
        let mut ending = self.untaken.remove(&key)?;
        self.courier.ended(key);
        ending.outcome = Outcome::Cancelled;
        Some(report::completion(ending, rank))
    }

    /// A step was committed, with these results.
    pub fn committed<'a>(
        &mut self,
        commits: &[RowCommit],
        results: impl Iterator<Item = Option<&'a RowResult>>,
    ) {
        for (commit, result) in commits.iter().zip(results) {
            if let Some(result) = result.filter(|result| !result.encoded.is_empty()) {
                self.tensors.encoded(commit.row.key, commit.row.positions.start, &result.encoded);
            }
        }
        if self.outgoing.is_empty() {
            return;
        }
        for commit in commits.iter().filter(|commit| commit.ending.is_none()) {
            if let Some(outgoing) = self.outgoing.get_mut(&commit.row.key) {
                outgoing.computed = commit.row.positions.end;
                outgoing.table = Arc::clone(&commit.row.block_table);
                outgoing.first = commit.sampled.map(|first| (first, Instant::now()));
            }
        }
    }

    /// Takes what has come. Gives the completions that follow from it, and the requests that go on here with their first
    /// tokens.
    pub fn receive(&mut self, scheduler: &mut Scheduler, rank: Rank, news: &mut Received) {
        while self.unwritten < PIECE
            && let Some(arrival) = self.courier.take()
        {
            match arrival {
                Arrival::Pages(run) => {
                    // Nothing waits for what is not taken.
                    if let Some(run) = self.tensors.fill(run).filter(|run| self.may_write(run)) {
                        self.unwritten += run.data.len();
                        self.to_write.push_back(run);
                    }
                }
                Arrival::HandOver(hand_over) => self.to_settle.push_back(hand_over),
                Arrival::Taken(key) => {
                    let ending = self.untaken.remove(&key);
                    news.completions.extend(ending.map(|ending| report::completion(ending, rank)));
                }
                Arrival::Failed(key, why) => match self.untaken.remove(&key) {
                    Some(mut ending) => {
                        ending.outcome = Outcome::TransferFailed(why);
                        news.completions.push(report::completion(ending, rank));
                    }
                    None => scheduler.fail_transfer(key, why),
                },
            }
        }
        self.settle(scheduler, news);
    }

    /// Whether these pages are of somebody who waits for them, and none of them known here already.
    fn may_write(&self, run: &PageRun) -> bool {
        let end = run.first + run.data.len() / self.page_bytes;
        self.incoming.get(&run.key).is_some_and(|i| run.first >= i.first_own && end <= i.pages.len())
    }

    /// Lets those go on here whose pages are all written.
    fn settle(&mut self, scheduler: &mut Scheduler, news: &mut Received) {
        for hand_over in std::mem::take(&mut self.to_settle) {
            let key = hand_over.key;
            if self.to_write.iter().any(|run| run.key == key) {
                self.to_settle.push_back(hand_over);
                continue;
            }
            let outcome = if self.tensors.has(key) {
                self.take_embeddings(scheduler, &hand_over, news)
            } else {
                self.take_over(scheduler, &hand_over, news)
            };
            (hand_over.answer)(outcome);
        }
    }

    fn take_embeddings(
        &mut self,
        scheduler: &mut Scheduler,
        hand_over: &HandOver,
        news: &mut Received,
    ) -> Result<(), Error> {
        let (key, embeddings) = (hand_over.key, self.tensors.take_over(hand_over)?);
        if !scheduler.media_here(key) {
            return Err(Error::unavailable(format!("{key} waits for no embeddings here")));
        }
        news.embedded.push((key, embeddings));
        Ok(())
    }

    fn take_over(
        &mut self,
        scheduler: &mut Scheduler,
        hand_over: &HandOver,
        news: &mut Received,
    ) -> Result<(), Error> {
        let HandOver { key, first, computed, pages, .. } = *hand_over;
        let refused = |why: String| Error::new(ErrorKind::InvalidArgument, why);
        let Some(incoming) = self.incoming.get(&key) else {
            return Err(Error::unavailable(format!("{key} waits for no planes here")));
        };
        let wanted = incoming.pages.len();
        if pages != wanted {
            return Err(refused(format!("{pages} pages are handed over, but {wanted} are reserved")));
        }
        if let Some(missing) = incoming.written.iter().position(|written| !written) {
            return Err(refused(format!("page {missing} of {wanted} is missing")));
        }
        let first = first.ok_or_else(|| refused("pages are handed over without a token".to_owned()))?;
        scheduler.complete_import(key, first, computed).map_err(refused)?;
        self.incoming.remove(&key);
        news.taken_over.push((key, first.token));
        Ok(())
    }

    /// What is to be copied before the next step. Whoever computes faster than its pages leave is held back. Embeddings need
    /// no copying, and leave at once.
    pub fn errands(&mut self, scheduler: &mut Scheduler, news: &mut Received) -> Errands {
        let mut errands = Errands::default();
        let encoded =
            self.tensors.send(&mut *self.courier, |key, held_back| scheduler.hold_back(key, held_back));
        for (key, handed) in encoded {
            self.let_go(key, handed, scheduler, news);
        }
        let mut room = self.courier.room().min(PIECE.max(self.page_bytes)) / self.page_bytes;
        for (&key, outgoing) in &mut self.outgoing {
            let whole = outgoing.whole_pages(self.page_tokens);
            let count = whole.saturating_sub(outgoing.sent).min(room);
            if count > 0 {
                let first = outgoing.sent;
                let pages = on_device(&outgoing.table[first..first + count]);
                errands
                    .reads
                    .push((Pages { key, first, pages }, Vec::with_capacity(count * self.page_bytes)));
                outgoing.sent += count;
                room -= count;
            }
            let held_back = outgoing.sent < whole;
            if held_back != outgoing.held_back {
                outgoing.held_back = held_back;
                scheduler.hold_back(key, held_back);
            }
        }
        let mut bytes = 0;
        while bytes < PIECE
            && let Some(PageRun { key, first, data }) = self.to_write.pop_front()
        {
            self.unwritten -= data.len();
            // Who is no longer waiting for pages has none that may be written to.
            let Some(incoming) = self.incoming.get(&key) else { continue };
            let Some(pages) = incoming.pages.get(first..first + data.len() / self.page_bytes) else {
                continue;
            };
            bytes += data.len();
            errands.writes.push((Pages { key, first, pages: on_device(pages) }, data));
        }
        errands
    }

    /// The errands have been run.
    pub fn carried(&mut self, errands: Errands, scheduler: &mut Scheduler, news: &mut Received) {
        for (Pages { key, first, .. }, data) in errands.reads {
            self.courier.send(PageRun { key, first, data });
        }
        for (Pages { key, first, pages }, _) in errands.writes {
            if let Some(incoming) = self.incoming.get_mut(&key) {
                incoming.written[first..first + pages.len()].fill(true);
            }
        }
        let done = |(key, outgoing): (&GraphKey, &Outgoing)| {
            let (first, since) = outgoing.first?;
            let pages = outgoing.whole_pages(self.page_tokens);
            let handed = HandedOver { first: Some(first), computed: outgoing.computed, pages, since };
            (outgoing.sent == pages).then_some((*key, handed))
        };
        let done: Vec<_> = self.outgoing.iter().filter_map(done).collect();
        for (key, handed) in done {
            self.outgoing.remove(&key);
            self.let_go(key, handed, scheduler, news);
        }
        self.settle(scheduler, news);
    }

    /// The courier has all of a request: it ends here once the other side has taken over.
    fn let_go(&mut self, key: GraphKey, handed: HandedOver, scheduler: &mut Scheduler, news: &mut Received) {
        // None if it was cancelled since; then its end is told elsewhere.
        if let Some(ending) = scheduler.complete_export(key) {
            self.courier.hand_over(key, handed);
            self.untaken.insert(key, ending);
            self.tensors.ended(key, &mut *self.courier);
            news.gone.push(key);
        }
    }
}

/// What has changed for the engine's requests.
#[derive(Default)]
pub(crate) struct Received {
    pub completions: Vec<pb::Completion>,
    /// Requests that go on here, with their first tokens.
    pub taken_over: Vec<(GraphKey, u32)>,
    /// Requests whose media are here, with the embeddings.
    pub embedded: Vec<(GraphKey, Vec<f32>)>,
    /// Requests that run here no more, but whose completions come later.
    pub gone: Vec<GraphKey>,
}
