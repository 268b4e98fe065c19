//! Streams and events: queues of work that a thread runs in an order that CUDA allows.
//!
//! Each stream is a line of entries. The first entry of a line is *ready* under three conditions: no entry of the line
//! runs, the event that the entry waits for is past, and the legacy default stream does not order the entry after work
//! of another line. Without a seed, the ready entry that was submitted first runs next. With a seed, a random ready
//! entry runs next, and no entry is ready before the host waits for something or [`Order::patience`] is over. So work
//! finishes as late as CUDA allows.
//!
//! One entry runs at a time, since a launch uses all processors. Only work that waits for other processes runs in
//! parallel, on separate threads.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Outcome};
use crate::random::Random;

/// Number of the legacy default stream's line of entries.
pub const LEGACY: u64 = 0;

/// Random order of a queue's work.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    /// Seed of the random choices between ready entries.
    pub seed: u64,
    /// Maximum time for which work is held back while no host thread waits. Without this limit, a program that polls
    /// would make no progress.
    pub patience: Duration,
}

/// Work of a stream. An error that it returns becomes the context's sticky error.
pub type Work = Box<dyn FnOnce() -> Outcome + Send>;

/// An entry of a stream.
pub enum Entry {
    /// Runs while no other `Run` entry of the device runs.
    Run(Work),
    /// Runs on a separate thread, because the work may wait for other processes.
    Blocking(Work),
    /// Marks a point as past. All entries before this entry have then run.
    Record(Arc<Point>),
    /// Waits until a point is past.
    Wait(Arc<Point>),
    /// Stops the device for good.
    Hang,
}

/// A point in a stream. The point is past once all entries before it have run.
#[derive(Debug, Default)]
pub struct Point {
    past: AtomicBool,
    time: Mutex<Option<Instant>>,
}

impl Point {
    /// True once all entries before the point have run.
    pub fn is_past(&self) -> bool {
        self.past.load(Ordering::Acquire)
    }

    /// Returns the time at which the point was reached.
    pub fn time(&self) -> Option<Instant> {
        *self.time.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reach(&self) {
        *self.time.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.past.store(true, Ordering::Release);
    }
}

/// Kind of a stream, by its order with the legacy default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// Ordered with the legacy default stream.
    Blocking,
    /// Independent of the legacy default stream (`CU_STREAM_NON_BLOCKING`).
    NonBlocking,
}

struct Submitted {
    number: u64,
    time: Instant,
    entry: Entry,
}

struct Line {
    kind: StreamKind,
    waiting: VecDeque<Submitted>,
    running: bool,
    /// True once the stream is destroyed. The line is removed when it is empty.
    closed: bool,
}

impl Line {
    fn is_idle(&self) -> bool {
        !self.running && self.waiting.is_empty()
    }
}

struct State {
    lines: BTreeMap<u64, Line>,
    next_line: u64,
    next_number: u64,
    random: Option<(Random, Duration)>,
    /// Number of host threads that wait for work now.
    waiting_hosts: usize,
    error: Option<Error>,
    hung: bool,
    closed: bool,
}

/// The next action of a queue's thread.
enum Next {
    Start(u64, Entry),
    Sleep(Option<Instant>),
    Stop,
}

/// All streams of a context.
pub struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

impl Queue {
    /// Creates an empty queue and starts its thread.
    pub fn start(order: Option<Order>) -> Arc<Self> {
        let legacy =
            Line { kind: StreamKind::Blocking, waiting: VecDeque::new(), running: false, closed: false };
        let state = State {
            lines: BTreeMap::from([(LEGACY, legacy)]),
            next_line: LEGACY + 1,
            next_number: 0,
            random: order.map(|order| (Random::new(order.seed), order.patience)),
            waiting_hosts: 0,
            error: None,
            hung: false,
            closed: false,
        };
        let queue = Arc::new(Queue { state: Mutex::new(state), changed: Condvar::new() });
        let own = queue.clone();
        std::thread::spawn(move || own.run());
        queue
    }

    /// Opens a stream.
    pub fn open(&self, kind: StreamKind) -> u64 {
        let mut state = self.lock();
        let line = state.next_line;
        state.next_line += 1;
        state.lines.insert(line, Line { kind, waiting: VecDeque::new(), running: false, closed: false });
        line
    }

    /// Closes a stream. Work that is already in the stream still runs.
    pub fn close(&self, line: u64) {
        let mut state = self.lock();
        if let Some(found) = state.lines.get_mut(&line) {
            found.closed = true;
        }
        state.drop_if_done(line);
    }

    /// Puts an entry at the end of a stream.
    ///
    /// # Errors
    ///
    /// The context's sticky error, or `INVALID_HANDLE` for a closed stream. The entry is dropped.
    pub fn submit(&self, line: u64, entry: Entry) -> Outcome {
        let mut state = self.lock();
        state.check()?;
        let number = state.next_number;
        state.next_number += 1;
        let found = state.lines.get_mut(&line).filter(|found| !found.closed).ok_or(Error::INVALID_HANDLE)?;
        found.waiting.push_back(Submitted { number, time: Instant::now(), entry });
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Returns the context's sticky error, if the context has one.
    pub fn check(&self) -> Outcome {
        self.lock().check()
    }

    /// True if a stream has no work left.
    ///
    /// # Errors
    ///
    /// The context's sticky error.
    pub fn is_idle(&self, line: u64) -> Outcome<bool> {
        let state = self.lock();
        state.check()?;
        Ok(state.lines.get(&line).is_none_or(Line::is_idle))
    }

    /// Waits until a stream has no work left.
    ///
    /// # Errors
    ///
    /// The context's sticky error.
    pub fn wait_for_line(&self, line: u64) -> Outcome {
        self.wait(|state| state.lines.get(&line).is_none_or(Line::is_idle))
    }

    /// Waits until no stream has work left.
    ///
    /// # Errors
    ///
    /// The context's sticky error.
    pub fn wait_for_all(&self) -> Outcome {
        self.wait(|state| state.lines.values().all(Line::is_idle))
    }

    /// Waits until a point is past.
    ///
    /// # Errors
    ///
    /// The context's sticky error.
    pub fn wait_for_point(&self, point: &Point) -> Outcome {
        self.wait(|_| point.is_past())
    }

    /// Ends the queue's thread after the work that the thread runs now. Drops all other work.
    pub fn shut(&self) {
        let mut state = self.lock();
        state.closed = true;
        let dropped = state.clear();
        drop(state);
        self.changed.notify_all();
        drop(dropped);
    }

    fn wait(&self, done: impl Fn(&State) -> bool) -> Outcome {
        let mut state = self.lock();
        state.check()?;
        state.waiting_hosts += 1;
        self.changed.notify_all();
        while state.error.is_none() && !state.closed && !done(&state) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting_hosts -= 1;
        state.check()?;
        if state.closed { Err(Error::CONTEXT_IS_DESTROYED) } else { Ok(()) }
    }

    fn run(self: Arc<Self>) {
        loop {
            let mut state = self.lock();
            let (line, entry) = loop {
                match state.next() {
                    Next::Start(line, entry) => break (line, entry),
                    Next::Stop => return,
                    Next::Sleep(None) => {
                        state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
                    }
                    Next::Sleep(Some(until)) => {
                        let wait = until.saturating_duration_since(Instant::now());
                        let woken = self.changed.wait_timeout(state, wait);
                        state = woken.unwrap_or_else(PoisonError::into_inner).0;
                    }
                }
            };
            drop(state);
            match entry {
                Entry::Run(work) => self.finish(line, guarded(work)),
                Entry::Record(point) => {
                    point.reach();
                    self.finish(line, Ok(()));
                }
                Entry::Wait(_) => self.finish(line, Ok(())),
                Entry::Hang => self.lock().hung = true,
                Entry::Blocking(work) => {
                    let own = self.clone();
                    std::thread::spawn(move || own.finish(line, guarded(work)));
                }
            }
        }
    }

    fn finish(&self, line: u64, outcome: Outcome) {
        let mut state = self.lock();
        if let Some(found) = state.lines.get_mut(&line) {
            found.running = false;
        }
        let dropped = outcome.err().map(|error| state.fail(error));
        state.drop_if_done(line);
        drop(state);
        self.changed.notify_all();
        drop(dropped);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs work. A panic in the work counts as a failed kernel.
fn guarded(work: Work) -> Outcome {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(Error::LAUNCH_FAILED))
}

impl State {
    fn check(&self) -> Outcome {
        self.error.map_or(Ok(()), Err)
    }

    /// Makes an error the context's sticky error, unless the context already has one. Returns the work that will not
    /// run, so that the caller drops it after the lock is released.
    fn fail(&mut self, error: Error) -> Vec<Entry> {
        self.error.get_or_insert(error);
        self.clear()
    }

    fn clear(&mut self) -> Vec<Entry> {
        let entries: Vec<Entry> = self
            .lines
            .values_mut()
            .flat_map(|line| line.waiting.drain(..))
            .map(|waiting| waiting.entry)
            .collect();
        for entry in &entries {
            if let Entry::Record(point) = entry {
                point.reach();
            }
        }
        entries
    }

    fn drop_if_done(&mut self, line: u64) {
        if self.lines.get(&line).is_some_and(|line| line.closed && line.is_idle()) {
            self.lines.remove(&line);
        }
    }

    /// Chooses the entry to run next and removes it from its line.
    fn next(&mut self) -> Next {
        if self.closed {
            return Next::Stop;
        }
        if self.hung {
            return Next::Sleep(None);
        }
        let ready: Vec<(u64, u64, Instant)> = self
            .lines
            .iter()
            .filter(|(name, line)| self.is_ready(**name, line))
            .filter_map(|(name, line)| line.waiting.front().map(|head| (head.number, *name, head.time)))
            .collect();
        let now = Instant::now();
        let chosen = match &mut self.random {
            None => ready.iter().min(),
            Some((random, patience)) => {
                let late = self.waiting_hosts == 0;
                let due: Vec<_> =
                    ready.iter().filter(|&&(.., time)| !late || time + *patience <= now).collect();
                if due.is_empty() {
                    return Next::Sleep(ready.iter().map(|&(.., time)| time + *patience).min());
                }
                Some(due[random.below(due.len())])
            }
        };
        let Some(&(_, name, _)) = chosen else { return Next::Sleep(None) };
        let Some(line) = self.lines.get_mut(&name) else { return Next::Sleep(None) };
        match line.waiting.pop_front() {
            Some(head) => {
                line.running = true;
                Next::Start(name, head.entry)
            }
            None => Next::Sleep(None),
        }
    }

    fn is_ready(&self, name: u64, line: &Line) -> bool {
        let Some(head) = line.waiting.front().filter(|_| !line.running) else { return false };
        if let Entry::Wait(point) = &head.entry
            && !point.is_past()
        {
            return false;
        }
        // True if all work of the other line was submitted after this entry.
        let behind =
            |other: &Line| !other.running && other.waiting.front().is_none_or(|o| o.number > head.number);
        match name {
            LEGACY => self
                .lines
                .iter()
                .filter(|(other, line)| **other != LEGACY && line.kind == StreamKind::Blocking)
                .all(|(_, other)| behind(other)),
            _ if line.kind == StreamKind::Blocking => self.lines.get(&LEGACY).is_none_or(behind),
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests;
