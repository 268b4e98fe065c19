//! A request on its way through the scheduler: waiting, then running, then ended.
//!
//! Each state is a type and each passage consumes the one before, so a request is in one place and ends once. Where a
//! running request stands is `computed` alone; which segment that is, whether it prefills or decodes, and whether a row
//! is terminal all follow from it.

use tutti_proto::{Epoch, GraphKey, StepNumber, walks::WalkId};

use crate::{
    admission::Needs,
    pages::{BlockTable, PagePool},
    step::{Ending, Outcome, OutputToken, Row, RowOutcome, Terminality},
    stopping::{Finish, Stopping},
};

/// A request's place in the order of arrival. Everything that is fair or first-come goes by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(pub u64);

/// Where a prefill may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    Anywhere,
    Nowhere,
}

/// A prefill segment that ends before position `end`.
#[derive(Clone, Debug)]
pub(crate) struct Span {
    pub walk: WalkId,
    pub cut: Cut,
    pub end: usize,
}

/// What every state of a request knows.
#[derive(Debug)]
pub(crate) struct Request {
    pub key: GraphKey,
    /// Ascending by `end`, without gaps from position 0; at least one.
    pub prefill: Vec<Span>,
    pub decode: Option<WalkId>,
    pub generated: u32,
    pub stopping: Stopping,
    pub needs: Needs,
    pub epoch: Epoch,
}

/// A request that holds what it needs.
#[derive(Debug)]
pub(crate) struct Running {
    request: Request,
    block_table: BlockTable,
    /// Positions that stand in the planes. Grows at commit and nowhere else.
    computed: usize,
    /// The step that computes it now: until that step is back, its pages and its progress are the step's.
    in_step: Option<StepNumber>,
    /// Steps that left its atomic segment out.
    pub passed_over: u32,
}

/// What a running request needs computed next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Prefilling { walk: WalkId, cut: Cut, left: usize },
    Decoding { walk: WalkId },
}

impl Request {
    /// Waiting requests hold nothing, so they end without a pool.
    pub fn end(self, outcome: Outcome) -> Ending {
        Ending { key: self.key, passes: self.epoch, outcome }
    }

    /// Waiting becomes running.
    pub fn admit(self, block_table: BlockTable) -> Running {
        Running { request: self, block_table, computed: 0, in_step: None, passed_over: 0 }
    }

    fn wants_output(&self) -> bool {
        self.generated < self.stopping.max_tokens()
    }

    fn finished(&self, reason: Finish) -> Outcome {
        Outcome::Finished { reason, generated: self.generated }
    }
}

impl Running {
    pub fn is_in_step(&self) -> bool {
        self.in_step.is_some()
    }

    pub fn phase(&self) -> Option<Phase> {
        match self.request.prefill.iter().find(|span| span.end > self.computed) {
            Some(span) => {
                let left = span.end - self.computed;
                Some(Phase::Prefilling { walk: span.walk, cut: span.cut, left })
            }
            None => self.request.decode.map(|walk| Phase::Decoding { walk }),
        }
    }

    fn prefill_end(&self) -> usize {
        self.request.prefill.last().map_or(0, |span| span.end)
    }

    /// Hands the next `tokens` positions to a step. Nothing else changes until the step is back.
    pub fn launch(&mut self, ticket: Ticket, step: StepNumber, walk: WalkId, tokens: usize) -> Row {
        self.in_step = Some(step);
        let positions = self.computed..self.computed + tokens;
        let request = &self.request;
        // Past the frozen end of the prefill, not of the prompt: replayed output is prefill too.
        let terminality = if positions.end >= self.prefill_end() && request.wants_output() {
            Terminality::Terminal { forbidden: request.stopping.forbidden(request.generated) }
        } else {
            Terminality::NotTerminal
        };
        let block_table = self.block_table.pages();
        Row { key: request.key, walk, epoch: request.epoch, positions, terminality, block_table, ticket }
    }

    /// The step is back; by itself this changes nothing else, as if it had not happened.
    pub fn leave_step(&mut self, step: StepNumber) {
        assert_eq!(self.in_step.take(), Some(step), "{} was not in step {step}", self.request.key);
    }

    /// The step happened: the one place where a request advances. Gives the token that its output has grown by, and,
    /// if this was its end, how to [`end`](Self::end) it.
    pub fn commit(
        &mut self,
        step: StepNumber,
        row: &Row,
        outcome: RowOutcome,
    ) -> (Option<OutputToken>, Option<Outcome>) {
        self.leave_step(step);
        let token = match (&row.terminality, outcome) {
            (Terminality::Terminal { .. }, RowOutcome::Sampled(token)) => Some(token),
            (Terminality::NotTerminal, RowOutcome::Computed) => None,
            (_, RowOutcome::Failed(why)) => return (None, Some(Outcome::Failed(why))),
            (terminality, outcome) => unreachable!("{outcome:?} for a row that is {terminality:?}"),
        };
        self.computed = row.positions.end;
        let prefilled = self.computed >= self.prefill_end();
        let request = &mut self.request;
        request.epoch = request.epoch.next();
        let Some(token) = token else {
            // Nothing is sampled inside a prompt, nor at its end where no output is wanted: then that is the end.
            let done = prefilled && !request.wants_output();
            return (None, done.then(|| request.finished(Finish::Length)));
        };
        let index = request.generated;
        request.generated += 1;
        let finish = request.stopping.judge(token, index);
        (Some(OutputToken { token, index }), finish.map(|reason| request.finished(reason)))
    }

    /// Frees everything it holds.
    pub fn end(self, outcome: Outcome, pool: &mut PagePool) -> Ending {
        pool.release(self.block_table);
        self.request.end(outcome)
    }
}
