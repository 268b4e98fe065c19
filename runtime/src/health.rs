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
}

impl Default for Health {
    fn default() -> Self {
        Self { ready: watch::Sender::new(State::Not("starting".into())), live: watch::Sender::new(State::Ok) }
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
