//! Liveness and readiness. A ready process can serve a request now. A live process makes progress and needs no restart.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::watch;

/// The answer of `/ready` or `/health`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Ready, or live.
    Ok,
    /// Not ready, or not live, with the reason.
    Not(String),
}

/// Readiness and liveness of a process. At any time a single task writes the readiness. Clones share the state.
#[derive(Clone, Debug)]
pub struct Health {
    ready: watch::Sender<State>,
    /// True once the process drains: readiness no longer changes.
    draining: Arc<AtomicBool>,
    pulses: Arc<Mutex<Vec<Arc<Beats>>>>,
    /// Remarks for the operator about a process that is ready.
    remarks: watch::Sender<Vec<String>>,
}

/// The last sign of progress of one task.
#[derive(Debug)]
struct Beats {
    name: &'static str,
    patience: Duration,
    last: Mutex<Instant>,
}

/// A task's signs of progress. The process counts as dead if one of its tasks gives no sign within its patience, even
/// if that task has ended.
#[derive(Debug)]
pub struct Pulse(Arc<Beats>);

impl Pulse {
    /// Notes that the task makes progress now.
    pub fn beat(&self) {
        *self.0.last.lock() = Instant::now();
    }
}

impl Default for Health {
    fn default() -> Self {
        Self {
            ready: watch::Sender::new(State::Not("starting".into())),
            draining: Arc::default(),
            pulses: Arc::default(),
            remarks: watch::Sender::default(),
        }
    }
}

impl Health {
    /// Creates a separate readiness that shares this process's liveness.
    pub fn of_same_process(&self) -> Self {
        Self { pulses: self.pulses.clone(), ..Self::default() }
    }

    /// Sets readiness. Has no effect once the process drains.
    pub fn set_ready(&self, state: State) {
        self.ready.send_if_modified(|old| {
            let changed = *old != state && !self.draining.load(Relaxed);
            if changed {
                *old = state;
            }
            changed
        });
    }

    /// Sets readiness to "draining" for good. Load balancers then send no more requests.
    pub fn drain(&self) {
        self.set_ready(State::Not("draining".into()));
        self.draining.store(true, Relaxed);
    }

    /// True once the process drains.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Relaxed)
    }

    /// Sets the remarks about a process that is ready but has problems, one line per problem.
    pub fn set_remarks(&self, remarks: Vec<String>) {
        self.remarks.send_replace(remarks);
    }

    /// The remarks.
    pub fn remarks(&self) -> Vec<String> {
        self.remarks.borrow().clone()
    }

    /// Makes liveness depend on a task, which must beat at least once per `patience`. `name` is the task's name in the
    /// reason.
    pub fn pulse(&self, name: &'static str, patience: Duration) -> Pulse {
        let beats = Arc::new(Beats { name, patience, last: Mutex::new(Instant::now()) });
        self.pulses.lock().push(beats.clone());
        Pulse(beats)
    }

    /// Readiness: `Ok` if a request sent now would be served.
    pub fn ready(&self) -> State {
        self.ready.borrow().clone()
    }

    /// Liveness: `Ok` if every task that must make progress does.
    pub fn live(&self) -> State {
        self.live_at(Instant::now())
    }

    /// Liveness at the time `now`: `Ok` if every task has beaten within its patience.
    pub fn live_at(&self, now: Instant) -> State {
        for Beats { name, patience, last } in self.pulses.lock().iter().map(Arc::as_ref) {
            let silence = now.saturating_duration_since(*last.lock());
            if silence > *patience {
                return State::Not(format!("{name} has made no progress for {} s", silence.as_secs()));
            }
        }
        State::Ok
    }

    /// A receiver that waits for readiness to change.
    pub fn watch_ready(&self) -> watch::Receiver<State> {
        self.ready.subscribe()
    }
}

#[cfg(test)]
mod tests;
