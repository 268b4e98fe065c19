//! Life and readiness. Ready means: a request sent now would be served. Live means: restarting would not help.

use tokio::sync::watch;

/// What `/ready` and `/health` answer; one writer for each, any number of readers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// As it should be.
    Ok,
    /// Not so, and why.
    Not(String),
}

/// Both states of a process; clones share them.
#[derive(Clone, Debug)]
pub struct Health {
    ready: watch::Sender<State>,
    live: watch::Sender<State>,
    /// What an operator should know although the process is ready.
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
    /// Sets readiness; returns at once.
    pub fn set_ready(&self, state: State) {
        self.ready.send_if_modified(|old| {
            let changed = *old != state;
            *old = state;
            changed
        });
    }

    /// Sets what is not as it should be although the process is ready, a line for each thing; returns at once.
    pub fn set_remarks(&self, remarks: Vec<String>) {
        self.remarks.send_replace(remarks);
    }

    /// What was set by [`Health::set_remarks`].
    pub fn remarks(&self) -> Vec<String> {
        self.remarks.borrow().clone()
    }

    /// Sets liveness; returns at once.
    pub fn set_live(&self, state: State) {
        self.live.send_replace(state);
    }

    /// Whether a request sent now would be served.
    pub fn ready(&self) -> State {
        self.ready.borrow().clone()
    }

    /// Whether the process is worth keeping.
    pub fn live(&self) -> State {
        self.live.borrow().clone()
    }

    /// To wait for readiness to change.
    pub fn watch_ready(&self) -> watch::Receiver<State> {
        self.ready.subscribe()
    }
}
