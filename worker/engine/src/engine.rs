//! The engine: a desk that decides, a device that computes, and reports of what came of it.

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Instant,
};

use tutti_models::Model;
use tutti_proto::{GraphKey, Rank, cluster::v1 as pb};
use tutti_runtime::Error;
use tutti_scheduler::{self as scheduler, ConfigError, Scheduler, SchedulerConfig};

use crate::{
    Chunking, EngineSettings, StepObserver,
    batch::Batch,
    engine_core::{EngineCore, Planned},
    kv::KvSize,
    observe::Stopwatch,
    overlap::{self, EngineHandle, DeviceLoop},
    report,
    reporter::Reporter,
    runner::Runner,
    spec::{self, ServedModel},
    warm_up,
};

/// See the crate's own page.
pub struct Engine {
    kv: KvSize,
    began: Instant,
    core: EngineCore,
    runner: Runner,
    reporter: Reporter,
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
        let began = Instant::now();
        let batch = Batch::new(settings.max_step_tokens, settings.forward_tokens(), kv.page_tokens);
        let reporter = Reporter {
            rank,
            declaration: model.declaration().clone(),
            max_step_tokens: settings.max_step_tokens,
            observer: None,
        };
        Ok(Self {
            kv,
            began,
            core: EngineCore::new(rank, scheduler, began),
            runner: Runner { model, batch },
            reporter,
        })
    }

    /// Runs one small step before any request does, so that none waits for weights to be read.
    pub fn warm_up(&mut self) -> Result<(), Error> {
        warm_up::run(&mut *self.runner.model, self.reporter.max_step_tokens, self.kv.page_tokens)
            .map_err(|e| Error::internal(format!("warm-up failed: {e}")))
    }

    /// From the next step on, `observer` is told of each.
    pub fn set_observer(&mut self, observer: Box<dyn StepObserver>) {
        self.reporter.observer = Some(observer);
    }

    /// From now on, the forwards that have come back are counted there, for whoever watches from another thread. The count
    /// moves inside a step too, where one of its prefills is run as many.
    pub fn count_forwards(&mut self, forwards: Arc<AtomicU64>) {
        self.runner.batch.forwards = forwards;
    }

    /// Takes a graph. What cannot be run is told by a refused completion in the next report: each launch has one ending,
    /// here as elsewhere.
    pub fn launch(&mut self, graph: pb::LaunchGraph) {
        let Some(key) = spec::key(&graph) else { return };
        let model = ServedModel { limits: self.runner.model.limits(), declaration: &self.reporter.declaration };
        let parsed = spec::parse(key, graph, model, self.began.elapsed());
        self.core.launch(key, parsed);
    }

    /// Cancels a graph, in whatever state; one that has not been launched yet, as soon as it is. Its completion is in
    /// the next report. For a graph that has ended this does nothing.
    pub fn cancel(&mut self, key: GraphKey) {
        self.core.cancel(key);
    }

    /// Plans, runs and commits one step. Requests that are divided between workers need two threads, as by
    /// [`split`](Self::split). None when there is nothing to run and nothing to tell: the next step then waits
    /// for a launch. A report whose step ran nothing has no rows and the number of the step to come.
    ///
    /// An error is the end of the worker: the device is lost, and no page of it can be trusted.
    pub fn step(&mut self) -> Result<Option<pb::StepReport>, Error> {
        let Planned { completions, copies: _, job } = self.core.plan()?;
        let step = match job {
            Some(job) => {
                let mut watch = Stopwatch::start();
                let results = self.runner.run(&job)?;
                Some(self.core.commit(job, results, watch.lap()))
            }
            None => None,
        };
        let output = self.core.output(step, completions);
        Ok(output.map(|output| self.reporter.report(output)))
    }

    /// Puts the device and everything else on threads of their own, so that one runs while the other works.
    pub fn split(self) -> (DeviceLoop, EngineHandle) {
        let Self { began, core, runner, reporter, .. } = self;
        overlap::split(core, runner, reporter, began)
    }

    /// What is held now.
    pub fn load(&mut self) -> pb::WorkerLoad {
        let (load, oldest) = self.core.load();
        report::load(load, oldest, self.reporter.lost())
    }

    /// Whether no request is held and nothing is left to tell.
    pub fn is_idle(&self) -> bool {
        self.core.is_idle()
    }

    /// Pages that requests can have: all but the null page.
    pub fn kv_pages_total(&self) -> u32 {
        if self.model().thinks() { (self.kv.pages - 1) as u32 } else { 0 }
    }

    /// Bytes of the KV pool, the null page included.
    pub fn kv_bytes(&self) -> u64 {
        self.kv.bytes()
    }

    /// The most tokens, prompt and output together, that a request can have here.
    pub fn max_request_tokens(&self) -> u32 {
        let context = self.model().limits().max_context_tokens;
        // Nothing that has no pages is limited by them.
        (if self.model().thinks() { self.kv.tokens().min(context) } else { context }) as u32
    }

    /// The model that runs.
    pub fn model(&self) -> &dyn Model {
        &*self.runner.model
    }
}
