//! An engine on two threads: while the device runs a step, the desk takes launches and cancels, reports the step before,
//! and prepares the one after.
//!
//! ```text
//! device's thread │ turn │     run step n      │ turn │    run step n+1     │
//!                        ╲                            ╲
//! desk's thread           report n-1, prepare n+1      report n, prepare n+2     and launches and cancels as they come
//! ```
//!
//! The device's own thread takes its turn between two steps: it commits the one that has run, decides on the next, and goes
//! on. So no step waits for a thread to wake up. The two share what they decide on under one lock, which is never held
//! while anything runs, is parsed or is sent.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

use tutti_models::{Limits, PageLayout};
use tutti_proto::{GraphKey, cluster::v1 as pb, declaration::WalkId};
use tutti_runtime::Error;

use crate::{
    beside::{Beside, Hints, Resting},
    courier::{Cargo, Courier},
    desk::{Desk, Job, News, Planned},
    exchange::Errands,
    observe::Stopwatch,
    reporter::Reporter,
    runner::{RowResults, Runner},
    spec::{self, Served},
};

/// Steps shorter than this are over before it pays to prepare the next one beside them: the two threads would only get in
/// each other's way (`cargo bench -p tutti-engine --bench overlap`).
const WORTH_PREPARING: Duration = Duration::from_millis(1);

/// What both threads have.
pub(crate) struct Shared {
    state: Mutex<State>,
    pub hints: Hints,
    /// Signalled with `called` and `closed`.
    call: Condvar,
}

pub(crate) struct State {
    pub desk: Desk,
    /// There may be something to do.
    called: bool,
    /// Nobody is left to work for.
    closed: bool,
    /// News that were handed out and not reported yet.
    untold: usize,
}

impl Shared {
    /// A panic on the other thread ends the process; until then its state is as good as any.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        state.called = true;
        drop(state);
        self.hints.wanted.store(true, Ordering::Release);
        self.call.notify_one();
    }
}

/// The device's half. Its thread repeats [`turn`](Self::turn), [`run`](Self::run), and, where that was nothing,
/// [`wait`](Self::wait).
pub struct Stepper {
    shared: Arc<Shared>,
    runner: Runner,
    stage: Stage,
    /// To be run before the step.
    errands: Errands,
}

/// Where a step is.
enum Stage {
    Nothing,
    Planned(Job),
    Ran { job: Job, results: RowResults, took: Duration },
}

impl Stepper {
    /// Commits the step that has run, and decides on the next. News are for [`FrontDesk::report`], in their order.
    pub fn turn(&mut self) -> Result<Option<News>, Error> {
        let mut state = self.shared.lock();
        let State { desk, called, untold, .. } = &mut *state;
        *called = false;
        let step = match std::mem::replace(&mut self.stage, Stage::Nothing) {
            Stage::Ran { job, results, took } => Some(desk.commit(job, results, took)),
            Stage::Planned(_) | Stage::Nothing => None,
        };
        let Planned { completions, errands, job } = desk.plan()?;
        self.stage = job.map_or(Stage::Nothing, Stage::Planned);
        self.errands = errands;
        let exchanges = desk.exchanges();
        let news = desk.news(step, completions);
        *untold += usize::from(news.is_some());
        // What one piece does not hold is left for the step's pauses.
        self.shared.hints.wanted.store(exchanges, Ordering::Release);
        self.shared.hints.may_come.store(exchanges, Ordering::Relaxed);
        Ok(news)
    }

    /// Runs what the last turn decided on. False if that was nothing.
    ///
    /// An error is the end of the worker: the device is lost, and no page of it can be trusted.
    pub fn run(&mut self) -> Result<bool, Error> {
        let mut errands = std::mem::take(&mut self.errands);
        let carries = !errands.is_empty();
        if carries {
            errands.run(&mut Resting(&mut *self.runner.model)).map_err(|e| Error::internal(e.to_string()))?;
            self.shared.lock().desk.carried(errands);
        }
        let Stage::Planned(job) = std::mem::replace(&mut self.stage, Stage::Nothing) else {
            return Ok(carries);
        };
        let mut watch = Stopwatch::start();
        let results = self.runner.run(&job)?;
        self.stage = Stage::Ran { job, results, took: watch.lap() };
        Ok(true)
    }

    /// Waits for something to do, or until the time of somebody who waits for planes is up. False once the [`FrontDesk`] is
    /// gone.
    pub fn wait(&self) -> bool {
        let idle = |state: &mut State| !state.called && !state.closed;
        let state = self.shared.lock();
        let state = match state.desk.until_next_deadline() {
            None => self.shared.call.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner),
            Some(left) => {
                let waited = self.shared.call.wait_timeout_while(state, left, idle);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        !state.closed
    }
}

/// Tells the device's thread that there may be something to do. Of no effect once its engine is gone; not to be rung from
/// inside a [`Courier`]'s call, which the desk waits for.
#[derive(Clone)]
pub struct Bell(Weak<Shared>);

impl Bell {
    /// See the type.
    pub fn ring(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.call(|_| {});
        }
    }
}

/// Everybody else's half. Dropping it ends the other one, once its step is over.
pub struct FrontDesk {
    shared: Arc<Shared>,
    limits: Limits,
    layout: PageLayout,
    began: Instant,
    reporter: Reporter,
    /// How long the device took for the step that was reported last.
    last_run: Duration,
}

impl FrontDesk {
    /// As [`Engine::launch`](crate::Engine::launch), also while a step runs.
    pub fn launch(&mut self, graph: pb::LaunchGraph) {
        let Some(key) = spec::key(&graph) else { return };
        let model = Served { limits: &self.limits, declaration: &self.reporter.declaration };
        let parsed = spec::parse(key, graph, model, self.began.elapsed());
        self.shared.call(|state| state.desk.launch(key, parsed));
    }

    /// As [`Engine::cancel`](crate::Engine::cancel), also while a step runs.
    pub fn cancel(&mut self, key: GraphKey) {
        self.shared.call(|state| state.desk.cancel(key));
    }

    /// From now on requests may be divided between this engine and others; `courier` carries their planes.
    pub fn connect(&mut self, courier: Box<dyn Courier>) {
        let width = self.embedding_width();
        self.shared.lock().desk.connect(courier, &self.layout, width);
    }

    /// Elements of the embeddings that encoders give; 0 where the model takes text alone.
    pub fn embedding_width(&self) -> usize {
        self.reporter.declaration.media().first().map_or(0, |input| input.width as usize)
    }

    /// What a graph with `send_to` sends, and how much of it in all: pages of its prefill, or rows of embeddings.
    pub fn to_send(&self, graph: &pb::LaunchGraph) -> (Cargo, usize) {
        let Some(spec) = &graph.spec else { return (Cargo::Pages, 0) };
        if graph.walks.iter().any(|walk| self.reporter.declaration.encodes(WalkId(*walk))) {
            return (Cargo::Embeddings, spec.media.iter().map(|item| item.tokens as usize).sum());
        }
        let tokens = spec.prompt.len() + graph.generated.len();
        (Cargo::Pages, tokens.div_ceil(self.layout.page_tokens.max(1)))
    }

    /// For whoever brings something.
    pub fn bell(&self) -> Bell {
        Bell(Arc::downgrade(&self.shared))
    }

    /// How pages travel between this engine and others.
    pub fn page_layout(&self) -> &PageLayout {
        &self.layout
    }

    /// What the conductor is told of it.
    pub fn report(&mut self, news: News) -> pb::StepReport {
        self.last_run = news.step.as_ref().map_or(Duration::ZERO, |step| step.times.run);
        let report = self.reporter.report(news);
        self.shared.lock().untold -= 1;
        report
    }

    /// Prepares the next step while one runs, where steps are long enough for that.
    pub fn plan_ahead(&mut self) {
        if self.last_run < WORTH_PREPARING {
            return;
        }
        self.shared.lock().desk.plan_ahead();
    }

    /// Whether no request is held and nothing is left to tell.
    pub fn is_idle(&self) -> bool {
        let state = self.shared.lock();
        state.desk.is_idle() && state.untold == 0
    }
}

impl Drop for FrontDesk {
    fn drop(&mut self) {
        self.shared.call(|state| state.closed = true);
    }
}

pub(crate) fn split(desk: Desk, runner: Runner, reporter: Reporter, began: Instant) -> (Stepper, FrontDesk) {
    let (limits, layout) = (runner.model.limits().clone(), runner.model.page_layout());
    let state = Mutex::new(State { desk, called: false, closed: false, untold: 0 });
    let shared = Arc::new(Shared { state, hints: Hints::default(), call: Condvar::new() });
    let mut runner = runner;
    runner.model.set_step_hook(Box::new(Beside::new(Arc::clone(&shared))));
    let (stage, errands) = (Stage::Nothing, Errands::default());
    let stepper = Stepper { shared: Arc::clone(&shared), runner, stage, errands };
    (stepper, FrontDesk { shared, limits, layout, began, reporter, last_run: Duration::ZERO })
}
