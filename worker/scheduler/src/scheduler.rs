//! The scheduler: what waits, what runs, and the passage from one step to the next.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque, btree_map::Entry};

use tutti_proto::{GraphKey, StepNumber, walks::ModelDeclaration};

use crate::{
    admission::Needs,
    config::{ConfigError, SchedulerConfig},
    door,
    launch::{GraphLaunch, Refusal},
    packing::{Packing, pack},
    pages::PagePool,
    request::{Request, Running, Ticket},
    step::{Ending, Outcome, RowCommit, RowOutcome, StepPlan, Turn},
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
    /// Accepted, holding nothing, in order of arrival.
    waiting: BTreeMap<Ticket, Request>,
    /// Holding all they will ever need, in order of arrival.
    running: BTreeMap<Ticket, Running>,
    /// Every request in `waiting` or `running`.
    tickets: HashMap<GraphKey, Ticket>,
    /// Held requests to end at the head of the next plan.
    cancelled: BTreeSet<GraphKey>,
    /// Keys that were cancelled before they came.
    cancelled_early: VecDeque<GraphKey>,
    next_ticket: u64,
    next_step: StepNumber,
}

/// What a worker holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that hold pages.
    pub running: usize,
    /// Requests that wait for them.
    pub waiting: usize,
    /// Pages held.
    pub pages_used: usize,
    /// Pages that can be held.
    pub pages_total: usize,
    /// Steps planned so far.
    pub steps: u64,
}

impl Scheduler {
    /// A scheduler for a model of this declaration.
    pub fn new(config: SchedulerConfig, model: &ModelDeclaration) -> Result<Self, ConfigError> {
        config.check()?;
        Ok(Self {
            walks: Walks::new(model)?,
            pool: PagePool::new(config.pages, config.page_tokens),
            config,
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            tickets: HashMap::new(),
            cancelled: BTreeSet::new(),
            cancelled_early: VecDeque::new(),
            next_ticket: 0,
            next_step: StepNumber(0),
        })
    }

    /// Takes a request, which from then on gets exactly one [`Ending`]; or refuses it, and it gets none.
    pub fn add(&mut self, launch: GraphLaunch) -> Result<(), Refusal> {
        if self.tickets.contains_key(&launch.key) {
            return Err(Refusal::Duplicate(launch.key));
        }
        let request = door::check(launch, &self.walks, &self.config, &self.pool)?;
        let (held, limit) = (self.tickets.len(), self.config.max_held_requests());
        if held >= limit {
            return Err(Refusal::QueueFull { held, limit });
        }
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        if let Some(place) = self.cancelled_early.iter().position(|early| *early == request.key) {
            self.cancelled_early.remove(place);
            self.cancelled.insert(request.key);
        }
        self.tickets.insert(request.key, ticket);
        self.waiting.insert(ticket, request);
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

    /// Sweeps what was cancelled, admits what fits, and packs the next step.
    ///
    /// Requests that another step still computes are left to it, so the next step may be planned while one runs.
    pub fn plan(&mut self) -> Turn {
        let endings = self.sweep();
        self.admit();
        Turn { endings, step: self.pack() }
    }

    /// Takes a step back that has run, with one outcome for each of its rows, in their order. Only here does a request
    /// advance, and only by what its own row did.
    pub fn commit(&mut self, step: StepPlan, outcomes: Vec<RowOutcome>) -> Vec<RowCommit> {
        assert_eq!(step.rows.len(), outcomes.len(), "step {}: rows and outcomes", step.number);
        let mut commits = Vec::with_capacity(outcomes.len());
        for (row, outcome) in step.rows.into_iter().zip(outcomes) {
            let Entry::Occupied(mut request) = self.running.entry(row.ticket) else {
                unreachable!("{} left the running set inside step {}", row.key, step.number);
            };
            let (sampled, outcome) = request.get_mut().commit(step.number, &row, outcome);
            let ending = outcome.map(|outcome| {
                self.tickets.remove(&row.key);
                request.remove().end(outcome, &mut self.pool)
            });
            commits.push(RowCommit { row, sampled, ending });
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
            waiting: self.waiting.len(),
            pages_used: self.pool.used(),
            pages_total: self.pool.total(),
            steps: self.next_step.0,
        }
    }

    /// Whether no request is held.
    pub fn is_empty(&self) -> bool {
        self.tickets.is_empty()
    }

    /// Ends what was cancelled, in every state but one: a request inside a step keeps its pages until the step is back.
    fn sweep(&mut self) -> Vec<Ending> {
        let mut endings = Vec::new();
        for key in std::mem::take(&mut self.cancelled) {
            let Some(&ticket) = self.tickets.get(&key) else { continue };
            if self.running.get(&ticket).is_some_and(Running::is_in_step) {
                self.cancelled.insert(key);
                continue;
            }
            let running = self.running.remove(&ticket).map(|r| r.end(Outcome::Cancelled, &mut self.pool));
            endings.extend(running);
            endings.extend(self.waiting.remove(&ticket).map(|r| r.end(Outcome::Cancelled)));
            self.tickets.remove(&key);
        }
        endings
    }

    /// Waiting becomes running, strictly in order of arrival. Whoever is first can be held by the empty pool, so it is
    /// only ever waiting for requests that end.
    fn admit(&mut self) {
        let slots = self.config.slots();
        while let Some(first) = self.waiting.first_entry() {
            let needs = first.get().needs;
            let free = Needs { slots: slots - self.running.len(), pages: self.pool.free() };
            if !needs.fit_in(free) {
                break;
            }
            let Some(block_table) = self.pool.allocate(needs.pages) else { break };
            let (ticket, request) = first.remove_entry();
            self.running.insert(ticket, request.admit(block_table));
        }
    }

    fn pack(&mut self) -> Option<StepPlan> {
        let budget = self.config.max_step_tokens;
        let chunk = self.config.max_prefill_chunk.unwrap_or(budget);
        let (shares, alone) = match pack(&self.running, budget, chunk) {
            Packing::Within(shares) if shares.is_empty() => return None,
            Packing::Within(shares) => (shares, false),
            Packing::Alone(share) => (vec![share], true),
        };
        for request in self.running.values_mut() {
            request.passed_over = if alone { 0 } else { request.passed_over.saturating_add(1) };
        }
        let number = self.next_step;
        self.next_step.0 += 1;
        let mut rows = Vec::with_capacity(shares.len());
        for share in &shares {
            if let Some(request) = self.running.get_mut(&share.ticket) {
                request.passed_over = 0;
                rows.push(request.launch(share.ticket, number, share.walk, share.tokens));
            }
        }
        Some(StepPlan {
            number,
            batch_walk: self.walks.batch_walk(shares.iter().map(|share| share.walk)),
            rows,
        })
    }
}
