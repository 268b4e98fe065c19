//! The engine on one thread: plans steps, runs them on the device, commits them and reports them.

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::{Duration, Instant},
};

use tutti_models::Model;
use tutti_proto::{GraphKey, Rank, cluster::v1 as pb};
use tutti_runtime::Error;
use tutti_scheduler::{ConfigError, Scheduler, SchedulerConfig};
use tutti_settings::Chunking;

use crate::{
    EngineSettings, ReadVocabulary, StepObserver,
    batch::{Batch, BatchLimits},
    engine_core::EngineCore,
    kv::KvSize,
    overlap::{self, DeviceLoop, EngineHandle},
    padding, report,
    reporter::Reporter,
    runner::Runner,
    spec::{self, ServedModel},
    warm_up,
};

/// Runs one worker's requests on its model. The crate's documentation describes the parts.
pub struct Engine {
    kv: KvSize,
    began: Instant,
    core: EngineCore,
    runner: Runner,
    reporter: Reporter,
}

impl Engine {
    /// Creates an engine, and sizes and allocates its KV pool. Besides the requests that may run, the engine holds up
    /// to `max_waiting_requests` waiting requests. It refuses any further launch as overload. If no request could run
    /// under a setting, the error names that setting.
    pub fn new(
        mut model: Box<dyn Model>,
        rank: Rank,
        settings: &EngineSettings,
        max_waiting_requests: usize,
    ) -> Result<Self, Error> {
        let limits = model.limits();
        if settings.max_step_tokens > limits.max_step_tokens {
            let (asked, most) = (settings.max_step_tokens, limits.max_step_tokens);
            let message = format!("is {asked}, but the model was loaded for steps of {most} tokens");
            return Err(Error::invalid("max_step_tokens", message));
        }
        settings.check_chunk_shapes()?;
        if settings.max_padded_tokens() > limits.max_step_tokens {
            let (asked, most) = (settings.max_padded_tokens(), limits.max_step_tokens);
            let message =
                format!("has a shape of {asked}, but the model was loaded for steps of {most} tokens");
            return Err(Error::invalid("chunk_shapes", message));
        }
        padding::check_encoder_shapes(settings.encoder_shapes.as_ref(), model.declaration())?;
        let kv = KvSize::choose(&*model, settings)?;
        let config = SchedulerConfig {
            // If `max_running_requests` is not set, the number of slots limits it.
            settings: EngineSettings {
                max_running_requests: settings.max_running_requests.or(Some(kv.running)),
                ..settings.clone()
            },
            max_waiting_requests,
            max_context: limits.max_context_tokens,
            page_tokens: kv.page_tokens,
            pages: kv.pages,
            slots: kv.slots,
            steps_in_flight: limits.steps_in_flight,
        };
        let scheduler = Scheduler::new(config, model.declaration()).map_err(|error| match error {
            ConfigError::Invalid(refused) => refused.into(),
            // The other errors are bugs, because the pool was sized above and the declaration comes from the model.
            error => Error::internal(error.to_string()),
        })?;
        model
            .allocate_planes(kv.pages, kv.slots)
            .map_err(|e| Error::invalid("kv_cache_memory", format!("cannot allocate the KV pool: {e}")))?;
        let began = Instant::now();
        let declaration = model.declaration();
        let batch_limits = BatchLimits {
            max_tokens: settings.max_step_tokens,
            row_tokens: forward_tokens(settings),
            page_tokens: kv.page_tokens,
            shapes: settings.chunk_shapes.clone(),
            encoder_shapes: settings.encoder_shapes.clone(),
        };
        let batch = Batch::new(batch_limits, declaration);
        let reporter = Reporter {
            rank,
            declaration: model.declaration().clone(),
            max_step_tokens: settings.max_step_tokens,
            observer: None,
        };
        let mut core = EngineCore::new(rank, scheduler, began, settings);
        if model.declaration().has_slots() {
            core.masks.await_all();
        }
        let runner = Runner::new(model, batch, settings.encoder_cache_memory.bytes());
        Ok(Self { kv, began, core, runner, reporter })
    }

    /// Runs one small step, or one of each fixed shape, before the first request, so that no request waits for weights
    /// to be read or for a shape to be compiled.
    pub fn warm_up(&mut self) -> Result<(), Error> {
        let Runner { model, batch, .. } = &mut self.runner;
        warm_up::run(&mut **model, batch.limits())
            // The warm-up's tokens are all equal and choose the same experts. The counts are reset, so that they do not
            // distort the experts' loads.
            .and_then(|()| model.restart_expert_loads())
            .map_err(|e| Error::internal(format!("warm-up failed: {e}")))
    }

    /// Sets the observer of all steps from the next one on.
    pub fn set_observer(&mut self, observer: Box<dyn StepObserver>) {
        self.reporter.observer = Some(observer);
    }

    /// Makes the engine count in `forwards` the forward passes that have returned. Another thread can watch the count.
    /// It also rises within a step whose long prefill runs as several forward passes.
    pub fn count_forwards(&mut self, forwards: Arc<AtomicU64>) {
        self.runner.forwards = forwards;
    }

    /// Lets requests follow constraints. `vocabulary` reads the model's vocabulary, on a thread of its own, when
    /// the first such request comes. Without a vocabulary, such requests are refused.
    pub fn set_vocabulary(&mut self, vocabulary: ReadVocabulary) {
        self.core.masks.set_vocabulary(vocabulary);
    }

    /// Sets the time for which a step waits for the masks of its rows behind its forward, for tests of late masks.
    pub fn set_mask_grace(&mut self, grace: Duration) {
        self.runner.batch.grace = grace;
    }

    /// Accepts a graph. A graph that cannot run gets a refused completion in the next report, so that every launch has
    /// exactly one ending.
    pub fn launch(&mut self, graph: pb::LaunchGraph) {
        let Some(key) = spec::key(&graph) else { return };
        let model =
            ServedModel { limits: self.runner.model.limits(), declaration: &self.reporter.declaration };
        let parsed = spec::parse(key, graph, model, self.began.elapsed());
        self.core.launch(key, parsed);
    }

    /// Cancels a graph in any state. A graph that is not launched yet is cancelled at its launch. The next report
    /// carries the graph's completion. The call has no effect on a graph that has ended.
    pub fn cancel(&mut self, key: GraphKey) {
        self.core.cancel(key);
    }

    /// Plans and enqueues steps until the device holds as many as it can, then waits for the oldest step and commits
    /// it. If nothing can run until a mask is ready, waits for the mask. Returns `None` if nothing ran and there is
    /// nothing to report; the caller then waits for a launch. If nothing ran but there is something to report, the
    /// report has no rows and the number of the next step.
    ///
    /// Requests that are divided between workers need two threads: see [`split`](Self::split).
    ///
    /// After an error the worker must end, because the device is lost and none of its pages can be trusted.
    pub fn step(&mut self) -> Result<Option<pb::StepReport>, Error> {
        let mut completions = Vec::new();
        let collected = loop {
            while self.runner.has_room() {
                let planned = self.core.plan(&mut self.runner.sequences)?;
                completions.extend(planned.completions);
                let Some(job) = planned.job else { break };
                self.runner.enqueue(job)?;
            }
            let collected = self.runner.collect()?;
            if collected.is_some() || !completions.is_empty() || !self.core.masks.are_awaited() {
                break collected;
            }
            self.core.masks.wait();
        };
        let step = collected.map(|collected| self.core.commit(collected, &mut self.runner.sequences));
        self.runner.finish_logits()?;
        let output = self.core.output(step, completions);
        Ok(output.map(|output| self.reporter.report(output)))
    }

    /// Splits the engine into two halves for two threads: one half runs the device, the other takes commands and makes
    /// reports.
    pub fn split(self) -> (DeviceLoop, EngineHandle) {
        let Self { began, core, runner, reporter, .. } = self;
        overlap::split(core, runner, reporter, began)
    }

    /// Returns the current load.
    pub fn load(&mut self) -> pb::WorkerLoad {
        let (load, oldest) = self.core.load();
        report::load(load, oldest, self.core.masks.counts(), self.core.encoders, self.reporter.lost())
    }

    /// True if the engine holds no request and has reported all completions.
    pub fn is_idle(&self) -> bool {
        self.core.is_idle()
    }

    /// Number of pages that requests can hold: all but the null page.
    pub fn kv_pages_total(&self) -> u32 {
        if self.model().has_thinker() { (self.kv.pages - 1) as u32 } else { 0 }
    }

    /// Maximum number of requests that run at a time: the setting, or the number of slots for running requests.
    pub fn running_limit(&self) -> u32 {
        u32::try_from(self.kv.running).unwrap_or(u32::MAX)
    }

    /// Size of the KV pool in bytes, the null page included.
    pub fn kv_bytes(&self) -> u64 {
        self.kv.bytes()
    }

    /// Largest number of tokens, prompt and output together, that a request can have.
    pub fn max_request_tokens(&self) -> u32 {
        let context = self.model().limits().max_context_tokens;
        // Pages do not limit a model without a KV cache.
        (if self.model().has_thinker() { self.kv.tokens().min(context) } else { context }) as u32
    }

    /// The model that this engine runs.
    pub fn model(&self) -> &dyn Model {
        &*self.runner.model
    }
}

/// Maximum number of tokens that one forward computes for one row.
fn forward_tokens(settings: &EngineSettings) -> usize {
    match settings.chunking {
        Chunking::Scheduler | Chunking::Off => settings.max_step_tokens,
        Chunking::Engine => {
            settings.max_prefill_chunk_size.unwrap_or(usize::MAX).min(settings.max_step_tokens)
        }
    }
}
