//! The desk: where launches are taken and steps are decided. It holds all of an engine but the device.

use std::{
    collections::HashMap,
    time::{Duration, Instant, SystemTime},
};

use tutti_proto::{GraphKey, Rank, StepNumber, cluster::v1 as pb, walks::WalkId};
use tutti_runtime::Error;
use tutti_scheduler::{Ending, GraphLaunch, Load, Refusal, RowCommit, RowOutcome, Scheduler, StepPlan, Turn};

use crate::{
    StepTimes, arrivals::Arrivals, batch::RowResult, observe::Stopwatch, report, runner::RowResults,
    sequence::Sequence,
};

pub(crate) struct Desk {
    rank: Rank,
    scheduler: Scheduler,
    /// Deadlines are counted from here.
    began: Instant,
    /// Of every request that the scheduler holds; away while a step computes the request.
    sequences: HashMap<GraphKey, Option<Sequence>>,
    /// Launches that were refused since they were last told of.
    refused: Vec<pb::Completion>,
    arrivals: Arrivals,
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
            refused: Vec::new(),
            arrivals: Arrivals::default(),
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
            self.scheduler.add(launch).map_err(refusal)?;
            self.sequences.insert(key, Some(sequence));
            self.arrivals.add(key);
            Ok(())
        });
        if let Err(error) = accepted {
            tracing::debug!(%key, %error, "launch refused");
            self.refused.push(pb::Completion {
                key: Some(key.into()),
                epoch: 0,
                rank: self.rank.0,
                outcome: Some(pb::completion::Outcome::Refused(error.into())),
            });
        }
    }

    pub fn cancel(&mut self, key: GraphKey) {
        self.scheduler.cancel(key);
    }

    /// What the next step can be prepared of while one runs.
    pub fn plan_ahead(&mut self) {
        let mut watch = Stopwatch::start();
        self.scheduler.plan_ahead();
        self.ahead += watch.lap();
    }

    /// Decides what runs next. Gives the completions of whoever is no longer there, and the step.
    pub fn plan(&mut self) -> Result<(Vec<pb::Completion>, Option<Job>), Error> {
        let started = SystemTime::now();
        let mut watch = Stopwatch::start();
        let Turn { endings, preempted, step } = self.scheduler.plan(self.began.elapsed());
        for key in preempted {
            tracing::debug!(%key, "preempted: it computes everything again once there are pages");
        }
        let mut completions = std::mem::take(&mut self.refused);
        for ending in endings {
            self.forget(&ending);
            completions.push(report::completion(ending, self.rank));
        }
        let Some(step) = step else { return Ok((completions, None)) };
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
        Ok((completions, Some(Job { step, sequences, started, times })))
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
        self.scheduler.is_empty() && self.refused.is_empty()
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
