//! The engine without its device: accepts launches, plans steps, and commits their results.

use std::{
    collections::HashMap,
    time::{Duration, Instant, SystemTime},
};

use tutti_models::{ExpertLoad, PageLayout};
use tutti_proto::{GraphKey, Rank, StepNumber, cluster::v1 as pb, declaration::WalkId};
use tutti_runtime::{Error, ErrorKind};
use tutti_scheduler::{
    Ending, GraphLaunch, GraphRole, Load, NotSampled, Refusal, RowCommit, RowOutcome, Scheduler, SlotId,
    StepPlan, Turn,
};
use tutti_settings::{Admission, MediaPrefill};
use tutti_transfer::{Connector, Units};

use crate::{
    EngineSettings, StepTimes,
    arrivals::Arrivals,
    batch::RowResult,
    encoder_cache::EncoderCounts,
    masks::{MaskCounts, Masks},
    media::Encoding,
    observe::Stopwatch,
    report,
    runner::CollectedStep,
    sequence::Sequence,
    sequences::Sequences,
    transfer::{PageCopies, TransferEvents, Transfers},
};

pub(crate) struct EngineCore {
    rank: Rank,
    scheduler: Scheduler,
    /// Time zero of the scheduler's clock; deadlines count from it.
    began: Instant,
    /// One entry per request that the engine holds.
    held: HashMap<GraphKey, Held>,
    /// Slots of exported requests whose sequences the device's thread has not removed yet.
    left: Vec<(SlotId, GraphKey)>,
    /// True if the scheduler may preempt a request, which then computes its prompt again.
    may_preempt: bool,
    /// Completions that `plan` has not returned yet.
    pending_completions: Vec<pb::Completion>,
    arrivals: Arrivals,
    /// The masks of requests whose output follows a constraint.
    pub masks: Masks,
    /// Transfers of planes and embeddings between workers; `None` if requests are not divided between workers.
    transfers: Option<Transfers>,
    /// True while page copies that a plan decided have not run. Copies in a pause must not overtake them.
    has_copies: bool,
    /// Time spent preparing the next plan while a step ran.
    ahead: Duration,
    /// Number of planned steps that are not committed yet.
    in_flight: usize,
    /// Counts of encoder calls, those of the last committed step included.
    pub encoders: EncoderCounts,
    /// Maximum bytes of embeddings that requests may hold here.
    embedding_bytes: usize,
    media_prefill: MediaPrefill,
}

/// The owner of a request's sequence.
enum Held {
    /// The engine core holds the sequence. The request has had no row yet, or was preempted.
    Waiting(Box<Sequence>),
    /// The request runs: the device's thread holds the sequence, in this slot of its [`Sequences`].
    Running(SlotId),
}

/// A planned step.
pub(crate) struct Job {
    pub step: StepPlan,
    started: SystemTime,
    times: StepTimes,
}

/// Outcome of one planning turn.
pub(crate) struct Planned {
    pub completions: Vec<pb::Completion>,
    /// Page copies to run before the step. If they ran later, they could read or write pages that have changed owners.
    pub copies: PageCopies,
    pub job: Option<Job>,
}

/// Unreported results of one turn, for [`EngineHandle::report`](crate::EngineHandle::report).
pub struct StepOutput {
    /// `None` if no step ran.
    pub(crate) step: Option<CommittedStep>,
    /// Completions of graphs that ended outside of the step.
    pub(crate) completions: Vec<pb::Completion>,
    /// Number of the step. If no step ran, number of the next step.
    pub(crate) number: StepNumber,
    pub(crate) load: Load,
    pub(crate) masks: MaskCounts,
    pub(crate) encoders: EncoderCounts,
    pub(crate) oldest_waiting: Duration,
}

/// A step whose results are committed, with its rows.
pub(crate) struct CommittedStep {
    pub batch_walk: WalkId,
    pub rows: Vec<(RowCommit, RowResult)>,
    /// Number of tokens of padding.
    pub padding: usize,
    pub started: SystemTime,
    /// Time at which the results were collected.
    pub collected: Instant,
    pub times: StepTimes,
    /// Loads of the model's experts; empty if they were not read after this step.
    pub expert_loads: Vec<ExpertLoad>,
}

impl EngineCore {
    /// Creates a core whose deadlines count from `began`.
    pub fn new(rank: Rank, scheduler: Scheduler, began: Instant, settings: &EngineSettings) -> Self {
        Self {
            rank,
            scheduler,
            began,
            held: HashMap::new(),
            left: Vec::new(),
            may_preempt: settings.admission == Admission::Optimistic,
            pending_completions: Vec::new(),
            arrivals: Arrivals::default(),
            masks: Masks::default(),
            transfers: None,
            has_copies: false,
            ahead: Duration::ZERO,
            in_flight: 0,
            encoders: EncoderCounts::default(),
            embedding_bytes: settings.embedding_memory.bytes(),
            media_prefill: settings.media_prefill,
        }
    }

    /// Accepts or refuses a launch that [`spec::parse`](crate::spec::parse) has read.
    pub fn launch(&mut self, key: GraphKey, parsed: Result<(GraphLaunch, Sequence), Error>) {
        if self.held.contains_key(&key) {
            // A refusal would end the graph that already runs under this key.
            tracing::error!(%key, "dropped a second launch of a running graph");
            return;
        }
        let accepted = parsed.and_then(|(mut launch, sequence)| {
            launch.prefill_is_whole =
                self.media_prefill == MediaPrefill::Atomic && !sequence.media.items.is_empty();
            let (role, awaits_media) = (launch.role, launch.awaits_media);
            let tokens = launch.prefill_tokens();
            if (role != GraphRole::Whole || awaits_media) && self.transfers.is_none() {
                let message = "this engine exchanges no planes with others";
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
            let awaits_mask = launch.awaits_mask;
            if awaits_mask {
                self.masks.prepare()?;
            }
            self.scheduler.add(launch).map_err(refusal)?;
            if let Some(guide) = sequence.guide.as_ref().filter(|_| awaits_mask) {
                self.masks.open(guide, &sequence.output);
            }
            if let Some(transfers) = &mut self.transfers {
                match role {
                    GraphRole::Prefill => transfers.will_send(key, tokens, sequence.elsewhere),
                    GraphRole::Encode => {
                        let values = sequence.encodings.iter().map(Encoding::values).sum();
                        transfers.will_encode(key, values);
                    }
                    GraphRole::Whole | GraphRole::Decode => {}
                }
                if awaits_media {
                    transfers.awaits_media(key, sequence.media.values());
                }
                if let Some(why) = transfers.take_early_failure(key) {
                    self.scheduler.fail_transfer(key, why);
                }
            }
            self.held.insert(key, Held::Waiting(Box::new(sequence)));
            self.arrivals.add(key);
            Ok(())
        });
        if let Err(error) = accepted {
            tracing::debug!(%key, %error, "launch refused");
            if let Some(transfers) = &mut self.transfers {
                transfers.ended(key);
            }
            self.pending_completions.push(pb::Completion {
                key: Some(key.into()),
                epoch: 0,
                rank: self.rank.0,
                outcome: Some(pb::completion::Outcome::Refused(error.into())),
            });
        }
    }

    pub fn cancel(&mut self, key: GraphKey) {
        match self.transfers.as_mut().and_then(|transfers| transfers.cancel(key, self.rank)) {
            Some(completion) => self.pending_completions.push(completion),
            None => self.scheduler.cancel(key),
        }
    }

    /// Allows requests to be divided between this engine and others.
    pub fn connect(&mut self, connector: Box<dyn Connector>, layout: &PageLayout, units: Units) {
        self.transfers = Some(Transfers::new(connector, layout, units, self.embedding_bytes));
    }

    /// Prepares the next plan as far as possible while a step runs.
    pub fn plan_ahead(&mut self) {
        let mut watch = Stopwatch::start();
        self.scheduler.plan_ahead();
        self.ahead += watch.lap();
    }

    /// Decides the next step. Returns the completions of graphs that have ended since the last plan, the page copies to
    /// run first, and the step. Moves the sequences of requests that start or stop running to and from `sequences`.
    pub fn plan(&mut self, sequences: &mut Sequences) -> Result<Planned, Error> {
        let started = SystemTime::now();
        let watch = Stopwatch::start();
        for (slot, key) in self.left.drain(..) {
            sequences.remove(slot, key);
        }
        if let Some(transfers) = &mut self.transfers {
            let mut events = TransferEvents::default();
            transfers.between_steps();
            transfers.receive(&mut self.scheduler, self.rank, &mut events);
            self.apply(events);
        }
        self.masks.tell(&mut self.scheduler);
        let Turn { endings, preempted, reserved, step } = self.scheduler.plan(self.began.elapsed());
        for key in preempted {
            tracing::debug!(%key, "preempted; starts over when pages are free");
            if let Some(held) = self.held.get_mut(&key)
                && let Held::Running(slot) = *held
                && let Some(sequence) = sequences.remove(slot, key)
            {
                *held = Held::Waiting(Box::new(sequence));
            }
        }
        let mut completions = std::mem::take(&mut self.pending_completions);
        for ending in endings {
            self.forget(&ending, sequences);
            completions.push(report::completion(ending, self.rank));
        }
        let mut copies = PageCopies::default();
        if let Some(transfers) = &mut self.transfers {
            for room in reserved {
                self.arrivals.remove(room.key);
                transfers.reserved(room);
            }
            let mut events = TransferEvents::default();
            copies = transfers.start_copies(&mut self.scheduler, &mut events);
            self.has_copies = !copies.is_empty();
            self.apply(events);
        }
        let job = step.map(|step| self.job(step, started, watch, sequences)).transpose()?;
        Ok(Planned { completions, copies, job })
    }

    fn job(
        &mut self,
        step: StepPlan,
        started: SystemTime,
        mut watch: Stopwatch,
        sequences: &mut Sequences,
    ) -> Result<Job, Error> {
        for row in &step.rows {
            if row.epoch.0 == 0 {
                self.arrivals.remove(row.key);
            }
            if sequences.get(row).is_some() {
                continue;
            }
            // The request was waiting until now, so its sequence moves from `held` to `sequences`.
            match self.held.insert(row.key, Held::Running(row.slot)) {
                Some(Held::Waiting(sequence)) => sequences.insert(row.slot, row.key, *sequence),
                _ => {
                    let (step, key) = (step.number, row.key);
                    let message = format!("step {step} has a row of {key}, whose sequence is missing");
                    return Err(Error::internal(message));
                }
            }
        }
        let times = StepTimes {
            plan_ahead: std::mem::take(&mut self.ahead),
            plan: watch.lap(),
            ..StepTimes::default()
        };
        self.in_flight += 1;
        Ok(Job { step, started, times })
    }

    /// True if pages may have to be copied while the next step runs.
    pub fn has_transfers(&self) -> bool {
        self.transfers.as_ref().is_some_and(Transfers::is_active)
    }

    /// Decides the page copies to run now, while a step is paused. The copies write to no page that the step uses, and
    /// read no page that the step writes to. Empty while the copies of the last plan have not run: the pause may be in
    /// the logits of a step that was enqueued before that plan, and an import or export would miss these copies.
    pub fn start_copies(&mut self) -> PageCopies {
        let Some(transfers) = self.transfers.as_mut().filter(|_| !self.has_copies) else {
            return PageCopies::default();
        };
        let mut events = TransferEvents::default();
        transfers.receive(&mut self.scheduler, self.rank, &mut events);
        let copies = transfers.start_copies(&mut self.scheduler, &mut events);
        self.apply(events);
        copies
    }

    /// Records that the copies have run.
    pub fn finish_copies(&mut self, copies: PageCopies) {
        self.has_copies = false;
        let Some(transfers) = &mut self.transfers else { return };
        let mut events = TransferEvents::default();
        transfers.finish_copies(copies, &mut self.scheduler, &mut events);
        self.apply(events);
    }

    fn apply(&mut self, events: TransferEvents) {
        let TransferEvents { completions, imported, embedded, exported } = events;
        self.pending_completions.extend(completions);
        for (key, embeddings) in embedded {
            if let Some(Held::Waiting(sequence)) = self.held.get_mut(&key) {
                sequence.media.embeddings = embeddings;
            }
        }
        for (key, token) in imported {
            if let Some(Held::Waiting(sequence)) = self.held.get_mut(&key) {
                sequence.output.push(token);
                if let Some(guide) = &sequence.guide {
                    self.masks.advance_imported(guide, token, &mut self.scheduler);
                }
            }
        }
        for key in exported {
            if let Some(Held::Running(slot)) = self.held.remove(&key) {
                self.left.push((slot, key));
            }
        }
    }

    /// Commits a collected step, and appends each sampled token to the sequence of its request.
    pub fn commit(
        &mut self,
        collected: CollectedStep,
        sequences: &mut Sequences,
    ) -> (StepNumber, CommittedStep) {
        let mut watch = Stopwatch::start();
        let collected_at = watch.began();
        let CollectedStep { job, results, padding, took, expert_loads, encoders } = collected;
        let Job { step, started, mut times } = job;
        self.in_flight -= 1;
        self.encoders = encoders;
        let (number, batch_walk) = (step.number, step.batch_walk);
        for (row, result) in step.rows.iter().zip(&results) {
            if result.as_ref().is_ok_and(|result| result.only_ends) {
                self.scheduler.waive_min_tokens(row.key);
            }
        }
        let outcome = |result: &Result<RowResult, _>| match result {
            Ok(RowResult { sampled: Some(sampled), .. }) => RowOutcome::Sampled(sampled.token),
            Ok(RowResult { not_sampled: Some(why), .. }) => RowOutcome::NotSampled(why.clone()),
            Ok(_) => RowOutcome::Computed,
            Err(error) => RowOutcome::Failed(tutti_kernels::DeviceError::to_string(error)),
        };
        let outcomes = results.iter().map(outcome).collect();
        let commits = self.scheduler.commit(step, outcomes, took);
        if let Some(transfers) = &mut self.transfers {
            transfers.committed(&commits, results.iter().map(|result| result.as_ref().ok()));
        }
        let mut advanced = Vec::new();
        for (commit, result) in commits.iter().zip(&results).filter(|(commit, _)| !commit.is_void) {
            if let Some(ending) = &commit.ending {
                self.forget(ending, sequences);
            } else if let Some(sequence) = sequences.get_mut(&commit.row) {
                sequence.output.extend(commit.sampled.map(|sampled| sampled.token));
                let not_sampled = result.as_ref().ok().and_then(|result| result.not_sampled.as_ref());
                let is_late = not_sampled == Some(&NotSampled::Late);
                if let Some(guide) = sequence.guide.as_ref().filter(|_| sequence.decodes_here()) {
                    if is_late {
                        self.masks.was_late(guide, &mut self.scheduler);
                    }
                    advanced.extend(commit.sampled.map(|sampled| (guide.clone(), sampled.token)));
                }
                // The row runs again, and needs its media then.
                if is_late || not_sampled == Some(&NotSampled::Void) {
                    continue;
                }
                sequence.scores_reported = sequence.scores_reported.max(commit.row.positions.end);
                if !self.may_preempt && sequence.media.consume(commit.row.positions.end) {
                    self.transfers.iter_mut().for_each(|transfers| transfers.media_consumed(commit.row.key));
                }
            }
        }
        self.masks.advance(advanced, &mut self.scheduler);
        let rows = commits.into_iter().zip(results.into_iter().map(Result::unwrap_or_default)).collect();
        (times.run, times.commit) = (took, watch.lap());
        (
            number,
            CommittedStep {
                batch_walk,
                rows,
                padding,
                started,
                collected: collected_at,
                times,
                expert_loads,
            },
        )
    }

    fn forget(&mut self, ending: &Ending, sequences: &mut Sequences) {
        if let Some(Held::Running(slot)) = self.held.remove(&ending.key) {
            sequences.remove(slot, ending.key);
        }
        self.arrivals.remove(ending.key);
        self.masks.ended(ending.key);
        if let Some(transfers) = &mut self.transfers {
            transfers.ended(ending.key);
        }
    }

    /// Time until the next deadline of any request; `None` if no request has one.
    pub fn until_next_deadline(&self) -> Option<Duration> {
        Some(self.scheduler.next_deadline()?.saturating_sub(self.began.elapsed()))
    }

    /// Combines a step and completions with the current load; `None` if there is no step and no completion.
    pub fn output(
        &mut self,
        step: Option<(StepNumber, CommittedStep)>,
        completions: Vec<pb::Completion>,
    ) -> Option<StepOutput> {
        if step.is_none() && completions.is_empty() {
            return None;
        }
        let (load, oldest_waiting) = self.load();
        let (number, step) = step.unzip();
        let number = number.unwrap_or(StepNumber(load.steps));
        let (masks, encoders) = (self.masks.counts(), self.encoders);
        Some(StepOutput { step, completions, number, load, masks, encoders, oldest_waiting })
    }

    /// Current load, and the waiting time of the oldest request that has not run in any step yet.
    pub fn load(&mut self) -> (Load, Duration) {
        (self.scheduler.load(), self.arrivals.oldest())
    }

    /// True if the engine holds no request, has no step in flight, and has returned all completions.
    pub fn is_idle(&self) -> bool {
        let transferred = self.transfers.as_ref().is_none_or(Transfers::is_idle);
        self.scheduler.is_empty() && self.in_flight == 0 && self.pending_completions.is_empty() && transferred
    }
}

/// Converts a refusal into the error that the client sees. The error names the field that the client could change.
fn refusal(refusal: Refusal) -> Error {
    let message = refusal.to_string();
    match refusal {
        Refusal::EmptyPrompt => Error::invalid("prompt", message),
        Refusal::ContextTooSmall { prompt_tokens, max_context, .. } if prompt_tokens >= max_context => {
            Error::invalid("prompt", message)
        }
        Refusal::ContextTooSmall { .. } | Refusal::PoolTooSmall { .. } => {
            Error::invalid("max_tokens", message)
        }
        Refusal::QueueFull { .. } => Error::overloaded(message, Duration::from_secs(1)),
        // The conductor, and not the client, causes these refusals.
        Refusal::Duplicate(_)
        | Refusal::WrongWalk { .. }
        | Refusal::WrongContent { .. }
        | Refusal::NoDecodeWalk { .. } => Error::internal(message),
    }
}
