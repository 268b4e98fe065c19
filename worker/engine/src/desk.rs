//! The desk: where launches are taken and steps are decided. It holds all of an engine but the device.

use std::{
    collections::HashMap,
    time::{Duration, Instant, SystemTime},
};

use tutti_models::PageLayout;
use tutti_proto::{GraphKey, Rank, StepNumber, cluster::v1 as pb, declaration::WalkId};
use tutti_runtime::{Error, ErrorKind};
use tutti_scheduler::{
    Ending, GraphLaunch, GraphRole, Load, Refusal, RowCommit, RowOutcome, Scheduler, StepPlan, Turn,
};

use crate::{
    StepTimes,
    arrivals::Arrivals,
    batch::RowResult,
    courier::Courier,
    exchange::{Errands, Exchange, Received},
    observe::Stopwatch,
    report,
    runner::RowResults,
    sequence::Sequence,
};

pub(crate) struct Desk {
    rank: Rank,
    scheduler: Scheduler,
    /// Deadlines are counted from here.
    began: Instant,
    /// Of every request that the scheduler holds; away while a step computes the request.
    sequences: HashMap<GraphKey, Option<Sequence>>,
    /// Completions that no plan has given yet.
    untold: Vec<pb::Completion>,
    arrivals: Arrivals,
    /// None where requests are not divided between workers.
    exchange: Option<Exchange>,
    /// Spent on the next plan while a step ran.
    ahead: Duration,
}

/// A step on its way through the device, with all that its inputs are made of.
pub(crate) struct Job {
    pub step: StepPlan,
    /// One for each row.
    pub sequences: Vec<Sequence>,
    started: SystemTime,
    times: StepTimes,
}

/// What a plan comes to.
pub(crate) struct Planned {
    pub completions: Vec<pb::Completion>,
    /// To be run before anything else, or pages could change hands between plan and copy.
    pub errands: Errands,
    pub job: Option<Job>,
}

/// What has happened and nobody has been told of.
pub struct News {
    /// None if nothing has run.
    pub(crate) step: Option<StepNews>,
    /// Of graphs that ended without the step's doing.
    pub(crate) completions: Vec<pb::Completion>,
    /// The number of the step, or of the one to come.
    pub(crate) number: StepNumber,
    pub(crate) load: Load,
    pub(crate) oldest_waiting: Duration,
}

/// A committed step.
pub(crate) struct StepNews {
    pub batch_walk: WalkId,
    pub rows: Vec<(RowCommit, RowResult)>,
    pub started: SystemTime,
    pub times: StepTimes,
}

impl Desk {
    /// Deadlines of launches are counted from `began`.
    pub fn new(rank: Rank, scheduler: Scheduler, began: Instant) -> Self {
        Self {
            rank,
            scheduler,
            began,
            sequences: HashMap::new(),
            untold: Vec::new(),
            arrivals: Arrivals::default(),
            exchange: None,
            ahead: Duration::ZERO,
        }
    }

    /// Takes a launch as far as it could be [parsed](crate::spec::parse).
    pub fn launch(&mut self, key: GraphKey, parsed: Result<(GraphLaunch, Sequence), Error>) {
        if self.sequences.contains_key(&key) {
            // A failure would end the graph that runs.
            tracing::error!(%key, "a second launch of a graph that is here is dropped");
            return;
        }
        let accepted = parsed.and_then(|(launch, sequence)| {
            let (role, awaits_media) = (launch.role, launch.awaits_media);
            let tokens = launch.prefill_tokens();
            if (role != GraphRole::Whole || awaits_media) && self.exchange.is_none() {
                let message = "this engine exchanges no planes with others";
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
            self.scheduler.add(launch).map_err(refusal)?;
            if let Some(exchange) = &mut self.exchange {
                match role {
                    GraphRole::Prefill => exchange.will_send(key, tokens, sequence.known_elsewhere),
                    GraphRole::Encode => {
                        exchange
                            .will_encode(key, sequence.encodings.iter().map(|item| item.rows.len()).sum());
                    }
                    GraphRole::Whole | GraphRole::Decode => {}
                }
                if awaits_media {
                    exchange.awaits_media(key, sequence.media.tokens());
                }
            }
            self.sequences.insert(key, Some(sequence));
            self.arrivals.add(key);
            Ok(())
        });
        if let Err(error) = accepted {
            tracing::debug!(%key, %error, "launch refused");
            if let Some(exchange) = &mut self.exchange {
                exchange.ended(key);
            }
            self.untold.push(pb::Completion {
                key: Some(key.into()),
                epoch: 0,
                rank: self.rank.0,
                outcome: Some(pb::completion::Outcome::Refused(error.into())),
            });
        }
    }

    pub fn cancel(&mut self, key: GraphKey) {
        match self.exchange.as_mut().and_then(|exchange| exchange.cancel(key, self.rank)) {
            Some(completion) => self.untold.push(completion),
            None => self.scheduler.cancel(key),
        }
    }

    /// From now on requests may be divided between this engine and others.
    pub fn connect(&mut self, courier: Box<dyn Courier>, layout: &PageLayout, width: usize) {
        self.exchange = Some(Exchange::new(courier, layout, width));
    }

    /// What the next step can be prepared of while one runs.
    pub fn plan_ahead(&mut self) {
        let mut watch = Stopwatch::start();
        self.scheduler.plan_ahead();
        self.ahead += watch.lap();
    }

    /// Decides what runs next. Gives the completions of whoever is no longer there, what is to be copied first, and the
    /// step.
    pub fn plan(&mut self) -> Result<Planned, Error> {
        let started = SystemTime::now();
        let watch = Stopwatch::start();
        if let Some(exchange) = &mut self.exchange {
            let mut received = Received::default();
            exchange.receive(&mut self.scheduler, self.rank, &mut received);
            self.take(received);
        }
        let Turn { endings, preempted, reserved, step } = self.scheduler.plan(self.began.elapsed());
        for key in preempted {
            tracing::debug!(%key, "preempted: it computes everything again once there are pages");
        }
        let mut completions = std::mem::take(&mut self.untold);
        for ending in endings {
            self.forget(&ending);
            completions.push(report::completion(ending, self.rank));
        }
        let mut errands = Errands::default();
        if let Some(exchange) = &mut self.exchange {
            for room in reserved {
                self.arrivals.remove(room.key);
                exchange.reserved(room);
            }
            let mut received = Received::default();
            errands = exchange.errands(&mut self.scheduler, &mut received);
            self.take(received);
        }
        let job = step.map(|step| self.job(step, started, watch)).transpose()?;
        Ok(Planned { completions, errands, job })
    }

    fn job(&mut self, step: StepPlan, started: SystemTime, mut watch: Stopwatch) -> Result<Job, Error> {
        let mut sequences = Vec::with_capacity(step.rows.len());
        for row in &step.rows {
            if row.epoch.0 == 0 {
                self.arrivals.remove(row.key);
            }
            let Some(sequence) = self.sequences.get_mut(&row.key).and_then(Option::take) else {
                return Err(Error::internal(format!("{} is in step {}, but not here", row.key, step.number)));
            };
            sequences.push(sequence);
        }
        let times = StepTimes {
            plan_ahead: std::mem::take(&mut self.ahead),
            plan: watch.lap(),
            ..StepTimes::default()
        };
        Ok(Job { step, sequences, started, times })
    }

    /// Whether anything may have to be copied while the next step runs.
    pub fn exchanges(&self) -> bool {
        self.exchange.as_ref().is_some_and(Exchange::is_active)
    }

    /// What is to be copied now that a step has paused, which changes nothing that the step counts on.
    pub fn errands(&mut self) -> Errands {
        let Some(exchange) = &mut self.exchange else { return Errands::default() };
        let mut received = Received::default();
        exchange.receive(&mut self.scheduler, self.rank, &mut received);
        let errands = exchange.errands(&mut self.scheduler, &mut received);
        self.take(received);
        errands
    }

    /// What was to be copied is copied.
    pub fn carried(&mut self, errands: Errands) {
        let Some(exchange) = &mut self.exchange else { return };
        let mut received = Received::default();
        exchange.carried(errands, &mut self.scheduler, &mut received);
        self.take(received);
    }

    fn take(&mut self, received: Received) {
        let Received { completions, taken_over, embedded, gone } = received;
        self.untold.extend(completions);
        for (key, embeddings) in embedded {
            if let Some(Some(sequence)) = self.sequences.get_mut(&key) {
                sequence.media.embeddings = embeddings;
            }
        }
        for (key, token) in taken_over {
            if let Some(Some(sequence)) = self.sequences.get_mut(&key) {
                sequence.output.push(token);
            }
        }
        for key in gone {
            self.sequences.remove(&key);
        }
    }

    /// Takes back a step that ran for `took`, appending sampled tokens to their sequences.
    pub fn commit(&mut self, job: Job, results: RowResults, took: Duration) -> (StepNumber, StepNews) {
        let mut watch = Stopwatch::start();
        let Job { step, sequences, started, mut times } = job;
        let (number, batch_walk) = (step.number, step.batch_walk);
        let outcome = |result: &Result<RowResult, _>| match result {
            Ok(RowResult { sampled: Some(sampled), .. }) => RowOutcome::Sampled(sampled.token),
            Ok(_) => RowOutcome::Computed,
            Err(error) => RowOutcome::Failed(tutti_kernels::DeviceError::to_string(error)),
        };
        let outcomes = results.iter().map(outcome).collect();
        let commits = self.scheduler.commit(step, outcomes, took);
        if let Some(exchange) = &mut self.exchange {
            exchange.committed(&commits, results.iter().map(|result| result.as_ref().ok()));
        }
        for (commit, mut sequence) in commits.iter().zip(sequences) {
            if let Some(ending) = &commit.ending {
                self.forget(ending);
            } else if let Some(place) = self.sequences.get_mut(&commit.row.key) {
                sequence.output.extend(commit.sampled.map(|sampled| sampled.token));
                sequence.told = sequence.told.max(commit.row.positions.end);
                *place = Some(sequence);
            }
        }
        let rows = commits.into_iter().zip(results.into_iter().map(Result::unwrap_or_default)).collect();
        (times.run, times.commit) = (took, watch.lap());
        (number, StepNews { batch_walk, rows, started, times })
    }

    fn forget(&mut self, ending: &Ending) {
        self.sequences.remove(&ending.key);
        self.arrivals.remove(ending.key);
        if let Some(exchange) = &mut self.exchange {
            exchange.ended(ending.key);
        }
    }

    /// How long from now until a request's time is up; none where none has a deadline.
    pub fn until_next_deadline(&self) -> Option<Duration> {
        Some(self.scheduler.next_deadline()?.saturating_sub(self.began.elapsed()))
    }

    /// With how things stand now; none if there is nothing new.
    pub fn news(
        &mut self,
        step: Option<(StepNumber, StepNews)>,
        completions: Vec<pb::Completion>,
    ) -> Option<News> {
        if step.is_none() && completions.is_empty() {
            return None;
        }
        let (load, oldest_waiting) = self.load();
        let (number, step) = step.unzip();
        let number = number.unwrap_or(StepNumber(load.steps));
        Some(News { step, completions, number, load, oldest_waiting })
    }

    /// What is held now, and how long the oldest request has waited for its first row.
    pub fn load(&mut self) -> (Load, Duration) {
        (self.scheduler.load(), self.arrivals.oldest())
    }

    /// Whether no request is held and nothing is left to tell.
    pub fn is_idle(&self) -> bool {
        let exchanged = self.exchange.as_ref().is_none_or(Exchange::is_idle);
        self.scheduler.is_empty() && self.untold.is_empty() && exchanged
    }
}

/// A refusal as the client sees it: with the field that it could change.
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
        // The conductor's doing, not the client's.
        Refusal::Duplicate(_)
        | Refusal::WrongWalk { .. }
        | Refusal::WrongContent { .. }
        | Refusal::NoDecodeWalk { .. } => Error::internal(message),
    }
}
