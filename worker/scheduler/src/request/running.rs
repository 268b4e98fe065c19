//! A running request: it holds its pages and a slot of the running set.
//!
//! The field `computed` alone records how far the request is. The current segment, the phase (prefill or decode), and
//! whether a row reaches the end of the prefill all follow from `computed`.

mod disaggregated;

use std::time::Duration;

use tutti_proto::{Epoch, StepNumber, declaration::WalkId};

use super::{AdmittedPages, Cut, PrefillSegment, Request, Ticket};
use crate::{
    launch::GraphRole,
    least_time::LeastTime,
    pages::{BlockTable, PagePool},
    prefix::Chain,
    slots::SlotId,
    step::{Ending, Outcome, OutputToken, Row, RowOutcome, Terminality},
    stopping::Finish,
};

/// A request in the running set.
#[derive(Debug)]
pub(crate) struct Running {
    request: Request,
    block_table: BlockTable,
    /// Number of positions whose planes are computed. Grows only when a row is committed or an import is completed.
    computed: usize,
    /// The request's row in the step that computes the request now, if any. Until that step is committed or aborted,
    /// the request's pages and progress stay as they are.
    in_step: Option<InStep>,
    /// Number of steps that have passed the request over since it last took part in one.
    pub passed_over: u32,
    /// True while the request is left out of steps because it computes planes faster than they can be sent to the other
    /// worker.
    pub held_back: bool,
    /// The chain of the request's blocks that are recorded in the pool. None if no further block can be recorded.
    chain: Option<Chain>,
    /// Number of the request's blocks that are recorded in the pool.
    recorded: usize,
}

/// A request's row in a step that is neither committed nor aborted yet.
#[derive(Clone, Copy, Debug)]
struct InStep {
    number: StepNumber,
    /// One more than the row's last position.
    end: usize,
    samples: bool,
}

/// The progress of a request.
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
    pub fn admit(mut self, pages: AdmittedPages, pool: &PagePool) -> Running {
        let AdmittedPages { table: block_table, shared, chain } = pages;
        // With [`GraphRole::Decode`], another worker computes the whole prefill and reports the cached tokens, so no
        // position counts as computed here.
        let computed = if self.role == GraphRole::Decode { 0 } else { shared * pool.page_tokens() };
        self.cached_tokens.get_or_insert(computed.min(self.prompt_tokens));
        Running {
            request: self,
            block_table,
            computed,
            in_step: None,
            passed_over: 0,
            held_back: false,
            chain,
            recorded: shared,
        }
    }
}

impl Running {
    pub fn is_in_step(&self) -> bool {
        self.in_step.is_some()
    }

    /// True if the request is never preempted: it keeps its pages until it ends.
    pub fn is_pinned(&self) -> bool {
        self.request.is_pinned || self.is_disaggregated()
    }

    pub fn phase(&self) -> Option<Phase> {
        match self.request.prefill.iter().find(|segment| segment.end > self.computed) {
            Some(segment) => {
                let left = segment.end - self.computed;
                Some(Phase::Prefilling { walk: segment.walk, cut: segment.cut, left })
            }
            None => self.request.decode.map(|walk| Phase::Decoding { walk }),
        }
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

    /// Lower bound on the time that the rest of the prefill takes; see [`Request::least_time`].
    pub fn least_time(&self, chunk: usize, known: &LeastTime) -> Duration {
        self.request.least_time(self.computed, chunk, known)
    }

    /// Number of positions whose planes are computed.
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// True if the request holds the page of its next position, or needs no pages.
    pub fn has_room(&self, page_tokens: usize) -> bool {
        self.request.role == GraphRole::Encode || self.computed < self.block_table.len() * page_tokens
    }

    /// True if the request can be part of the next step.
    pub fn is_ready(&self, page_tokens: usize) -> bool {
        !self.is_in_step() && self.has_room(page_tokens) && !self.held_back && !self.awaits_planes()
    }

    /// Adds a page for the next positions. False if no page is available.
    pub fn grow(&mut self, pool: &mut PagePool) -> bool {
        let page = pool.allocate(1);
        page.map(|page| self.block_table.extend(page)).is_some()
    }

    /// Releases the request's pages. Its sampled tokens become part of its prefill, which is computed again before the
    /// next token is sampled.
    pub fn preempt(self, pool: &mut PagePool) -> Request {
        let mut request = self.request;
        pool.release(self.block_table);
        let end = request.prompt_tokens + request.generated as usize;
        let (walk, cut) = request.recompute;
        match request.prefill.last_mut() {
            Some(last) if last.end >= end => {}
            Some(last) if last.walk == walk => last.end = end,
            _ => request.prefill.push(PrefillSegment { walk, cut, end }),
        }
        request
    }

    /// Puts the next `tokens` positions into a step, as a row. The request's progress does not change until the step is
    /// committed.
    pub fn launch(&mut self, ticket: Ticket, step: StepNumber, walk: WalkId, tokens: usize) -> Row {
        let row = self.row(ticket, self.progress(), walk, tokens);
        self.enter_step(step, &row);
        row
    }

    /// Puts a row made by [`next_decode`](Self::next_decode) into a step. False, without effect, if the assumption
    /// under which the row was made did not hold.
    pub fn launch_prepared(&mut self, step: StepNumber, row: &Row) -> bool {
        let Progress { computed, epoch, .. } = self.progress();
        let same_pages = self.block_table.is(&row.block_table);
        // If the request still holds the pages of the row, the row's position and epoch tell whether the request has
        // progressed as assumed.
        let holds = row.positions.start == computed && row.epoch == epoch && same_pages;
        if holds {
            self.enter_step(step, row);
        }
        holds
    }

    /// The request's next row, if that is a decode. If a step computes the request now, the row is made on the
    /// assumption that this step succeeds and does not end the request. None if the next row is not a decode, if the
    /// request lacks a page for the row, or if no more output is wanted.
    pub fn next_decode(&self, ticket: Ticket, page_tokens: usize) -> Option<Row> {
        let mut progress = self.progress();
        if let Some(InStep { end, samples, .. }) = self.in_step {
            progress.computed = end;
            progress.generated += u32::from(samples);
            progress.epoch = progress.epoch.next();
        }
        let prefilled = progress.computed >= self.request.prefill_end();
        let has_room = progress.computed < self.block_table.len() * page_tokens;
        let walk = self.request.decode.filter(|_| prefilled && has_room)?;
        self.request.wants_output(progress.generated).then(|| self.row(ticket, progress, walk, 1))
    }

    fn progress(&self) -> Progress {
        Progress { computed: self.computed, generated: self.request.generated, epoch: self.request.epoch }
    }

    fn row(&self, ticket: Ticket, from: Progress, walk: WalkId, tokens: usize) -> Row {
        let Progress { computed, generated, epoch } = from;
        let positions = computed..computed + tokens;
        let request = &self.request;
        // `positions.end` is compared with the end of the prefill, not of the prompt: replayed output is part of the
        // prefill.
        let terminality = if positions.end >= request.prefill_end() && request.wants_output(generated) {
            Terminality::Terminal { forbidden: request.stopping.forbidden(generated) }
        } else {
            Terminality::NotTerminal
        };
        let block_table = self.block_table.pages();
        Row {
            key: request.key,
            walk,
            epoch,
            positions,
            terminality,
            block_table,
            slot: SlotId::NULL,
            continues: false,
            ticket,
        }
    }

    fn enter_step(&mut self, number: StepNumber, row: &Row) {
        let samples = row.is_terminal();
        self.in_step = Some(InStep { number, end: row.positions.end, samples });
    }

    /// Takes the request out of its step. The request's progress does not change, so this alone undoes the row.
    pub fn leave_step(&mut self, step: StepNumber) {
        let left = self.in_step.take().map(|in_step| in_step.number);
        assert_eq!(left, Some(step), "{} was not in step {step}", self.request.key);
    }

    /// Advances the request by its row of a step that has run; a row takes effect nowhere else. Returns the token that
    /// the row added to the output, if any. If the request has reached its end, also returns the outcome to pass to
    /// [`end`](Self::end).
    pub fn commit(
        &mut self,
        step: StepNumber,
        row: &Row,
        outcome: RowOutcome,
        pool: &mut PagePool,
    ) -> (Option<OutputToken>, Option<Outcome>) {
        self.leave_step(step);
        let token = match (&row.terminality, outcome) {
            (Terminality::Terminal { .. }, RowOutcome::Sampled(token)) => Some(token),
            (Terminality::NotTerminal, RowOutcome::Computed) => None,
            (_, RowOutcome::Failed(why)) => return (None, Some(Outcome::Failed(why))),
            (terminality, outcome) => unreachable!("{outcome:?} for a row that is {terminality:?}"),
        };
        self.computed = row.positions.end;
        self.record(pool);
        let prefilled = self.computed >= self.request.prefill_end();
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

    /// Records the blocks whose positions are now all computed, so that other requests can find them.
    fn record(&mut self, pool: &mut PagePool) {
        let page_tokens = pool.page_tokens();
        let Some(content) = &self.request.content else { return };
        while let Some(chain) = self.chain
            && (self.recorded + 1) * page_tokens <= self.computed
        {
            let block = content.block(self.recorded, page_tokens);
            self.chain = pool.record(&self.block_table, self.recorded, chain, &block);
            self.recorded += 1;
        }
    }

    /// Ends the request and frees everything that it holds.
    pub fn end(self, outcome: Outcome, pool: &mut PagePool) -> Ending {
        pool.release(self.block_table);
        self.request.end(outcome)
    }
}
