//! The scheduler: the queues of requests, and the transition from one step to the next.

mod disaggregated;
mod expiry;
mod masked;
mod memory;
mod yielding;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque, btree_map::Entry},
    time::Duration,
};

use tutti_planes::SlotCopy;
use tutti_proto::{GraphKey, StepNumber, declaration::ModelDeclaration};
use tutti_settings::Admission;

use self::masked::ConstraintEnd;
use crate::{
    config::{ConfigError, SchedulerConfig},
    holding::PlanePool,
    launch::{GraphLaunch, HEAD_START, MAX_PRIORITY, Refusal},
    least_time::LeastTime,
    pace::Pace,
    packing::{Candidate, PastSteps, pack},
    pages::PagePool,
    prepared::PreparedDecodes,
    request::{Draining, Request, Running},
    shares::Shares,
    slots::SlotPool,
    step::{Row, RowCommit, RowCopies, RowOutcome, StepPlan, TransferError, Turn},
    step_time::Work,
    ticket::Ticket,
    validate::validate,
    waiting::Waiting,
    walks::Walks,
};

/// Maximum number of remembered cancels of requests that have not arrived. The oldest is forgotten first.
const REMEMBERED_CANCELS: usize = 1024;

/// The micro-scheduler. The crate's documentation lists its invariants.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    walks: Walks,
    planes: PlanePool,
    pace: Pace,
    least_time: LeastTime,
    /// Accepted requests that hold no pages and wait for them.
    waiting: Waiting,
    /// The token counts of the shares, which decide the order of the shares.
    shares: Shares,
    /// Accepted requests that hold no pages and wait for embeddings of their media or for their first mask.
    parked: BTreeMap<Ticket, Request>,
    /// Requests that hold their pages and a slot, in the order of their tickets.
    running: BTreeMap<Ticket, Running>,
    /// Planes of ended requests that have rows in flight, by the requests' tickets.
    draining: BTreeMap<Ticket, Draining>,
    /// The steps that are neither committed nor aborted, in the order of their plans.
    flying: VecDeque<StepNumber>,
    /// The ticket of every request in `waiting`, `parked` or `running`.
    tickets: HashMap<GraphKey, Ticket>,
    /// Held requests that the next plan ends as cancelled.
    cancelled: BTreeSet<GraphKey>,
    /// Held requests that the next plan ends because their planes were not transferred.
    failed_transfers: BTreeMap<GraphKey, TransferError>,
    /// Held requests that the next plan ends with the outcome of their constraint.
    constrained: BTreeMap<GraphKey, ConstraintEnd>,
    /// Requests that were cancelled before they arrived.
    cancelled_early: VecDeque<GraphKey>,
    /// Deadlines of held requests, the earliest first.
    deadlines: BTreeSet<(Duration, GraphKey)>,
    next_ticket: u64,
    next_step: StepNumber,
    past: PastSteps,
    /// The running request that is left out of steps until it can yield to another share.
    yielding: Option<Ticket>,
    /// Rows prepared for the next plan.
    prepared: PreparedDecodes,
    tally: Tally,
}

/// Counters over the scheduler's life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of preemptions. A preemption releases a request's pages before the request's end, because another request
    /// needs a page or another share has no running request.
    pub preemptions: u64,
    /// Number of prefill tokens of admitted requests, counted again at each admission of a request.
    pub prefill_tokens: u64,
    /// Number of the tokens counted in `prefill_tokens` that came from the prefix cache.
    pub cached_tokens: u64,
    /// Number of planned rows that had been [prepared](Scheduler::plan_ahead) before their step was planned.
    pub rows_ahead: u64,
    /// Number of rows whose request had ended before the row was committed.
    pub void_rows: u64,
}

/// A worker's load and counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests in the running set. Requests that have ended are not among them, even if they have rows in flight.
    pub running: usize,
    /// Requests that wait for pages, media or their first mask.
    pub waiting: usize,
    /// Pages held by requests, and by ended requests with rows in flight.
    pub pages_used: usize,
    /// Pages that no request holds, kept because new prompts may start with the pages' content.
    pub pages_cached: usize,
    /// Pages that requests can hold.
    pub pages_total: usize,
    /// Slots held by requests, by ended requests with rows in flight, and by snapshots that are being saved or read.
    pub slots_used: usize,
    /// Slots with snapshots that no request reads. These slots can be taken for other uses.
    pub slots_cached: usize,
    /// Slots that requests and snapshots can hold.
    pub slots_total: usize,
    /// Steps planned so far.
    pub steps: u64,
    /// Counters over the scheduler's life.
    pub tally: Tally,
}

impl Scheduler {
    /// Makes a scheduler for a model of this declaration.
    pub fn new(config: SchedulerConfig, model: &ModelDeclaration) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Self {
            walks: Walks::new(model, config.settings.chunking)?,
            pace: Pace::new(config.settings.target_itl()),
            least_time: LeastTime::default(),
            planes: PlanePool::new(
                PagePool::new(config.pages, config.page_tokens),
                SlotPool::new(config.slots),
                model.has_slots(),
            ),
            config,
            waiting: Waiting::default(),
            shares: Shares::default(),
            parked: BTreeMap::new(),
            running: BTreeMap::new(),
            draining: BTreeMap::new(),
            flying: VecDeque::new(),
            tickets: HashMap::new(),
            cancelled: BTreeSet::new(),
            failed_transfers: BTreeMap::new(),
            constrained: BTreeMap::new(),
            cancelled_early: VecDeque::new(),
            deadlines: BTreeSet::new(),
            next_ticket: 0,
            next_step: StepNumber(0),
            past: PastSteps { mixed: None, since_alone: u32::MAX },
            yielding: None,
            prepared: PreparedDecodes::default(),
            tally: Tally::default(),
        })
    }

    /// Accepts a request, which from then on gets exactly one [`Ending`](crate::Ending). A refused request gets none.
    pub fn add(&mut self, launch: GraphLaunch) -> Result<(), Refusal> {
        if self.tickets.contains_key(&launch.key) {
            return Err(Refusal::Duplicate(launch.key));
        }
        let classes = i64::from(launch.priority.clamp(-MAX_PRIORITY, MAX_PRIORITY));
        let request = validate(launch, &self.walks, &self.config, self.planes.pages())?;
        let (held, limit) = (self.tickets.len(), self.config.max_held_requests());
        if held >= limit {
            return Err(Refusal::QueueFull { held, limit });
        }
        let came = (self.next_step.0 as i64).saturating_add(classes * HEAD_START);
        let ticket = Ticket { came, number: self.next_ticket };
        self.next_ticket += 1;
        self.deadlines.extend(request.deadline.map(|deadline| (deadline, request.key)));
        if let Some(index) = self.cancelled_early.iter().position(|early| *early == request.key) {
            self.cancelled_early.remove(index);
            self.cancelled.insert(request.key);
        }
        self.tickets.insert(request.key, ticket);
        self.shares.arrive(request.share);
        if request.awaits_media || request.awaits_mask {
            self.parked.insert(ticket, request);
        } else {
            self.wait(ticket, request);
        }
        Ok(())
    }

    /// Adds a request to the requests that wait for pages.
    fn wait(&mut self, ticket: Ticket, request: Request) {
        let share = request.share;
        if self.waiting.insert(ticket, request) {
            self.shares.wait(share);
        }
    }

    /// Cancels a request: the next plan ends it. A request that has not arrived yet is ended by the first plan after
    /// its arrival. For a request that has ended, the call has no effect.
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

    /// Ends requests that are cancelled, past their deadline or certain to miss it, admits requests that fit, and packs
    /// the next step. `now` is the time on a monotonic clock; it is only compared with deadlines.
    ///
    /// A step may be planned while earlier steps run. At most [`steps_in_flight`](SchedulerConfig::steps_in_flight)
    /// steps are in flight together; at this limit no step is planned. A request may have a row in each of them. Its
    /// rows are planned on the assumption that its rows in flight succeed and do not end it. If a row in flight fails
    /// or ends the request, the request's later rows are [void](RowCommit::is_void).
    pub fn plan(&mut self, now: Duration) -> Turn {
        let endings = self.expire(now);
        self.end_yielding();
        let mut preempted =
            if self.config.settings.admission == Admission::Optimistic { self.grow() } else { vec![] };
        preempted.extend(self.yield_to_share());
        let reserved = self.admit();
        let may_fly = self.flying.len() < self.config.steps_in_flight;
        Turn { endings, preempted, reserved, step: if may_fly { self.pack() } else { None } }
    }

    /// Prepares the decodes of the next plan while a step runs, on the assumption that each row of that step succeeds
    /// and ends no request. This only makes [`plan`](Self::plan) faster; the plan is the same without it. May be called
    /// at any time, any number of times.
    pub fn plan_ahead(&mut self) {
        self.prepared = PreparedDecodes::new(&self.running, self.config.page_tokens);
    }

    /// Takes back a step that has run, with one outcome for each row, in the order of the rows, and the step's
    /// duration. Steps come back in the order of their plans. A row takes effect on its request here and nowhere else.
    /// A row of a request that has ended meanwhile is void: whatever its outcome, it has no effect.
    pub fn commit(&mut self, step: StepPlan, outcomes: Vec<RowOutcome>, took: Duration) -> Vec<RowCommit> {
        assert_eq!(step.rows.len(), outcomes.len(), "step {}: rows and outcomes", step.number);
        assert_eq!(self.flying.pop_front(), Some(step.number), "steps come back in the order of their plans");
        self.observe(&step, took);
        let mut commits = Vec::with_capacity(outcomes.len());
        let mut copies = step.row_copies.into_iter().peekable();
        for (index, (row, outcome)) in step.rows.into_iter().zip(outcomes).enumerate() {
            let copies = copies.next_if(|copies| copies.row == index);
            self.planes.remove_reader(copies.and_then(|copies| copies.initial));
            let Some(request) = self.running.get_mut(&row.ticket) else {
                self.drop_row(&row, copies);
                self.tally.void_rows += 1;
                commits.push(RowCommit { row, sampled: None, cached_tokens: 0, is_void: true, ending: None });
                continue;
            };
            let cached_tokens = request.cached_tokens();
            let (sampled, outcome) =
                request.commit(&row, copies.and_then(|copies| copies.save), outcome, &mut self.planes);
            if sampled.is_some() {
                self.shares.output(request.share());
            }
            let ending = outcome.and_then(|outcome| self.end_running(row.ticket, row.key, outcome));
            commits.push(RowCommit { row, sampled, cached_tokens, is_void: false, ending });
        }
        commits
    }

    /// Takes back the step that was planned last. Neither its rows nor its slot copies have run. No request advances,
    /// so later plans compute the same positions.
    pub fn abort(&mut self, step: StepPlan) {
        assert_eq!(self.flying.pop_back(), Some(step.number), "only the step planned last is aborted");
        let mut copies = step.row_copies.into_iter().peekable();
        for (index, row) in step.rows.iter().enumerate() {
            let copies = copies.next_if(|copies| copies.row == index);
            match self.running.get_mut(&row.ticket) {
                Some(request) => request.leave_step(row, copies, &mut self.planes),
                None => {
                    self.planes.remove_reader(copies.and_then(|copies| copies.initial));
                    self.drop_row(row, copies);
                }
            }
        }
    }

    /// Takes back a row of a request that has ended. The request's last row in flight frees the request's planes.
    fn drop_row(&mut self, row: &Row, copies: Option<RowCopies>) {
        let Entry::Occupied(mut draining) = self.draining.entry(row.ticket) else {
            unreachable!("{} has neither a request nor planes", row.key);
        };
        if draining.get_mut().drop_row(copies, &mut self.planes) {
            draining.remove().release(&mut self.planes);
        }
    }

    /// Updates the estimates with the duration of a step. A step that ran an encoder does not count for the pace.
    fn observe(&mut self, step: &StepPlan, took: Duration) {
        let Self { running, draining, .. } = self;
        let encodes = |row: &Row| match running.get(&row.ticket) {
            Some(request) => request.encodes(),
            None => draining.get(&row.ticket).is_some_and(|draining| draining.encodes),
        };
        let scored = |row: &Row| match running.get(&row.ticket) {
            Some(request) => request.is_scored(),
            None => draining.get(&row.ticket).is_some_and(|draining| draining.is_scored),
        };
        let encoder_ran = step.rows.iter().any(encodes);
        self.least_time.observe(step, &self.walks, scored, took);
        if !encoder_ran {
            self.pace.observe(&self.work(step), took);
        }
    }

    /// Returns the worker's current load and its counters.
    pub fn load(&self) -> Load {
        Load {
            running: self.running.len(),
            waiting: self.waiting.len() + self.parked.len(),
            pages_used: self.planes.pages().used(),
            pages_cached: self.planes.pages().idle(),
            pages_total: self.planes.pages().total(),
            slots_used: self.planes.slots().used(),
            slots_cached: self.planes.slots().idle(),
            slots_total: self.planes.slots().total(),
            steps: self.next_step.0,
            tally: self.tally,
        }
    }

    /// The earliest deadline of a held request. If no step runs until then, the caller must call [`plan`](Self::plan)
    /// at that time.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// True if no request is held.
    pub fn is_empty(&self) -> bool {
        self.tickets.is_empty()
    }

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
        let mut prepared = std::mem::take(&mut self.prepared);
        let Self { running, config, walks, planes, .. } = self;
        let candidate = |(ticket, request): (&Ticket, _)| Candidate::new(*ticket, request, config, walks);
        let mut candidates: Vec<Candidate<'_>> = running.iter_mut().filter_map(candidate).collect();
        let packing = pack(&candidates, config, (&self.pace, &self.shares), self.past)?;
        let since_alone = if packing.alone { 0 } else { self.past.since_alone.saturating_add(1) };
        self.past = PastSteps { mixed: Some(packing.mixed), since_alone };
        for &index in &packing.passed_over {
            let request = &mut candidates[index].request;
            request.passed_over = request.passed_over.saturating_add(1);
        }
        let number = self.next_step;
        self.next_step.0 += 1;
        self.flying.push_back(number);
        let mut rows = Vec::with_capacity(packing.shares.len());
        let mut row_copies = Vec::new();
        for share in &packing.shares {
            let Candidate { ticket, request, .. } = &mut candidates[share.candidate];
            request.passed_over = 0;
            if !walks.is_decode(share.walk) {
                self.shares.prefill(request.share(), number.0);
            }
            let ready = prepared.take(*ticket, |row| request.is_next(row));
            self.tally.rows_ahead += u64::from(ready.is_some());
            if planes.has_slots() {
                row_copies.extend(request.slot_copies(rows.len(), planes));
            }
            let row =
                rows.push_mut(ready.unwrap_or_else(|| request.next_row(*ticket, share.walk, share.tokens)));
            request.enter_step(row);
        }
        let copies = slot_copies(&rows, &row_copies);
        let own = packing.shares.iter().map(|share| share.walk);
        Some(StepPlan { number, batch_walk: walks.batch_walk(packing.mixed, own), copies, rows, row_copies })
    }
}

/// The slot copies of a step. The saves come first, so that no other copy changes a slot that is saved.
fn slot_copies(rows: &[Row], copies: &[RowCopies]) -> Vec<SlotCopy> {
    let slot = |copies: &RowCopies| rows[copies.row].slot;
    let saves = copies.iter().filter_map(|copies| Some(SlotCopy { from: slot(copies), to: copies.save? }));
    let initial =
        copies.iter().filter_map(|copies| Some(SlotCopy { from: copies.initial?, to: slot(copies) }));
    saves.chain(initial).collect()
}
