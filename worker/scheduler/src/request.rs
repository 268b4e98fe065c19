//! A request on its way through the scheduler: waiting, then running, then ended.
//!
//! Each state is a type and each passage consumes the one before, so a request is in one place and ends once. Where a
//! running request stands is `computed` alone; which segment that is, whether it prefills or decodes, and whether a row
//! is terminal all follow from it. A running request that is preempted waits again, and all that it had computed and
//! sampled is then its prefill.

mod disaggregated;

use std::time::Duration;

use tutti_proto::{Epoch, GraphKey, StepNumber, declaration::WalkId};

use crate::{
    admission::Needs,
    config::Admission,
    launch::{Content, GraphRole},
    least_time::LeastTime,
    pages::{BlockTable, PagePool},
    prefix::Chain,
    step::{Ending, Outcome, OutputToken, Row, RowOutcome, Terminality},
    stopping::{Finish, Stopping},
};

/// A request's place in the one order that everything goes by: who is admitted and served first, and, from the other
/// end, who is preempted. It never changes, so whoever is first is so until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket {
    /// The step at which it came, less the head start of its priority.
    pub came: i64,
    /// Tells those apart that came together.
    pub number: u64,
}

/// Where a prefill may be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    Anywhere,
    /// It runs to its end from wherever it begins, which may be behind a cached prefix.
    BeforeOnly,
    Nowhere,
}

/// A prefill segment that ends before position `end`.
#[derive(Clone, Debug)]
pub(crate) struct PrefillSegment {
    pub walk: WalkId,
    pub cut: Cut,
    pub end: usize,
}

/// What every state of a request knows.
#[derive(Debug)]
pub(crate) struct Request {
    pub key: GraphKey,
    /// What of it runs here; all of it, once it has been handed over.
    pub role: GraphRole,
    /// It waits for embeddings of its media, and for nothing else.
    pub awaits_media: bool,
    /// It has media and only ever its planes, so that they could not be computed again here: it never gives up a page.
    pub is_pinned: bool,
    /// Ascending by `end`, without gaps from position 0; at least one. Fixed while the request runs.
    pub prefill: Vec<PrefillSegment>,
    /// How sampled tokens are computed again.
    pub recompute: (WalkId, Cut),
    pub prompt_tokens: usize,
    pub decode: Option<WalkId>,
    pub generated: u32,
    pub stopping: Stopping,
    /// Of its whole life.
    pub life: Needs,
    pub epoch: Epoch,
    /// Tokens at all positions so far; none where no pages are shared.
    pub content: Option<Content>,
    /// Something is wanted of every position, which takes time of its own.
    pub is_scored: bool,
    /// Set when it first runs.
    pub cached_tokens: Option<usize>,
    /// Prefill tokens that others were seen to have computed, at the most so far.
    pub known_tokens: usize,
    pub deadline: Option<Duration>,
}

/// A request that holds what it needs.
#[derive(Debug)]
pub(crate) struct Running {
    request: Request,
    block_table: BlockTable,
    /// Positions that stand in the planes. Grows at commit and nowhere else.
    computed: usize,
    /// The step that computes it now: until that step is back, its pages and its progress are the step's.
    in_step: Option<InStep>,
    /// Steps that passed it over since its last one.
    pub passed_over: u32,
    /// Its planes leave more slowly than it computes them.
    pub held_back: bool,
    /// What the blocks end that are recorded in the pool; none when no more can be.
    chain: Option<Chain>,
    /// How many blocks those are.
    recorded: usize,
}

/// What a step computes of a request.
#[derive(Clone, Copy, Debug)]
struct InStep {
    number: StepNumber,
    /// Where its row ends.
    end: usize,
    samples: bool,
}

/// How far a request has come.
#[derive(Clone, Copy, Debug)]
struct Progress {
    computed: usize,
    generated: u32,
    epoch: Epoch,
}

/// What a running request needs computed next.
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

/// What a request starts to run with.
#[derive(Debug)]
pub(crate) struct Pages {
    table: BlockTable,
    /// How many of its pages hold what they should.
    shared: usize,
    /// What those end; none where pages are not shared.
    chain: Option<Chain>,
}

impl Request {
    /// Waiting requests hold nothing, so they end without a pool.
    pub fn end(self, outcome: Outcome) -> Ending {
        Ending { key: self.key, passes: self.epoch, cached_tokens: self.cached_tokens(), outcome }
    }

    fn cached_tokens(&self) -> u32 {
        self.cached_tokens.unwrap_or(0) as u32
    }

    /// What must be there before it runs.
    pub fn needs(&self, admission: Admission, pool: &PagePool) -> Needs {
        let admission = if self.is_pinned { Admission::WholeLife } else { admission };
        self.life.to_run(admission, self.prefill_end(), pool)
    }

    /// Takes `pages` pages, as many as possible of them with what it would compute; none if there are too few.
    pub fn take_pages(&self, pages: usize, pool: &mut PagePool) -> Option<Pages> {
        let Some(content) = &self.content else {
            return Some(Pages { table: pool.allocate(pages)?, shared: 0, chain: None });
        };
        let computed_here = self.role != GraphRole::Decode;
        // At least one position is always computed, here or elsewhere: something must be sampled from.
        let most = if content.may_reuse || !computed_here { self.prefill_end() - 1 } else { 0 };
        let mut known = pool.find(content.blocks(most, pool.page_tokens()));
        if computed_here {
            known.truncate(self.blocks_to_resume_behind(known.len(), pool.page_tokens()));
        }
        let chain = known.last().map_or(Chain::Start, |&(_, chain)| chain);
        Some(Pages { table: pool.allocate_behind(&known, pages)?, shared: known.len(), chain: Some(chain) })
    }

    /// Looks up how much of its prefill others have computed. False where it cannot be of use.
    pub fn look_up(&mut self, pool: &PagePool) -> bool {
        let Some(content) = self.content.as_ref().filter(|content| content.may_reuse) else { return false };
        let most = self.prefill_end() - 1;
        let known = pool.find(content.blocks(most, pool.page_tokens())).len();
        self.known_tokens = self.known_tokens.max(known * pool.page_tokens());
        true
    }

    /// The least time that its prefill takes from a position on, where what may be cut comes in chunks of up to `chunk`.
    pub fn least_time(&self, from: usize, chunk: usize, known: &LeastTime) -> Duration {
        let left = self.prefill.iter().scan(from, |start, span| {
            let tokens = span.end.saturating_sub(*start);
            *start += tokens;
            let most = if span.cut == Cut::Anywhere { chunk } else { usize::MAX };
            Some(known.of(span.walk, tokens, most))
        });
        left.sum()
    }

    /// The most of `blocks` blocks that end where its prefill may begin.
    fn blocks_to_resume_behind(&self, blocks: usize, page_tokens: usize) -> usize {
        let mut resume = blocks * page_tokens;
        for place in (0..self.prefill.len()).rev().filter(|&place| self.prefill[place].cut == Cut::Nowhere) {
            let start = place.checked_sub(1).map_or(0, |before| self.prefill[before].end);
            if (start + 1..self.prefill[place].end).contains(&resume) {
                resume = start / page_tokens * page_tokens;
            }
        }
        resume / page_tokens
    }

    /// Waiting becomes running.
    pub fn admit(mut self, pages: Pages, pool: &PagePool) -> Running {
        let Pages { table: block_table, shared, chain } = pages;
        // Another worker computes all of it whatever is known here, and says what it had to.
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

    pub fn prefill_end(&self) -> usize {
        self.prefill.last().map_or(0, |span| span.end)
    }

    fn wants_output(&self, generated: u32) -> bool {
        generated < self.stopping.max_tokens()
    }

    fn finished(&self, reason: Finish) -> Outcome {
        Outcome::Finished { reason, generated: self.generated }
    }
}

impl Running {
    pub fn is_in_step(&self) -> bool {
        self.in_step.is_some()
    }

    /// Whether its pages are its own until it ends.
    pub fn is_pinned(&self) -> bool {
        self.request.is_pinned || self.is_disaggregated()
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

    pub fn deadline(&self) -> Option<Duration> {
        self.request.deadline
    }

    /// Prompt tokens that it found when it first ran.
    pub fn cached_tokens(&self) -> u32 {
        self.request.cached_tokens()
    }

    pub fn is_scored(&self) -> bool {
        self.request.is_scored
    }

    /// As [`Request::least_time`], from where it stands.
    pub fn least_time(&self, chunk: usize, known: &LeastTime) -> Duration {
        self.request.least_time(self.computed, chunk, known)
    }

    /// Positions that stand in the planes.
    pub fn computed(&self) -> usize {
        self.computed
    }

    /// Whether it holds the page of its next position, or needs none.
    pub fn has_room(&self, page_tokens: usize) -> bool {
        self.request.role == GraphRole::Encode || self.computed < self.block_table.len() * page_tokens
    }

    /// Whether it can be part of the next step.
    pub fn is_ready(&self, page_tokens: usize) -> bool {
        !self.is_in_step() && self.has_room(page_tokens) && !self.held_back && !self.awaits_planes()
    }

    /// Adds a page for its next positions; false if there is none.
    pub fn grow(&mut self, pool: &mut PagePool) -> bool {
        let page = pool.allocate(1);
        page.map(|page| self.block_table.extend(page)).is_some()
    }

    /// Gives up its pages. What it has sampled becomes prefill, all of which is computed before it samples again.
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

    /// Hands the next `tokens` positions to a step. Nothing else changes until the step is back.
    pub fn launch(&mut self, ticket: Ticket, step: StepNumber, walk: WalkId, tokens: usize) -> Row {
        let row = self.row(ticket, self.progress(), walk, tokens);
        self.enter_step(step, &row);
        row
    }

    /// The same with a row of [`next_decode`](Self::next_decode), if it has come true; gives it back if not.
    pub fn launch_prepared(&mut self, step: StepNumber, row: &Row) -> bool {
        let Progress { computed, epoch, .. } = self.progress();
        let same_pages = self.block_table.is(&row.block_table);
        // Where it stands is known by position and epoch as long as it holds the same pages.
        let holds = row.positions.start == computed && row.epoch == epoch && same_pages;
        if holds {
            self.enter_step(step, row);
        }
        holds
    }

    /// The decode that is next if the step that computes it now, if one does, goes well and does not end it. None where
    /// that is no decode, or has no page yet.
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
        // Past the frozen end of the prefill, not of the prompt: replayed output is prefill too.
        let terminality = if positions.end >= request.prefill_end() && request.wants_output(generated) {
            Terminality::Terminal { forbidden: request.stopping.forbidden(generated) }
        } else {
            Terminality::NotTerminal
        };
        let block_table = self.block_table.pages();
        Row { key: request.key, walk, epoch, positions, terminality, block_table, ticket }
    }

    fn enter_step(&mut self, number: StepNumber, row: &Row) {
        let samples = row.is_terminal();
        self.in_step = Some(InStep { number, end: row.positions.end, samples });
    }

    /// The step is back; by itself this changes nothing else, as if it had not happened.
    pub fn leave_step(&mut self, step: StepNumber) {
        let left = self.in_step.take().map(|in_step| in_step.number);
        assert_eq!(left, Some(step), "{} was not in step {step}", self.request.key);
    }

    /// The step happened: the one place where a request advances. Gives the token that its output has grown by, and,
    /// if this was its end, how to [`end`](Self::end) it.
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
            // Nothing is sampled inside a prompt, nor at its end where no output is wanted: then that is the end.
            let done =
                prefilled && !request.wants_output(request.generated) && request.role != GraphRole::Encode;
            return (None, done.then(|| request.finished(Finish::Length)));
        };
        let index = request.generated;
        request.generated += 1;
        request.content.iter_mut().for_each(|content| content.tokens.push(token));
        let finish = request.stopping.judge(token, index);
        (Some(OutputToken { token, index }), finish.map(|reason| request.finished(reason)))
    }

    /// Lets others find the blocks that are whole by now.
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

    /// Frees everything it holds.
    pub fn end(self, outcome: Outcome, pool: &mut PagePool) -> Ending {
        pool.release(self.block_table);
        self.request.end(outcome)
    }
}
