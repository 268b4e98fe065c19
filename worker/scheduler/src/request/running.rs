//! A running request, which holds its pages, a slot and an entry of the running set.
//!
//! The field `computed` alone records how far the request is. The current segment, the phase (prefill or decode), and
//! whether a row reaches the end of the prefill all follow from it. `planned` is what this record will be once all the
//! request's rows in flight are committed. New rows are planned from `planned`, so that a request may be in several
//! steps.

mod disaggregated;
mod rows;

use std::time::Duration;

use tutti_planes::SlotId;
use tutti_proto::{Epoch, declaration::WalkId};

use super::{Admitted, Cut, PrefillSegment, Request};
use crate::{
    holding::{Holding, PlanePool},
    launch::{Content, GraphRole},
    least_time::LeastTime,
    prefix::Chain,
    shares::ShareId,
    snapshots::Ladder,
    step::{Ending, NotSampled, Outcome, OutputToken, Row, RowCopies, RowOutcome, Terminality},
    stopping::Finish,
};

/// A request in the running set. The fields that every plan reads are next to each other.
#[derive(Debug)]
pub(crate) struct Running {
    request: Request,
    /// The chain of the request's blocks that are recorded in the pool. None if no further block can be recorded.
    chain: Option<Chain>,
    /// Number of the request's blocks that are recorded in the pool.
    recorded: usize,
    /// Number of positions whose planes are computed. Grows only when a row is committed or an import is completed.
    computed: usize,
    holding: Holding,
    /// One more than the last position of the prefill.
    prefill_end: usize,
    /// The request's progress once all its rows in flight are committed. Without rows in flight, it equals the
    /// committed progress.
    planned: Progress,
    /// Number of the request's rows in steps that are neither committed nor aborted yet. While it is above 0, the
    /// request keeps its pages and its slot.
    in_flight: u32,
    /// The slot to copy to the request's slot before its first row: a snapshot that the request reads, or the null
    /// slot. None if no copy is needed, or if a planned row already has the copy.
    initial: Option<SlotId>,
    /// Number of steps that have passed the request over since it last took part in one.
    pub passed_over: u32,
    /// True while the request is left out of steps because it computes planes faster than they can be sent to the other
    /// worker.
    pub held_back: bool,
    /// True if the last plan chose the request for preemption, but found rows of it in flight. Each plan decides anew.
    pub is_victim: bool,
    /// True if the slot is saved as a snapshot at the positions of the request's [`Ladder`].
    leaves_snapshots: bool,
}

/// The planes of an ended request that has rows in flight, which still read and write them.
#[derive(Debug)]
pub(crate) struct Draining {
    holding: Holding,
    in_flight: u32,
    pub encodes: bool,
    pub is_scored: bool,
}

#[derive(Clone, Copy, Debug)]
struct Progress {
    computed: usize,
    generated: u32,
    epoch: Epoch,
}

/// The work that a running request needs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Prefilling { walk: WalkId, cut: Cut, left: usize },
    Decoding { walk: WalkId },
}

impl Phase {
    pub fn walk(self) -> WalkId {
        match self {
            Self::Prefilling { walk, .. } | Self::Decoding { walk } => walk,
        }
    }
}

impl Request {
    /// Moves the request from waiting to running.
    pub fn admit(mut self, admitted: Admitted, pool: &PlanePool) -> Running {
        let Admitted { holding, shared, chain, initial } = admitted;
        let page_tokens = pool.pages().page_tokens();
        // With [`GraphRole::Decode`], another worker computes the whole prefill and reports the cached tokens, so no
        // position counts as computed here.
        let computed = if self.role == GraphRole::Decode { 0 } else { shared * page_tokens };
        self.cached_tokens.get_or_insert(computed.min(self.prompt_tokens));
        let prefill_end = self.prefill_end();
        let planned = Progress { computed, generated: self.generated, epoch: self.epoch };
        let leaves_snapshots = pool.has_slots() && chain.is_some();
        Running {
            request: self,
            holding,
            computed,
            prefill_end,
            planned,
            in_flight: 0,
            initial,
            passed_over: 0,
            held_back: false,
            is_victim: false,
            leaves_snapshots,
            chain,
            recorded: shared,
        }
    }
}

impl Running {
    /// True if a step in flight has a row of the request.
    pub fn is_in_flight(&self) -> bool {
        self.in_flight > 0
    }

    /// True if the request is never preempted: it keeps its planes until it ends.
    pub fn is_pinned(&self) -> bool {
        self.request.is_pinned || self.is_disaggregated()
    }

    /// True if the request may yield to another share: it has not yielded before, and no other worker uses its planes.
    pub fn may_yield(&self) -> bool {
        !self.request.has_yielded && !self.is_pinned()
    }

    /// The work of the request's next row. None if the rows in flight are the request's last rows.
    #[inline]
    pub fn phase(&self) -> Option<Phase> {
        let Progress { computed, generated, .. } = self.planned;
        if computed >= self.prefill_end {
            let decodes = self.request.wants_output(generated);
            return self.request.decode.filter(|_| decodes).map(|walk| Phase::Decoding { walk });
        }
        let segment = self.request.prefill.iter().find(|segment| segment.end > computed);
        segment.map(|&PrefillSegment { walk, cut, end }| {
            let left = end - computed;
            Phase::Prefilling { walk, cut, left }
        })
    }

    /// The share that the request counts against.
    pub fn share(&self) -> ShareId {
        self.request.share
    }

    /// The data that the request keeps while it waits, too.
    pub fn request_mut(&mut self) -> &mut Request {
        &mut self.request
    }

    /// Number of positions whose planes are computed by committed rows.
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// One more than the last position of the prefill.
    pub fn prefill_end(&self) -> usize {
        self.prefill_end
    }

    /// The segments of the prefill.
    pub fn prefill(&self) -> &[PrefillSegment] {
        &self.request.prefill
    }

    /// The content of all positions so far. None if the request shares no pages.
    pub fn content(&self) -> Option<&Content> {
        self.request.content.as_ref()
    }

    /// Hash of the first block; see [`Request::first_block`].
    pub fn first_block(&self) -> Option<u64> {
        self.request.first_block
    }

    /// True if further blocks of the request can be recorded.
    pub fn can_record(&self) -> bool {
        self.chain.is_some()
    }

    /// True if the slot is saved as a snapshot at the positions of the request's [`Ladder`].
    pub fn leaves_snapshots(&self) -> bool {
        self.leaves_snapshots
    }

    /// The positions at which the slot is saved. None if the request leaves no snapshots.
    pub fn ladder(&self, page_tokens: usize) -> Option<Ladder> {
        self.leaves_snapshots.then(|| Ladder::new(self.prefill_end, page_tokens))
    }

    pub fn deadline(&self) -> Option<Duration> {
        self.request.deadline
    }

    /// Prompt tokens found in the prefix cache when the request first ran.
    pub fn cached_tokens(&self) -> u32 {
        self.request.cached_tokens()
    }

    pub fn is_scored(&self) -> bool {
        self.request.is_scored
    }

    /// Lower bound on the time that the rest of the prefill takes; see [`Request::least_time`]. Rows in flight may be
    /// done at any moment, so they do not count.
    pub fn least_time(&self, chunk: usize, known: &LeastTime) -> Duration {
        self.request.least_time(self.planned.computed, chunk, known)
    }

    /// Number of positions that are computed once all the request's rows in flight are committed.
    #[inline]
    pub fn planned(&self) -> usize {
        self.planned.computed
    }

    /// Largest number of tokens that the request may record in the prefix cache before its next row is planned.
    pub fn tokens_to_record(&self) -> usize {
        match &self.request.content {
            None => 0,
            Some(_) if self.awaits_planes() => self.prefill_end,
            Some(_) if self.is_in_flight() => self.planned.computed,
            Some(_) => 0,
        }
    }

    /// True if the request holds the page of its next position, or needs no pages.
    #[inline]
    pub fn has_room(&self, page_tokens: usize) -> bool {
        let room = self.holding.table.len() * page_tokens;
        self.request.role == GraphRole::Encode || self.planned.computed < room
    }

    /// True if the request can have a row in the next step, if there is [work](Self::phase) for one.
    #[inline]
    pub fn is_ready(&self, page_tokens: usize) -> bool {
        self.has_room(page_tokens)
            && !self.held_back
            && !self.is_victim
            && !self.awaits_planes()
            && !self.awaits_mask()
    }

    /// True if the mask of the next token is not ready, or depends on a token that a row in flight samples. The row of
    /// a request that [runs ahead](Request::runs_ahead) may be in flight beside one that samples such a token.
    #[inline]
    pub fn awaits_mask(&self) -> bool {
        let samples = self.planned.generated - self.request.generated;
        let most = 1 + u32::from(self.request.runs_ahead);
        self.request.awaits_mask || self.request.is_masked && samples >= most
    }

    /// True if the request needs a page for its next row. A request that awaits a mask has no next row yet, so no other
    /// one is preempted for it.
    pub fn is_short(&self, page_tokens: usize) -> bool {
        !self.is_disaggregated()
            && !self.has_room(page_tokens)
            && !self.awaits_mask()
            && self.phase().is_some()
    }

    /// Adds a page for the next positions. False if no page is available.
    pub fn grow(&mut self, pool: &mut PlanePool) -> bool {
        pool.grow(&mut self.holding)
    }

    /// Releases the planes of a request that has no rows in flight. Its sampled tokens become part of its prefill,
    /// which is computed again before the next token is sampled.
    pub fn preempt(self, pool: &mut PlanePool) -> Request {
        assert!(!self.is_in_flight(), "{} is preempted inside a step", self.request.key);
        let mut request = self.request;
        pool.remove_reader(self.initial);
        pool.release(self.holding);
        let end = request.prompt_tokens + request.generated as usize;
        let (walk, cut) = request.recompute;
        match request.prefill.last_mut() {
            Some(last) if last.end >= end => {}
            Some(last) if last.walk == walk => last.end = end,
            _ => request.prefill.push(PrefillSegment { walk, cut, end }),
        }
        request
    }

    /// Advances the request by its row of a step that has run. A row takes effect only here. `save` is the slot that
    /// the step saved the request's slot to. Returns the token that the row added to the output, if any. If the request
    /// has reached its end, also returns the outcome to pass to [`end`](Self::end).
    pub fn commit(
        &mut self,
        row: &Row,
        save: Option<SlotId>,
        outcome: RowOutcome,
        pool: &mut PlanePool,
    ) -> (Option<OutputToken>, Option<Outcome>) {
        self.in_flight -= 1;
        let token = match (&row.terminality, outcome) {
            (Terminality::Terminal { .. }, RowOutcome::Sampled(token)) => Some(token),
            (Terminality::NotTerminal, RowOutcome::Computed) => None,
            (_, RowOutcome::Failed(why)) => {
                save.iter().for_each(|&slot| pool.give_back_slot(slot));
                return (None, Some(Outcome::Failed(why)));
            }
            (Terminality::Terminal { .. }, RowOutcome::NotSampled(why)) => {
                save.iter().for_each(|&slot| pool.give_back_slot(slot));
                return (None, self.not_sampled(row, why));
            }
            (terminality, outcome) => unreachable!("{outcome:?} for a row that is {terminality:?}"),
        };
        // The row before this one is committed, so the chain ends with the block before this row's first position: the
        // block behind which the slot was saved.
        save.iter().for_each(|&slot| pool.attach(slot, self.chain));
        self.computed = row.positions.end;
        self.record(pool);
        let prefilled = self.computed >= self.prefill_end;
        let request = &mut self.request;
        request.epoch = request.epoch.next();
        let Some(token) = token else {
            // No token was sampled: either the prefill goes on, or no output is wanted. If no output is wanted and the
            // prefill is done, the request has ended, unless its rows encode media.
            let done =
                prefilled && !request.wants_output(request.generated) && request.role != GraphRole::Encode;
            return (None, done.then(|| request.finished(Finish::Length)));
        };
        let index = request.generated;
        request.generated += 1;
        request.content.iter_mut().for_each(|content| content.tokens.push(token));
        let finish = request.stopping.finish(token, index);
        (Some(OutputToken { token, index }), finish.map(|reason| request.finished(reason)))
    }

    /// Takes back a row in flight from which no token was sampled. A late row is planned again, as if it had not been
    /// in the step.
    fn not_sampled(&mut self, row: &Row, why: NotSampled) -> Option<Outcome> {
        match why {
            NotSampled::Late => {
                // A row that continues this one is void.
                let generated = self.request.generated;
                self.planned = Progress { computed: row.positions.start, epoch: row.epoch, generated };
                None
            }
            NotSampled::Void => None,
            NotSampled::Complete => Some(self.request.finished(Finish::Complete)),
            NotSampled::ConstraintFailed(why) => Some(Outcome::ConstraintFailed(why)),
        }
    }

    /// Records the blocks whose positions are now all computed, so that other requests can find them.
    fn record(&mut self, pool: &mut PlanePool) {
        let page_tokens = pool.pages().page_tokens();
        let Some(content) = &self.request.content else { return };
        while let Some(chain) = self.chain
            && (self.recorded + 1) * page_tokens <= self.computed
        {
            let block = content.block(self.recorded, page_tokens);
            self.chain = pool.record(&self.holding, self.recorded, chain, &block);
            self.recorded += 1;
        }
    }

    /// Ends the request and frees everything that it holds. If it has rows in flight, its planes are returned instead,
    /// to be held until the last of these rows is back.
    pub fn end(self, outcome: Outcome, pool: &mut PlanePool) -> (Ending, Option<Draining>) {
        pool.remove_reader(self.initial);
        let (encodes, is_scored) = (self.encodes(), self.is_scored());
        let Self { request, holding, in_flight, .. } = self;
        let draining = if in_flight > 0 {
            Some(Draining { holding, in_flight, encodes, is_scored })
        } else {
            pool.release(holding);
            None
        };
        (request.end(outcome), draining)
    }
}

impl Draining {
    /// Takes back a row of the ended request: the row has no effect, and a snapshot that it saved is dropped. True if
    /// the row was the last one in flight.
    pub fn drop_row(&mut self, copies: Option<RowCopies>, pool: &mut PlanePool) -> bool {
        copies.and_then(|copies| copies.save).iter().for_each(|&slot| pool.give_back_slot(slot));
        self.in_flight -= 1;
        self.in_flight == 0
    }

    /// Frees the planes, once no row is in flight.
    pub fn release(self, pool: &mut PlanePool) {
        pool.release(self.holding);
    }
}
