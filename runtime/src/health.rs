//! Liveness and readiness. A ready process serves a request that is sent now. A live process needs no restart.

use tokio::sync::watch;

/// The answer of `/ready` or `/health`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Ready, or live.
    Ok,
    /// Not ready, or not live, with the reason.
    Not(String),
}

/// Readiness and liveness of a process. At any time a single task writes each of the two. Clones share the state.
#[derive(Clone, Debug)]
pub struct Health {
    ready: watch::Sender<State>,
    live: watch::Sender<State>,
    /// Remarks for the operator about a process that is ready.
    remarks: watch::Sender<Vec<String>>,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            ready: watch::Sender::new(State::Not("starting".into())),
            live: watch::Sender::new(State::Ok),
            remarks: watch::Sender::default(),
        }
    }
}

impl Health {
    /// Sets readiness.
    pub fn set_ready(&self, state: State) {
        self.ready.send_if_modified(|old| {
            let changed = *old != state;
            *old = state;
            changed
        });
    }

    /// Sets the remarks about a process that is ready but has problems, one line per problem.
    pub fn set_remarks(&self, remarks: Vec<String>) {
        self.remarks.send_replace(remarks);
    }

    /// The remarks.
    pub fn remarks(&self) -> Vec<String> {
        self.remarks.borrow().clone()
    }

    /// Sets liveness.
    pub fn set_live(&self, state: State) {
        self.live.send_replace(state);
    }

    /// Readiness: whether a request sent now would be served.
    pub fn ready(&self) -> State {
        self.ready.borrow().clone()
    }

    /// Liveness: whether the process should keep running.
    pub fn live(&self) -> State {
        self.live.borrow().clone()
    }

    /// A receiver that waits for readiness to change.
    pub fn watch_ready(&self) -> watch::Receiver<State> {
        self.ready.subscribe()
    }
}
