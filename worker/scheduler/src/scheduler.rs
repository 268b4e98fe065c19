//! The scheduler: what waits, what runs, and the passage from one step to the next.

mod disaggregated;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque, btree_map::Entry},
    ops::Bound,
    time::Duration,
};

use tutti_proto::{GraphKey, StepNumber, declaration::ModelDeclaration};

use crate::{
    ahead::Ahead,
    config::{Admission, ConfigError, SchedulerConfig},
    launch::{GraphLaunch, GraphRole, HEAD_START, MAX_PRIORITY, Refusal},
    least_time::LeastTime,
    pace::Pace,
    packing::{Before, Candidate, pack},
    pages::PagePool,
    request::{Request, Running, Ticket},
    step::{Ending, Outcome, Reserved, Row, RowCommit, RowOutcome, StepPlan, TransferError, Turn},
    step_time::Work,
    validate::validate,
    walks::Walks,
};

/// Cancels that are remembered for launches still on their way; the oldest is forgotten first.
const REMEMBERED_CANCELS: usize = 1024;

/// See the crate's own page for what it promises.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    walks: Walks,
    pool: PagePool,
    pace: Pace,
    least_time: LeastTime,
    /// Accepted, holding nothing, in order.
    waiting: BTreeMap<Ticket, Request>,
    /// The same, whose media are not here.
    parked: BTreeMap<Ticket, Request>,
    /// Holding pages, in order.
    running: BTreeMap<Ticket, Running>,
    /// Every request in `waiting`, `parked` or `running`.
    tickets: HashMap<GraphKey, Ticket>,
    /// Held requests to end at the head of the next plan.
    cancelled: BTreeSet<GraphKey>,
    /// The same, whose planes do not get across; why.
    failed_transfers: BTreeMap<GraphKey, TransferError>,
    /// Keys that were cancelled before they came.
    cancelled_early: VecDeque<GraphKey>,
    /// Of held requests, the earliest first.
    deadlines: BTreeSet<(Duration, GraphKey)>,
    next_ticket: u64,
    next_step: StepNumber,
    before: Before,
    /// Made ready for the next plan.
    ahead: Ahead,
    tally: Tally,
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Times that a request had to give up its pages.
    pub preemptions: u64,
    /// Prefill tokens of requests that were admitted, each admission counted.
    pub prefill_tokens: u64,
    /// Those of them that were not computed, because their pages were known.
    pub cached_tokens: u64,
    /// Rows that were [ready](Scheduler::plan_ahead) when their step was planned.
    pub rows_ahead: u64,
}

/// What a worker holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that hold pages.
    pub running: usize,
    /// Requests that wait for them.
    pub waiting: usize,
    /// Pages held by requests.
    pub pages_used: usize,
    /// Pages that nobody holds, kept for prompts that start with what they hold.
    pub pages_cached: usize,
    /// Pages that can be held.
    pub pages_total: usize,
    /// Steps planned so far.
    pub steps: u64,
    /// What has happened so far.
    pub tally: Tally,
}

impl Scheduler {
    /// A scheduler for a model of this declaration.
    pub fn new(config: SchedulerConfig, model: &ModelDeclaration) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Self {
            walks: Walks::new(model, config.chunking)?,
            pace: Pace::new(config.target_itl),
            least_time: LeastTime::default(),
            pool: PagePool::new(config.pages, config.page_tokens),
            config,
            waiting: BTreeMap::new(),
            parked: BTreeMap::new(),
            running: BTreeMap::new(),
            tickets: HashMap::new(),
            cancelled: BTreeSet::new(),
            failed_transfers: BTreeMap::new(),
            cancelled_early: VecDeque::new(),
            deadlines: BTreeSet::new(),
            next_ticket: 0,
            next_step: StepNumber(0),
            before: Before { mixed: None, since_alone: u32::MAX },
            ahead: Ahead::default(),
            tally: Tally::default(),
        })
    }

    /// Takes a request, which from then on gets exactly one [`Ending`]; or refuses it, and it gets none.
    pub fn add(&mut self, launch: GraphLaunch) -> Result<(), Refusal> {
        if self.tickets.contains_key(&launch.key) {
            return Err(Refusal::Duplicate(launch.key));
        }
        let classes = i64::from(launch.priority.clamp(-MAX_PRIORITY, MAX_PRIORITY));
        let request = validate(launch, &self.walks, &self.config, &self.pool)?;
        let (held, limit) = (self.tickets.len(), self.config.max_held_requests());
        if held >= limit {
            return Err(Refusal::QueueFull { held, limit });
        }
        let came = (self.next_step.0 as i64).saturating_add(classes * HEAD_START);
        let ticket = Ticket { came, number: self.next_ticket };
        self.next_ticket += 1;
        self.deadlines.extend(request.deadline.map(|deadline| (deadline, request.key)));
        if let Some(place) = self.cancelled_early.iter().position(|early| *early == request.key) {
            self.cancelled_early.remove(place);
            self.cancelled.insert(request.key);
        }
        self.tickets.insert(request.key, ticket);
        let queue = if request.awaits_media { &mut self.parked } else { &mut self.waiting };
        queue.insert(ticket, request);
        Ok(())
    }

    /// Ends a request at the head of the next plan, or as soon after as no step computes it; one that has not come yet,
    /// when it comes. For one that has ended this does nothing.
    pub fn cancel(&mut self, key: GraphKey) {
        if self.tickets.contains_key(&key) {
            self.cancelled.insert(key);
        } else if !self.cancelled_early.contains(&key) {
            if self.cancelled_early.len() == REMEMBERED_CANCELS {
                self.cancelled_early.pop_front();
            }
            self.cancelled_early.push_back(key);
        }
    }

    /// Ends what was cancelled, what is late and what is certain to be, admits what fits, and packs the next step. `now` is
    /// any clock that does not go back; it is compared with deadlines and nothing else.
    ///
    /// Requests that another step still computes are left to it, so the next step may be planned while one runs.
    pub fn plan(&mut self, now: Duration) -> Turn {
        let endings = self.expire(now);
        let preempted = if self.config.admission == Admission::Optimistic { self.grow() } else { vec![] };
        let reserved = self.admit();
        Turn { endings, preempted, reserved, step: self.pack() }
    }

    /// Makes the decodes of the next plan ready while a step runs, supposing that each row of that step goes well and ends
    /// nobody. Changes nothing but how long [`plan`](Self::plan) takes: what is planned is the same without it. May be
    /// called at any time, and as often as one likes.
    pub fn plan_ahead(&mut self) {
        self.ahead = Ahead::new(&self.running, self.config.page_tokens);
    }

    /// Takes a step back that has run, with one outcome for each of its rows, in their order, and how long it took. Only
    /// here does a request advance, and only by what its own row did.
    pub fn commit(&mut self, step: StepPlan, outcomes: Vec<RowOutcome>, took: Duration) -> Vec<RowCommit> {
        assert_eq!(step.rows.len(), outcomes.len(), "step {}: rows and outcomes", step.number);
        if !step.rows.iter().any(|row| self.running.get(&row.ticket).is_some_and(Running::encodes)) {
            self.pace.observe(&self.work(&step), took);
        }
        let scored = |row: &Row| self.running.get(&row.ticket).is_some_and(Running::is_scored);
        self.least_time.observe(&step, &self.walks, scored, took);
        let mut commits = Vec::with_capacity(outcomes.len());
        for (row, outcome) in step.rows.into_iter().zip(outcomes) {
            let Entry::Occupied(mut request) = self.running.entry(row.ticket) else {
                unreachable!("{} left the running set inside step {}", row.key, step.number);
            };
            let cached_tokens = request.get().cached_tokens();
            let (sampled, outcome) = request.get_mut().commit(step.number, &row, outcome, &mut self.pool);
            let ending = outcome.map(|outcome| {
                let request = request.remove();
                forget(&mut self.tickets, &mut self.deadlines, row.key, request.deadline());
                request.end(outcome, &mut self.pool)
            });
            commits.push(RowCommit { row, sampled, cached_tokens, ending });
        }
        commits
    }

    /// Takes a step back that has not run: every row is where it was, and will be planned again.
    pub fn abort(&mut self, step: StepPlan) {
        for row in step.rows {
            if let Some(request) = self.running.get_mut(&row.ticket) {
                request.leave_step(step.number);
            }
        }
    }

    /// What is held now.
    pub fn load(&self) -> Load {
        Load {
            running: self.running.len(),
            waiting: self.waiting.len() + self.parked.len(),
            pages_used: self.pool.used(),
            pages_cached: self.pool.idle(),
            pages_total: self.pool.total(),
            steps: self.next_step.0,
            tally: self.tally,
        }
    }

    /// The first deadline of a held request. Where nothing runs, somebody has to plan then.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Whether no request is held.
    pub fn is_empty(&self) -> bool {
        self.tickets.is_empty()
    }

    /// Ends what was cancelled, is late or is certain to be, in every state but one: a request inside a step keeps its
    /// pages until the step is back.
    fn expire(&mut self, now: Duration) -> Vec<Ending> {
        let mut endings = Vec::new();
        for key in std::mem::take(&mut self.cancelled) {
            if !self.end(key, Outcome::Cancelled, &mut endings) {
                self.cancelled.insert(key);
            }
        }
        for (key, why) in std::mem::take(&mut self.failed_transfers) {
            if !self.end(key, Outcome::TransferFailed(why.clone()), &mut endings) {
                self.failed_transfers.insert(key, why);
            }
        }
        // Whoever has more time than the longest prefill needs at the least is in no danger.
        let near = now + self.least_time.of_any(self.config.max_context, self.config.max_chunk());
        let near: Vec<_> =
            self.deadlines.iter().take_while(|(deadline, _)| *deadline <= near).copied().collect();
        for (deadline, key) in near {
            let left = deadline.saturating_sub(now);
            let needed = self.needed_at_least(key, left);
            if left.is_zero() {
                self.end(key, Outcome::DeadlineExceeded, &mut endings);
            } else if needed > left {
                self.end(key, Outcome::DeadlineUnreachable { needed, left }, &mut endings);
            }
        }
        endings
    }

    /// The least time that a request would be away from its next token if it were alone from here on; exact enough to be
    /// compared with `left`.
    fn needed_at_least(&mut self, key: GraphKey, left: Duration) -> Duration {
        let Some(ticket) = self.tickets.get(&key) else { return Duration::ZERO };
        let (known, chunk) = (&self.least_time, self.config.max_chunk());
        if let Some(request) = self.running.get(ticket) {
            return if request.awaits_planes() { Duration::ZERO } else { request.least_time(chunk, known) };
        }
        // What another worker needs is not known here.
        let known_here = |request: &&mut Request| request.role != GraphRole::Decode;
        let Some(request) = self.waiting.get_mut(ticket).filter(known_here) else { return Duration::ZERO };
        let needed = request.least_time(request.known_tokens, chunk, known);
        // What others have computed of it is looked up only where that decides, since it takes time to do.
        if needed <= left || !request.look_up(&self.pool) {
            return needed;
        }
        if self.running.values().any(Running::is_in_step) {
            // Somebody may be computing it right now.
            return Duration::ZERO;
        }
        request.least_time(request.known_tokens, chunk, known)
    }

    /// Ends a request unless it is inside a step. False if it is.
    fn end(&mut self, key: GraphKey, outcome: Outcome, endings: &mut Vec<Ending>) -> bool {
        let Some(&ticket) = self.tickets.get(&key) else { return true };
        let waiting = self.waiting.remove(&ticket).or_else(|| self.parked.remove(&ticket));
        let (deadline, ending) = if let Some(request) = waiting {
            (request.deadline, request.end(outcome))
        } else if let Entry::Occupied(request) = self.running.entry(ticket)
            && !request.get().is_in_step()
        {
            let request = request.remove();
            (request.deadline(), request.end(outcome, &mut self.pool))
        } else {
            return false;
        };
        forget(&mut self.tickets, &mut self.deadlines, key, deadline);
        endings.push(ending);
        true
    }

    /// Gives whoever needs a page its next one, in order, and takes it from the last in order where there is none. Whoever
    /// is first never gives anything up, so that it ends, and then the next one is first.
    fn grow(&mut self) -> Vec<GraphKey> {
        let page_tokens = self.config.page_tokens;
        let short = |(ticket, request): (&Ticket, &Running)| {
            let settled = request.is_in_step() || request.is_disaggregated() || request.has_room(page_tokens);
            (!settled).then_some(*ticket)
        };
        let short: Vec<Ticket> = self.running.iter().filter_map(short).collect();
        let mut preempted = Vec::new();
        for ticket in short {
            while let Some(request) = self.running.get_mut(&ticket)
                && !request.grow(&mut self.pool)
            {
                let Some(victim) = self.victim(ticket) else { break };
                if let Some(request) = self.running.remove(&victim) {
                    let request = request.preempt(&mut self.pool);
                    preempted.push(request.key);
                    self.waiting.insert(victim, request);
                }
            }
        }
        self.tally.preemptions += preempted.len() as u64;
        preempted
    }

    /// Who gives up its pages for `ticket`: the last in order that no step computes and no other worker fills or reads. None
    /// while all behind it are of those, since they end.
    fn victim(&self, ticket: Ticket) -> Option<Ticket> {
        let (&last, _) = self.running.last_key_value()?;
        if last == ticket {
            return Some(ticket);
        }
        let mut behind = self.running.range((Bound::Excluded(ticket), Bound::Unbounded));
        let pinned = |request: &Running| request.is_in_step() || request.is_pinned();
        behind.rfind(|(_, request)| !pinned(request)).map(|(&victim, _)| victim)
    }

    /// Waiting becomes running, strictly in order. Whoever is first can be held by the empty pool, so it is only ever
    /// waiting for requests that end. Gives the room of those whose planes come from elsewhere.
    fn admit(&mut self) -> Vec<Reserved> {
        let slots = self.config.slots();
        let mut reserved = Vec::new();
        while let Some(first) = self.waiting.first_entry() {
            let needs = first.get().needs(self.config.admission, &self.pool);
            if needs.slots > slots - self.running.len() {
                break;
            }
            let Some(pages) = first.get().take_pages(needs.pages, &mut self.pool) else { break };
            let (ticket, request) = first.remove_entry();
            let prefill_tokens = request.prefill_end() as u64;
            let running = request.admit(pages, &self.pool);
            match running.reserved(&self.pool) {
                Some(room) => reserved.push(room),
                None => {
                    self.tally.prefill_tokens += prefill_tokens;
                    self.tally.cached_tokens += running.computed() as u64;
                }
            }
            self.running.insert(ticket, running);
        }
        reserved
    }

    /// What a step has to do.
    fn work(&self, step: &StepPlan) -> Work {
        let mut work = Work::default();
        for row in &step.rows {
            match self.walks.is_decode(row.walk) {
                true => work.add_decode(row.positions.start),
                false => work.add_prefill(row.positions.clone()),
            }
        }
        work
    }

    fn pack(&mut self) -> Option<StepPlan> {
        let mut ahead = std::mem::take(&mut self.ahead);
        let Self { running, config, walks, .. } = self;
        let candidate = |(ticket, request): (&Ticket, _)| Candidate::new(*ticket, request, config, walks);
        let mut candidates: Vec<Candidate<'_>> = running.iter_mut().filter_map(candidate).collect();
        let packing = pack(&candidates, config, &self.pace, self.before)?;
        let since_alone = if packing.alone { 0 } else { self.before.since_alone.saturating_add(1) };
        self.before = Before { mixed: Some(packing.mixed), since_alone };
        for &place in &packing.passed_over {
            let request = &mut candidates[place].request;
            request.passed_over = request.passed_over.saturating_add(1);
        }
        let number = self.next_step;
        self.next_step.0 += 1;
        let mut rows = Vec::with_capacity(packing.shares.len());
        for share in &packing.shares {
            let Candidate { ticket, request, .. } = &mut candidates[share.place];
            request.passed_over = 0;
            let prepared = ahead.settle(*ticket, |row| request.launch_prepared(number, row));
            self.tally.rows_ahead += u64::from(prepared.is_some());
            rows.push(prepared.unwrap_or_else(|| request.launch(*ticket, number, share.walk, share.tokens)));
        }
        let own = packing.shares.iter().map(|share| share.walk);
        Some(StepPlan { number, batch_walk: walks.batch_walk(packing.mixed, own), rows })
    }
}

/// A request that has ended is known no more.
fn forget(
    tickets: &mut HashMap<GraphKey, Ticket>,
    deadlines: &mut BTreeSet<(Duration, GraphKey)>,
    key: GraphKey,
    deadline: Option<Duration>,
) {
    tickets.remove(&key);
    if let Some(deadline) = deadline {
        deadlines.remove(&(deadline, key));
    }
}
