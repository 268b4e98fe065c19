//! The engine: a scheduler, a model, and the requests between them.

use std::{
    collections::HashMap,
    time::{Duration, Instant, SystemTime},
};

use tutti_kernels::DeviceError;
use tutti_models::Model;
use tutti_proto::{GraphKey, Rank, cluster::v1 as pb};
use tutti_runtime::Error;
use tutti_scheduler::{
    self as scheduler, ConfigError, Ending, Refusal, Row, RowCommit, RowOutcome, Scheduler, SchedulerConfig,
    StepPlan, Turn,
};

use crate::{
    Chunking, EngineSettings, StepObserver, StepRecord, StepTimes,
    arrivals::Arrivals,
    batch::{Batch, RowResult},
    kv::KvSize,
    observe::{self, Stopwatch},
    report,
    sequence::Sequence,
    spec, warm_up,
};

/// See the crate's own page.
pub struct Engine {
    model: Box<dyn Model>,
    rank: Rank,
    kv: KvSize,
    max_step_tokens: usize,
    scheduler: Scheduler,
    /// Deadlines are counted from here.
    began: Instant,
    /// Of every request that the scheduler holds.
    sequences: HashMap<GraphKey, Sequence>,
    batch: Batch,
    /// Launches that were refused since the last report.
    refused: Vec<pb::Completion>,
    arrivals: Arrivals,
    observer: Option<Box<dyn StepObserver>>,
}

impl Engine {
    /// Sizes and allocates the KV pool. Fails on a setting under which nothing could run, naming it.
    pub fn new(mut model: Box<dyn Model>, rank: Rank, settings: &EngineSettings) -> Result<Self, Error> {
        let limits = model.limits();
        if settings.max_step_tokens > limits.max_step_tokens {
            let (asked, most) = (settings.max_step_tokens, limits.max_step_tokens);
            let message = format!("is {asked}, but the model was loaded for steps of {most} tokens");
            return Err(Error::invalid("max_step_tokens", message));
        }
        let kv = KvSize::choose(&*model, settings)?;
        let config = SchedulerConfig {
            max_step_tokens: settings.max_step_tokens,
            chunking: match settings.chunking {
                Chunking::Scheduler => scheduler::Chunking::Cut,
                Chunking::Engine | Chunking::Off => scheduler::Chunking::Whole,
            },
            max_prefill_chunk: settings.max_prefill_chunk,
            long_prefill_tokens: settings.long_prefill_tokens,
            prefill_sharing: settings.prefill_sharing,
            target_itl: settings.target_itl,
            admission: settings.admission,
            prefix_cache: settings.prefix_cache,
            max_running_requests: settings.max_running_requests,
            max_waiting_requests: settings.max_waiting_requests,
            max_context: limits.max_context_tokens,
            page_tokens: kv.page_tokens,
            pages: kv.pages,
        };
        let scheduler = Scheduler::new(config, model.declaration()).map_err(|error| match error {
            ConfigError::Zero(setting) => Error::invalid(setting, "is 0, but must be at least 1"),
            // The pool was sized above, and the declaration is the model's own.
            error => Error::internal(error.to_string()),
        })?;
        model
            .allocate_pages(kv.pages)
            .map_err(|e| Error::invalid("kv_cache_memory", format!("cannot allocate the KV pool: {e}")))?;
        Ok(Self {
            model,
            rank,
            kv,
            max_step_tokens: settings.max_step_tokens,
            scheduler,
            began: Instant::now(),
            sequences: HashMap::new(),
            batch: Batch::new(settings.max_step_tokens, settings.forward_tokens(), kv.page_tokens),
            refused: Vec::new(),
            arrivals: Arrivals::default(),
            observer: None,
        })
    }

    /// Runs one small step before any request does, so that none waits for weights to be read.
    pub fn warm_up(&mut self) -> Result<(), Error> {
        warm_up::run(&mut *self.model, self.max_step_tokens, self.kv.page_tokens)
            .map_err(|e| Error::internal(format!("warm-up failed: {e}")))
    }

    /// From the next step on, `observer` is told of each.
    pub fn set_observer(&mut self, observer: Box<dyn StepObserver>) {
        self.observer = Some(observer);
    }

    /// Takes a graph. What cannot be run is told by a refused completion in the next report: each launch has one ending,
    /// here as elsewhere.
    pub fn launch(&mut self, graph: pb::LaunchGraph) {
        let Some(key) = graph.key.map(GraphKey::from) else {
            tracing::error!("a launch without a key is dropped: there is nobody to tell");
            return;
        };
        if self.sequences.contains_key(&key) {
            // A failure would end the graph that runs.
            tracing::error!(%key, "a second launch of a graph that is here is dropped");
            return;
        }
        let accepted = spec::parse(key, graph, self.model.limits(), self.began.elapsed());
        let accepted = accepted.and_then(|(launch, sequence)| {
            self.scheduler.add(launch).map_err(refusal)?;
            self.sequences.insert(key, sequence);
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

    /// Cancels a graph, in whatever state; one that has not been launched yet, as soon as it is. Its completion is in
    /// the next report. For a graph that has ended this does nothing.
    pub fn cancel(&mut self, key: GraphKey) {
        self.scheduler.cancel(key);
    }

    /// Plans, runs and commits one step. None when there is nothing to run and nothing to tell: the next step then waits
    /// for a launch. A report whose step ran nothing has no rows and the number of the step to come.
    ///
    /// An error is the end of the worker: the device is lost, and no page of it can be trusted.
    pub fn step(&mut self) -> Result<Option<pb::StepReport>, Error> {
        let started = SystemTime::now();
        let mut watch = Stopwatch::start();
        let Turn { endings, preempted, step } = self.scheduler.plan(self.began.elapsed());
        let mut times = StepTimes { plan: watch.lap(), ..StepTimes::default() };
        for key in preempted {
            tracing::debug!(%key, "preempted: it computes everything again once there are pages");
        }
        let mut completions = std::mem::take(&mut self.refused);
        completions.extend(endings.into_iter().map(|ending| self.end(ending)));
        if step.is_none() && completions.is_empty() {
            return Ok(None);
        }
        let number = step.as_ref().map_or(self.scheduler.load().steps, |step| step.number.0);
        let batch_walk = step.as_ref().map_or(0, |step| step.batch_walk.0);
        let mut rows = Vec::new();
        let mut work = None;
        if let Some(step) = step {
            for row in step.rows.iter().filter(|row| row.epoch.0 == 0) {
                self.arrivals.remove(row.key);
            }
            let StepPlan { number, batch_walk, .. } = step;
            let committed = self.run(step, &mut watch, &mut times)?;
            let commits = || committed.iter().map(|(commit, _)| commit);
            work = Some(observe::work(commits(), self.model.declaration(), times, self.max_step_tokens));
            if let Some(observer) = &mut self.observer {
                let load = self.scheduler.load();
                observer.observe(StepRecord {
                    number,
                    batch_walk,
                    rows: commits().map(Into::into).collect(),
                    started,
                    times,
                    kv_pages_used: load.pages_used as u32,
                    kv_pages_total: load.pages_total as u32,
                });
            }
            for (commit, result) in committed {
                rows.extend(report::row(&commit, result));
                completions.extend(commit.ending.map(|ending| self.end(ending)));
            }
        }
        let load = Some(self.load());
        Ok(Some(pb::StepReport { step: number, batch_walk, rows, completions, load, work }))
    }

    /// Runs a step and commits what came of it, appending sampled tokens to their sequences.
    fn run(
        &mut self,
        step: StepPlan,
        watch: &mut Stopwatch,
        times: &mut StepTimes,
    ) -> Result<Vec<(RowCommit, RowResult)>, Error> {
        let mut rows = Vec::with_capacity(step.rows.len());
        for row in &step.rows {
            let Some(sequence) = self.sequences.get(&row.key) else {
                return Err(Error::internal(format!("{} is in step {}, but not here", row.key, step.number)));
            };
            rows.push((row, sequence));
        }
        let results = match self.batch.run(&mut *self.model, &rows) {
            Ok(results) => results.into_iter().map(Ok).collect(),
            Err(error @ DeviceError::Lost(_)) => return Err(Error::internal(error.to_string())),
            Err(error) => {
                tracing::warn!(step = %step.number, rows = rows.len(), %error, "step failed: its rows run apart");
                run_apart(&mut self.batch, &mut *self.model, &rows)?
            }
        };
        times.run = watch.lap();
        let outcome = |result: &Result<RowResult, DeviceError>| match result {
            Ok(RowResult { sampled: Some(sampled), .. }) => RowOutcome::Sampled(sampled.token),
            Ok(_) => RowOutcome::Computed,
            Err(error) => RowOutcome::Failed(error.to_string()),
        };
        let outcomes = results.iter().map(outcome).collect();
        let commits = self.scheduler.commit(step, outcomes, times.run);
        for commit in &commits {
            if let Some(sequence) = self.sequences.get_mut(&commit.row.key) {
                sequence.output.extend(commit.sampled.map(|sampled| sampled.token));
                sequence.told = sequence.told.max(commit.row.positions.end);
            }
        }
        times.commit = watch.lap();
        Ok(commits.into_iter().zip(results.into_iter().map(Result::unwrap_or_default)).collect())
    }

    fn end(&mut self, ending: Ending) -> pb::Completion {
        self.sequences.remove(&ending.key);
        self.arrivals.remove(ending.key);
        report::completion(ending, self.rank)
    }

    /// What is held now.
    pub fn load(&mut self) -> pb::WorkerLoad {
        let oldest = self.arrivals.oldest();
        let lost = self.observer.as_ref().map_or(0, |observer| observer.lost());
        report::load(self.scheduler.load(), oldest, lost)
    }

    /// Whether no request is held and nothing is left to tell.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_empty() && self.refused.is_empty()
    }

    /// Pages that requests can have: all but the null page.
    pub fn kv_pages_total(&self) -> u32 {
        (self.kv.pages - 1) as u32
    }

    /// Bytes of the KV pool, the null page included.
    pub fn kv_bytes(&self) -> u64 {
        self.kv.bytes()
    }

    /// The most tokens, prompt and output together, that a request can have here.
    pub fn max_request_tokens(&self) -> u32 {
        self.kv.tokens().min(self.model.limits().max_context_tokens) as u32
    }

    /// The model that runs.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }
}

/// Runs the rows of a step that failed one by one, so that only those fail that fail alone. Running a row twice writes the
/// same keys and values to the same places.
fn run_apart(
    batch: &mut Batch,
    model: &mut dyn Model,
    rows: &[(&Row, &Sequence)],
) -> Result<Vec<Result<RowResult, DeviceError>>, Error> {
    let mut results = Vec::with_capacity(rows.len());
    for row in rows {
        results.push(match batch.run(model, std::slice::from_ref(row)) {
            Ok(mut alone) => Ok(alone.pop().unwrap_or_default()),
            Err(error @ DeviceError::Lost(_)) => return Err(Error::internal(error.to_string())),
            Err(error) => {
                tracing::error!(key = %row.0.key, %error, "the request fails alone");
                Err(error)
            }
        });
    }
    Ok(results)
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
