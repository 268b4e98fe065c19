//! The threads that compile constraints and make masks.
//!
//! The commit of a token and the mask of the next one are one job. So is the first mask of a constraint. A replay has a
//! job for each part of its tokens. The jobs of a request that ends are dropped.

use std::{
    collections::HashSet,
    io,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use tutti_constraints::{BaseMatchers, Canonical, Cause, ConstraintError, Environment, Matcher, Progress};
use tutti_proto::GraphKey;
use tutti_scheduler::{ConstraintFailure, FailureCause};

use super::{
    deadline::{Lane, Watch},
    environments::{Environments, ReadVocabulary},
    guide::{Guide, Next},
    memory::MatcherMemory,
    queues::{Job, Queues, Replay, Takes, Work},
};
use crate::Waker;

/// The threads.
const THREADS: [Takes; 3] = [Takes::Quick, Takes::Overdue, Takes::All];
/// Time after which a part of a replay ends.
const REPLAY_TIME: Duration = Duration::from_millis(5);
/// Number of tokens of a replay between two looks at the time.
const REPLAYED_AT_ONCE: usize = 16;
/// Maximum number of tokens of a part of a replay.
const REPLAYED_IN_A_PART: usize = 256;
/// Maximum size in bytes of the compiled constraints that one thread keeps.
const CACHE_BYTES: usize = 128 << 20;
/// Maximum size in bytes of the states of all matchers, about.
const MATCHER_BYTES: usize = 512 << 20;
/// Maximum number of constraints that are remembered as compiled.
const MAX_COMPILED: usize = 1024;
/// The pool. Its threads end soon after it is dropped: a compilation cannot be stopped.
pub(super) struct MaskPool {
    shared: Arc<Shared>,
    watch: Watch,
}

struct Shared {
    queues: Mutex<Queues>,
    /// Signalled when a job is queued or the pool is closed.
    queued: Condvar,
    /// Constraints that have been compiled. Some of them may have left the cache, so they only come earlier.
    compiled: Mutex<HashSet<Canonical>>,
    events: Mutex<Vec<GraphKey>>,
    /// Signalled when an event is added.
    happened: Condvar,
    waker: Mutex<Waker>,
    environments: Environments,
    memory: Arc<MatcherMemory>,
    counts: Counters,
}

#[derive(Default)]
struct Counters {
    compilations: AtomicU64,
    compile_us: AtomicU64,
    cache_hits: AtomicU64,
    masks: AtomicU64,
    mask_us: AtomicU64,
    failures: AtomicU64,
}

/// Counts of a pool since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PoolCounts {
    /// Constraints that were compiled, and the time that this took.
    pub compilations: u64,
    pub compile_us: u64,
    /// Constraints that had been compiled before.
    pub cache_hits: u64,
    /// Masks that were made, and the time that this took, with the commits of tokens.
    pub masks: u64,
    pub mask_us: u64,
    /// Requests whose constraint could not be followed.
    pub failures: u64,
}

impl MaskPool {
    /// Starts the threads. The first job reads the vocabulary.
    pub fn start(vocabulary: ReadVocabulary, waker: Waker) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queues: Mutex::default(),
            queued: Condvar::new(),
            compiled: Mutex::default(),
            events: Mutex::default(),
            happened: Condvar::new(),
            waker: Mutex::new(waker),
            environments: Environments::new(vocabulary),
            memory: Arc::new(MatcherMemory::start(MATCHER_BYTES)?),
            counts: Counters::default(),
        });
        let watch = Watch::start()?;
        for takes in THREADS {
            let (shared, lane) = (Arc::clone(&shared), watch.lane());
            let thread = thread::Builder::new().name("masks".into());
            thread.spawn(move || Worker::new(&shared, lane).run(takes))?;
        }
        Ok(Self { shared, watch })
    }

    /// Sets the waker of the thread that waits for events.
    pub fn set_waker(&self, waker: Waker) {
        *lock(&self.shared.waker) = waker;
    }

    /// Queues jobs. A guide has at most one job at a time.
    pub fn push(&self, jobs: impl IntoIterator<Item = Job>) {
        let mut queues = lock(&self.shared.queues);
        jobs.into_iter().for_each(|job| queues.push(job, |guide| self.shared.has_compiled(guide)));
        drop(queues);
        self.shared.queued.notify_all();
    }

    /// Drops the queued job of a request that has ended. Otherwise requests that are cancelled at once could queue
    /// compilations without end.
    pub fn forget(&self, key: GraphKey) {
        // The guide is dropped without the lock.
        let dropped = lock(&self.shared.queues).remove(key);
        drop(dropped);
    }

    /// Takes the requests for whose masks the engine waits no longer.
    pub fn take_events(&self) -> Vec<GraphKey> {
        std::mem::take(&mut *lock(&self.shared.events))
    }

    /// Blocks until there is an event.
    pub fn wait_for_event(&self) {
        let events = lock(&self.shared.events);
        drop(self.shared.happened.wait_while(events, |events| events.is_empty()));
    }

    pub fn counts(&self) -> PoolCounts {
        let Counters { compilations, compile_us, cache_hits, masks, mask_us, failures } = &self.shared.counts;
        PoolCounts {
            compilations: compilations.load(Relaxed),
            compile_us: compile_us.load(Relaxed),
            cache_hits: cache_hits.load(Relaxed),
            masks: masks.load(Relaxed),
            mask_us: mask_us.load(Relaxed),
            failures: failures.load(Relaxed),
        }
    }
}

impl Drop for MaskPool {
    fn drop(&mut self) {
        lock(&self.shared.queues).is_closed = true;
        self.shared.queued.notify_all();
        self.watch.cancel_all();
    }
}

/// One thread of the pool.
struct Worker<'a> {
    shared: &'a Shared,
    lane: Lane,
    /// Compiled constraints, for each environment.
    bases: Vec<(Arc<Environment>, BaseMatchers)>,
}

impl<'a> Worker<'a> {
    fn new(shared: &'a Shared, lane: Lane) -> Self {
        Self { shared, lane, bases: Vec::new() }
    }

    fn run(mut self, takes: Takes) {
        while let Some(Job { guide, work, .. }) = self.shared.next_job(takes) {
            let began = Instant::now();
            let mut matcher = guide.take_matcher();
            let is_advance = matches!(work, Work::Advance(_));
            // A panic ends one request, and not the thread that all others wait for.
            let done = panic::catch_unwind(AssertUnwindSafe(|| match work {
                Work::Open(generated) => self.open(&guide, generated, &mut matcher),
                Work::Replay(replay) => self.replay(&guide, replay, &mut matcher),
                Work::Advance(token) => self.advance(&guide, token, &mut matcher).map(Done::Next),
            }));
            let done = done.unwrap_or_else(|_| {
                self.bases.clear();
                Err(of_worker("a thread for masks panicked"))
            });
            let next = match done {
                Ok(Done::Paused(replay)) => {
                    guide.give_back(matcher);
                    self.shared.go_on(guide, replay);
                    continue;
                }
                Ok(Done::Next(next)) => next,
                Err(failure) => {
                    matcher = None;
                    self.shared.counts.failures.fetch_add(1, Relaxed);
                    Next::Failed(failure)
                }
            };
            // Compilations and replays say nothing about the time of the next mask.
            let took = if is_advance { began.elapsed() } else { Duration::ZERO };
            if guide.finish_work(matcher, next, took) {
                self.shared.tell(guide.key());
            }
        }
    }

    /// Compiles a constraint, and begins the replay of the output of earlier incarnations.
    fn open(
        &mut self,
        guide: &Guide,
        generated: Vec<u32>,
        matcher: &mut Option<Matcher>,
    ) -> Result<Done, ConstraintFailure> {
        let Some(constraint) = guide.constraint() else { return Err(of_worker("it has no constraint")) };
        let environment = self.shared.environments.of(&guide.special()).map_err(of_worker)?;
        let began = Instant::now();
        let bases = self.bases(&environment);
        let before = bases.counts();
        let opened = match generated.len() {
            0 => bases.matcher(&environment, constraint),
            tokens => bases.before_replay(&environment, constraint, tokens),
        };
        let after = bases.counts();
        let counts = &self.shared.counts;
        counts.cache_hits.fetch_add(after.hits - before.hits, Relaxed);
        if after.compilations > before.compilations {
            counts.compilations.fetch_add(1, Relaxed);
            counts.compile_us.fetch_add(began.elapsed().as_micros() as u64, Relaxed);
        }
        let opened = matcher.insert(opened.map_err(of_constraint)?);
        self.shared.has_now_compiled(guide);
        match generated.is_empty() {
            true => self.shared.next(guide, opened, Progress::Continues).map(Done::Next),
            // Counted before its first part, so that the matchers of many replays cannot exceed the limit unseen.
            false => {
                guide.count_bytes(opened, &self.shared.memory)?;
                Ok(Done::Paused(Replay { tokens: generated, done: 0 }))
            }
        }
    }

    /// Advances by a part of the output of earlier incarnations. A mask ends each part. Otherwise the mask behind the
    /// last token would visit all the lexer's states that the masks between the tokens visited before.
    fn replay(
        &mut self,
        guide: &Guide,
        Replay { tokens, mut done }: Replay,
        matcher: &mut Option<Matcher>,
    ) -> Result<Done, ConstraintFailure> {
        let Some(matcher) = matcher else { return Err(of_worker("it has no matcher")) };
        let (began, first) = (Instant::now(), done);
        let mut progress = Progress::Continues;
        let is_within = |done: usize| done - first < REPLAYED_IN_A_PART && began.elapsed() < REPLAY_TIME;
        while done < tokens.len() && (done == first || is_within(done)) {
            let end = tokens.len().min(done + REPLAYED_AT_ONCE);
            progress = matcher.advance(&tokens[done..end]).map_err(of_replay)?;
            done = end;
        }
        let next = self.shared.next(guide, matcher, progress);
        // Masks between tokens that were generated already have been made before.
        let is_last = done == tokens.len();
        let next = next.map_err(|failure| if is_last { failure } else { of_repetition(failure) })?;
        Ok(if is_last { Done::Next(next) } else { Done::Paused(Replay { tokens, done }) })
    }

    fn advance(
        &mut self,
        guide: &Guide,
        token: u32,
        matcher: &mut Option<Matcher>,
    ) -> Result<Next, ConstraintFailure> {
        let Some(matcher) = matcher else { return Err(of_worker("it has no matcher")) };
        let (began, shared) = (Instant::now(), self.shared);
        let watched = self.lane.watch(matcher.canceller());
        let next = matcher.commit(token).map_err(of_constraint);
        let next = next.and_then(|progress| shared.next(guide, matcher, progress));
        drop(watched);
        shared.counts.masks.fetch_add(1, Relaxed);
        shared.counts.mask_us.fetch_add(began.elapsed().as_micros() as u64, Relaxed);
        next
    }

    /// The compiled constraints of an environment. Those of environments that are no longer used are dropped.
    fn bases(&mut self, environment: &Arc<Environment>) -> &mut BaseMatchers {
        let is_used =
            |(environment, _): &(Arc<Environment>, BaseMatchers)| Arc::strong_count(environment) > 1;
        self.bases.retain(is_used);
        let known = self.bases.iter().position(|(other, _)| Arc::ptr_eq(other, environment));
        let index = known.unwrap_or_else(|| {
            self.bases.push((Arc::clone(environment), BaseMatchers::new(CACHE_BYTES)));
            self.bases.len() - 1
        });
        &mut self.bases[index].1
    }
}

impl Shared {
    /// Waits for the next job. `None` once the pool is closed.
    fn next_job(&self, takes: Takes) -> Option<Job> {
        let mut queues = lock(&self.queues);
        loop {
            if queues.is_closed {
                return None;
            }
            queues = match queues.take(takes, Instant::now()) {
                Ok(job) => return Some(job),
                Err(None) => self.queued.wait(queues).unwrap_or_else(PoisonError::into_inner),
                Err(Some(left)) => {
                    self.queued.wait_timeout(queues, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Queues the next part of a replay, unless its request has ended.
    fn go_on(&self, guide: Guide, replay: Replay) {
        let mut queues = lock(&self.queues);
        // A request that ends from here on removes its job.
        if guide.has_ended() {
            return;
        }
        queues.push(Job::new(guide, Work::Replay(replay)), |_| true);
        drop(queues);
        self.queued.notify_all();
    }

    fn has_compiled(&self, guide: &Guide) -> bool {
        guide.canonical().is_some_and(|canonical| lock(&self.compiled).contains(canonical))
    }

    fn has_now_compiled(&self, guide: &Guide) {
        let mut compiled = lock(&self.compiled);
        if compiled.len() == MAX_COMPILED {
            compiled.clear();
        }
        compiled.extend(guide.canonical().cloned());
    }

    /// Makes the next mask.
    fn next(
        &self,
        guide: &Guide,
        matcher: &mut Matcher,
        progress: Progress,
    ) -> Result<Next, ConstraintFailure> {
        if progress == Progress::Finished {
            return Ok(Next::Complete);
        }
        let next = guide.next_of(matcher).map_err(of_constraint)?;
        guide.count_bytes(matcher, &self.memory)?;
        Ok(next)
    }

    /// Tells the engine that a mask is no longer pending.
    fn tell(&self, key: GraphKey) {
        lock(&self.events).push(key);
        self.happened.notify_all();
        let waker = lock(&self.waker).clone();
        waker.wake();
    }
}

/// The result of a job.
enum Done {
    /// The replay goes on behind other jobs.
    Paused(Replay),
    Next(Next),
}

/// The failure behind an error of a constraint.
fn of_constraint(error: ConstraintError) -> ConstraintFailure {
    let cause = match error.cause {
        Cause::Constraint => FailureCause::Constraint,
        Cause::Process => FailureCause::Worker,
    };
    ConstraintFailure { cause, why: error.to_string() }
}

/// The failure of a replay: the first matcher has followed the same tokens.
fn of_replay(error: ConstraintError) -> ConstraintFailure {
    of_worker(error.to_string())
}

/// The failure of a mask that has been made before.
fn of_repetition(failure: ConstraintFailure) -> ConstraintFailure {
    match failure.cause {
        FailureCause::Constraint => of_worker(failure.why),
        FailureCause::Memory | FailureCause::Worker => failure,
    }
}

/// A failure that no constraint causes.
fn of_worker(why: impl Into<String>) -> ConstraintFailure {
    ConstraintFailure { cause: FailureCause::Worker, why: why.into() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
