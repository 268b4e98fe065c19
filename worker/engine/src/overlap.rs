//! An engine on two threads. While the device runs a step, the handle's thread takes launches and cancels, reports the
//! previous step, and prepares the next step.
//!
//! ```text
//! device's thread │ turn │     run step n      │ turn │    run step n+1     │
//!                        ╲                            ╲
//! handle's thread         report n-1, prepare n+1      report n, prepare n+2     and launches and cancels as they come
//! ```
//!
//! The device's thread takes its turn between two steps: it commits the step that has run and plans the next step
//! itself, so that no step waits for another thread to wake up. A device that holds several steps in flight computes
//! during the turn. In this case, a turn commits step n and plans step n+2 while step n+1 runs.
//!
//! Both threads share the [`EngineCore`] under one lock. The lock is never held while a step runs, a launch is parsed,
//! or a report is sent.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

use tutti_kernels::collective::GroupRank;
use tutti_models::{IdleModel, Limits, PageLayout};
use tutti_proto::{
    GraphKey,
    cluster::v1 as pb,
    declaration::{ModelDeclaration, WalkId},
};
use tutti_runtime::Error;
use tutti_transfer::{Connector, UnitKind, Units};

use crate::{
    engine_core::{EngineCore, Job, StepOutput},
    reporter::Reporter,
    runner::{CollectedStep, Runner},
    spec::{self, ServedModel},
    transfer::{CopyHints, CopyHook, PageCopies},
};

/// Minimum duration of a step during which the next step is prepared. During shorter steps, the two threads would only
/// delay each other (`cargo bench -p tutti-engine --bench overlap`).
const MIN_STEP_TO_PLAN_AHEAD: Duration = Duration::from_millis(1);

/// State that both threads share.
pub(crate) struct Shared {
    state: Mutex<State>,
    pub hints: CopyHints,
    /// Signalled when `State::notified` or `State::closed` is set.
    changed: Condvar,
}

pub(crate) struct State {
    pub core: EngineCore,
    /// Set when the device's thread may have something to do.
    notified: bool,
    /// Set when the [`EngineHandle`] is dropped.
    closed: bool,
    /// Number of outputs that [`DeviceLoop::turn`] has returned but that are not reported yet.
    pending_outputs: usize,
}

impl Shared {
    /// Locks the state. A poisoned lock is ignored, because the panic that poisoned it is about to end the process.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        state.notified = true;
        drop(state);
        self.hints.due.store(true, Ordering::Release);
        self.changed.notify_one();
    }
}

/// The device's half of an engine. Its thread repeats [`turn`](Self::turn) and [`run`](Self::run), and calls
/// [`wait`](Self::wait) when `run` had nothing to do.
pub struct DeviceLoop {
    shared: Arc<Shared>,
    runner: Runner,
    /// The step that the last turn planned.
    planned: Option<Job>,
    /// The step that the next turn commits.
    collected: Option<CollectedStep>,
    /// Page copies to run before the planned step.
    copies: PageCopies,
}

impl DeviceLoop {
    /// Commits the step that was collected and plans the next step, unless logits wait for other steps' commits, too.
    /// The caller passes the outputs to [`EngineHandle::report`] in the order in which they were returned.
    pub fn turn(&mut self) -> Result<Option<StepOutput>, Error> {
        let mut state = self.shared.lock();
        let State { core, notified, pending_outputs, .. } = &mut *state;
        *notified = false;
        let collected = self.collected.take();
        let step = collected.map(|collected| core.commit(collected, &mut self.runner.sequences));
        let mut completions = Vec::new();
        if self.runner.finishes_logits() {
            let planned = core.plan(&mut self.runner.sequences)?;
            (self.planned, self.copies) = (planned.job, planned.copies);
            completions = planned.completions;
        }
        let has_transfers = core.has_transfers();
        let output = core.output(step, completions);
        *pending_outputs += usize::from(output.is_some());
        // Page copies beyond the first batch run in the step's pauses. The hints say in advance whether there may be
        // such copies.
        self.shared.hints.due.store(has_transfers, Ordering::Release);
        self.shared.hints.expected.store(has_transfers, Ordering::Relaxed);
        Ok(output)
    }

    /// Enqueues pending logits, runs the page copies and enqueues the step that the last turn planned. Then waits for
    /// the oldest step in flight, unless the device has room for another step. Returns false if there was nothing to
    /// do.
    ///
    /// After an error the worker must end, because the device is lost and none of its pages can be trusted.
    pub fn run(&mut self) -> Result<bool, Error> {
        // The last turn has committed the step that they wait for.
        self.runner.finish_logits()?;
        let mut copies = std::mem::take(&mut self.copies);
        let copied = !copies.is_empty();
        if copied {
            copies
                .run(&mut IdleModel(&mut *self.runner.model))
                .map_err(|e| Error::internal(e.to_string()))?;
            self.shared.lock().core.finish_copies(copies);
            // A pause of the pending logits may have cleared the hint.
            self.shared.hints.due.store(true, Ordering::Release);
        }
        if let Some(job) = self.planned.take() {
            self.runner.enqueue(job)?;
            if self.runner.has_room() {
                // The device has room, so another step is planned before the host waits.
                return Ok(true);
            }
        }
        self.collected = self.runner.collect()?;
        Ok(copied || self.collected.is_some())
    }

    /// Blocks until there may be something to do or a request's deadline passes. Returns false once the
    /// [`EngineHandle`] is dropped.
    pub fn wait(&self) -> bool {
        let idle = |state: &mut State| !state.notified && !state.closed;
        let state = self.shared.lock();
        let state = match state.core.until_next_deadline() {
            None => self.shared.changed.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner),
            Some(left) => {
                let waited = self.shared.changed.wait_timeout_while(state, left, idle);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        !state.closed
    }
}

/// Wakes the device's thread. The default waker has no effect, and no waker has an effect once the engine is dropped.
/// The methods of a [`Connector`] must not call [`wake`](Self::wake), because the engine calls these methods while it
/// holds its lock, and `wake` takes the same lock.
#[derive(Clone, Default)]
pub struct Waker(Weak<Shared>);

impl Waker {
    /// Wakes the device's thread.
    pub fn wake(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.update(|_| {});
        }
    }
}

/// The handle's half of an engine: takes commands and makes reports. Dropping the handle ends the [`DeviceLoop`] after
/// the current step.
pub struct EngineHandle {
    shared: Arc<Shared>,
    limits: Limits,
    layout: PageLayout,
    units: Units,
    began: Instant,
    reporter: Reporter,
    /// Run time of the step that was reported last.
    last_run: Duration,
}

impl EngineHandle {
    /// Same as [`Engine::launch`](crate::Engine::launch); may be called while a step runs.
    pub fn launch(&mut self, graph: pb::LaunchGraph) {
        let Some(key) = spec::key(&graph) else { return };
        let model = ServedModel { limits: &self.limits, declaration: &self.reporter.declaration };
        let parsed = spec::parse(key, graph, model, self.began.elapsed());
        self.shared.update(|state| state.core.launch(key, parsed));
    }

    /// Same as [`Engine::cancel`](crate::Engine::cancel); may be called while a step runs.
    pub fn cancel(&mut self, key: GraphKey) {
        self.shared.update(|state| state.core.cancel(key));
    }

    /// Allows requests to be divided between this engine and others. `connector` moves the pages and embeddings of
    /// these requests.
    pub fn connect(&mut self, connector: Box<dyn Connector>) {
        self.shared.lock().core.connect(connector, &self.layout, self.units.clone());
    }

    /// The model's declaration.
    pub fn declaration(&self) -> &ModelDeclaration {
        &self.reporter.declaration
    }

    /// Returns the kind and the number of the units that a graph with `send_to` sends: pages of its prefill, or units
    /// of embeddings.
    pub fn units_to_send(&self, graph: &pb::LaunchGraph) -> (UnitKind, usize) {
        let Some(spec) = &graph.spec else { return (UnitKind::Pages, 0) };
        if graph.walks.iter().any(|walk| self.reporter.declaration.encodes(WalkId(*walk))) {
            let declaration = &self.reporter.declaration;
            return (UnitKind::Embeddings, spec.media.iter().map(|item| declaration.units_of(item)).sum());
        }
        let tokens = spec.prompt.len() + graph.generated.len();
        (UnitKind::Pages, tokens.div_ceil(self.layout.page_tokens.max(1)))
    }

    /// Returns a waker for this engine's device thread.
    pub fn waker(&self) -> Waker {
        Waker(Arc::downgrade(&self.shared))
    }

    /// Layouts of the units that this engine exchanges with others.
    pub fn units(&self) -> &Units {
        &self.units
    }

    /// Converts an output into the report for the conductor.
    pub fn report(&mut self, output: StepOutput) -> pb::StepReport {
        self.last_run = output.step.as_ref().map_or(Duration::ZERO, |step| step.times.run);
        let report = self.reporter.report(output);
        self.shared.lock().pending_outputs -= 1;
        report
    }

    /// Prepares the next step while a step runs, if the last reported step took at least `MIN_STEP_TO_PLAN_AHEAD`.
    pub fn plan_ahead(&mut self) {
        if self.last_run < MIN_STEP_TO_PLAN_AHEAD {
            return;
        }
        self.shared.lock().core.plan_ahead();
    }

    /// True if the engine holds no request and all outputs are reported.
    pub fn is_idle(&self) -> bool {
        let state = self.shared.lock();
        state.core.is_idle() && state.pending_outputs == 0
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.shared.update(|state| state.closed = true);
    }
}

pub(crate) fn split(
    core: EngineCore,
    runner: Runner,
    reporter: Reporter,
    began: Instant,
) -> (DeviceLoop, EngineHandle) {
    let (limits, layout) = (runner.model.limits().clone(), runner.model.page_layout());
    let state = Mutex::new(State { core, notified: false, closed: false, pending_outputs: 0 });
    let shared = Arc::new(Shared { state, hints: CopyHints::default(), changed: Condvar::new() });
    let mut runner = runner;
    let group_rank = runner.model.group_shares().map_or(GroupRank::ALONE, |shares| shares.group_rank());
    let units = Units::new(&layout, group_rank, reporter.declaration.embedding_unit());
    runner.model.set_step_hook(Box::new(CopyHook::new(Arc::clone(&shared))));
    shared.lock().core.masks.set_waker(Waker(Arc::downgrade(&shared)));
    let device_loop = DeviceLoop {
        shared: Arc::clone(&shared),
        runner,
        planned: None,
        collected: None,
        copies: PageCopies::default(),
    };
    (device_loop, EngineHandle { shared, limits, layout, units, began, reporter, last_run: Duration::ZERO })
}
