//! The threads that compile constraints and make masks.
//!
//! The commit of a token and the mask of the next one are one job. There are quick jobs, those of requests whose
//! constraint has been compiled before, and slow ones, which are compilations, replays, and the tokens of a request
//! whose last mask was slow. One thread takes quick jobs only. The other takes the three kinds in turn, so that none
//! waits for ever. The jobs of a request that ends are dropped.

use std::{
    collections::{HashSet, VecDeque},
    io,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use tutti_constraints::{BaseMatchers, Canonical, ConstraintError, Environment, Matcher, Progress};
use tutti_proto::GraphKey;

use super::{
    deadline::{Lane, Watch},
    environments::{Environments, ReadVocabulary},
    guide::{Guide, Next},
    memory::MatcherMemory,
};
use crate::Waker;

/// Number of threads. One of them takes quick jobs only.
const THREADS: usize = 2;
/// Maximum size in bytes of the compiled constraints that one thread keeps.
const CACHE_BYTES: usize = 128 << 20;
/// Maximum size in bytes of the states of all matchers, about.
const MATCHER_BYTES: usize = 512 << 20;
/// Maximum number of constraints that are remembered as compiled.
const MAX_COMPILED: usize = 1024;
/// Duration of a job from which on the next job of the same request is a slow one.
pub(super) const SLOW: Duration = Duration::from_millis(2);

/// Work for one guide.
pub(super) struct Job {
    pub guide: Guide,
    pub work: Work,
}

pub(super) enum Work {
    /// Compile the constraint, and advance by the output of earlier incarnations.
    Open(Vec<u32>),
    /// Advance by one token.
    Advance(u32),
}

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
struct Queues {
    quick: VecDeque<Job>,
    /// Requests whose constraint has been compiled before.
    known: VecDeque<Job>,
    slow: VecDeque<Job>,
    /// Number of jobs that the thread for all kinds has taken.
    taken: usize,
    is_closed: bool,
}

impl Queues {
    /// Takes a job of any kind. Every second one is a quick one, if there is one, and the other kinds alternate.
    fn pop(&mut self) -> Option<Job> {
        let order = match self.taken % 4 {
            0 | 2 => [&mut self.quick, &mut self.known, &mut self.slow],
            1 => [&mut self.known, &mut self.slow, &mut self.quick],
            _ => [&mut self.slow, &mut self.known, &mut self.quick],
        };
        let job = order.into_iter().find_map(VecDeque::pop_front);
        self.taken = self.taken.wrapping_add(usize::from(job.is_some()));
        job
    }
}

/// The jobs that a thread takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Takes {
    Quick,
    All,
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
            memory: Arc::new(MatcherMemory::new(MATCHER_BYTES)),
            counts: Counters::default(),
        });
        let watch = Watch::start()?;
        for index in 0..THREADS {
            let (shared, lane) = (Arc::clone(&shared), watch.lane());
            let takes = if index == 0 { Takes::Quick } else { Takes::All };
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
        for job in jobs {
            let queue = match &job.work {
                Work::Open(generated) if generated.is_empty() && self.shared.has_compiled(&job.guide) => {
                    &mut queues.known
                }
                Work::Advance(_) if !job.guide.took_at_least(SLOW) => &mut queues.quick,
                Work::Open(_) | Work::Advance(_) => &mut queues.slow,
            };
            queue.push_back(job);
        }
        drop(queues);
        self.shared.queued.notify_all();
    }

    /// Drops the queued job of a request that has ended. Otherwise requests that are cancelled at once could queue
    /// compilations without end.
    pub fn forget(&self, key: GraphKey) {
        let mut queues = lock(&self.shared.queues);
        let Queues { quick, known, slow, .. } = &mut *queues;
        let dropped = [quick, known, slow].into_iter().find_map(|queue| {
            let index = queue.iter().position(|job| job.guide.key() == key)?;
            queue.remove(index)
        });
        drop(queues);
        // A large matcher takes long to free, so it is freed without the lock.
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
        while let Some(Job { guide, work }) = self.shared.next_job(takes) {
            let began = Instant::now();
            let mut matcher = guide.take_matcher();
            // A panic ends one request, and not the thread that all others wait for.
            let next = panic::catch_unwind(AssertUnwindSafe(|| match work {
                Work::Open(generated) => self.open(&guide, &generated, &mut matcher),
                Work::Advance(token) => self.advance(&guide, token, &mut matcher),
            }));
            let next = next.unwrap_or_else(|_| {
                self.bases.clear();
                Err("failed".to_owned())
            });
            let next = next.unwrap_or_else(|why| {
                matcher = None;
                self.shared.counts.failures.fetch_add(1, Relaxed);
                Next::Failed(why)
            });
            if guide.finish_work(matcher, next, began.elapsed()) {
                self.shared.tell(guide.key());
            }
        }
    }

    /// Compiles a constraint, and advances by the output of earlier incarnations.
    fn open(
        &mut self,
        guide: &Guide,
        generated: &[u32],
        matcher: &mut Option<Matcher>,
    ) -> Result<Next, String> {
        let Some(constraint) = guide.constraint() else { return Err("it has no constraint".to_owned()) };
        let environment = self.shared.environments.of(&guide.special())?;
        let began = Instant::now();
        let bases = self.bases(&environment);
        let before = bases.counts();
        let opened = match generated {
            [] => bases.matcher(&environment, constraint).map(|matcher| (matcher, Progress::Continues)),
            generated => bases.replayed(&environment, constraint, generated),
        };
        let after = bases.counts();
        let counts = &self.shared.counts;
        counts.cache_hits.fetch_add(after.hits - before.hits, Relaxed);
        if after.compilations > before.compilations {
            counts.compilations.fetch_add(1, Relaxed);
            counts.compile_us.fetch_add(began.elapsed().as_micros() as u64, Relaxed);
        }
        let (opened, progress) = opened.map_err(said)?;
        self.shared.has_now_compiled(guide);
        self.shared.next(guide, matcher.insert(opened), progress)
    }

    fn advance(&mut self, guide: &Guide, token: u32, matcher: &mut Option<Matcher>) -> Result<Next, String> {
        let Some(matcher) = matcher else { return Err("it has no matcher".to_owned()) };
        let (began, shared) = (Instant::now(), self.shared);
        let watched = self.lane.watch(matcher.canceller());
        let next = matcher.commit(token).map_err(said);
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
            let job = match takes {
                Takes::Quick => queues.quick.pop_front(),
                Takes::All => queues.pop(),
            };
            if job.is_some() {
                return job;
            }
            queues = self.queued.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
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
    fn next(&self, guide: &Guide, matcher: &mut Matcher, progress: Progress) -> Result<Next, String> {
        if progress == Progress::Finished {
            return Ok(Next::Complete);
        }
        let next = guide.next_of(matcher).map_err(said)?;
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

/// The text of an error of a constraint.
fn said(error: ConstraintError) -> String {
    error.to_string()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
