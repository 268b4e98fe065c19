//! The activity of one connection: requests in progress, an arriving head, or nothing.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use http::Version;
use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};
use tutti_settings::ConnectionSettings;

use super::standing::Standing;

/// The state of one connection, shared by its socket, its requests, and the table of open connections.
#[derive(Debug)]
pub(super) struct Activity {
    state: Mutex<State>,
    evicted: Notify,
    flooded: Notify,
    opened: Instant,
    /// Extra age of this connection, in 256ths of a tenth of the maximum age. The value is random, so that connections
    /// that opened at the same time do not end at the same time.
    extra_age: u8,
    is_retired: AtomicBool,
}

#[derive(Debug)]
struct State {
    in_flight: usize,
    /// Number of requests in progress whose callers are known.
    known: usize,
    /// Start of the current or latest period in which the connection always had a request.
    busy_since: Instant,
    /// True once a request has come over HTTP/2. Bytes between two requests are then control frames, such as pings.
    http2: bool,
    /// Time of the last request's end. Before the first request, the time of the accept.
    idle_since: Instant,
    /// Time at which the first byte since `idle_since` arrived. `None` while no byte has arrived or a request is in
    /// progress.
    head_since: Option<Instant>,
}

/// A connection's claim to stay open when room is needed, ordered from the weakest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Claim {
    /// The connection has had no request since this time.
    Idle(Instant),
    /// The connection has had requests since this time, and all their callers are unknown.
    Strangers(Instant),
}

/// A limit that a connection has exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    /// The head of a request has not arrived in time.
    Head,
    /// The connection has had no request for too long.
    Idle,
}

impl Activity {
    pub fn new() -> Arc<Self> {
        let now = Instant::now();
        let state = State {
            in_flight: 0,
            known: 0,
            busy_since: now,
            http2: false,
            idle_since: now,
            head_since: None,
        };
        let extra_age = RandomState::new().hash_one(0) as u8;
        let (state, evicted, flooded) = (Mutex::new(state), Notify::new(), Notify::new());
        let is_retired = AtomicBool::new(false);
        Arc::new(Self { state, evicted, flooded, opened: now, extra_age, is_retired })
    }

    /// Records that bytes have arrived.
    pub fn bytes_read(&self) {
        let mut state = self.state.lock();
        if state.in_flight == 0 && !state.http2 && state.head_since.is_none() {
            state.head_since = Some(Instant::now());
        }
    }

    /// Counts a request as in progress until the returned value is dropped.
    pub fn begin(self: &Arc<Self>, version: Version) -> InFlight {
        let mut state = self.state.lock();
        if state.in_flight == 0 {
            state.busy_since = Instant::now();
        }
        state.in_flight += 1;
        state.http2 |= version == Version::HTTP_2;
        state.head_since = None;
        InFlight { activity: self.clone(), standing: Standing::of_stranger(self.clone()) }
    }

    /// Records that the caller of one of the requests in progress is known.
    pub fn caller_is_known(&self) {
        self.state.lock().known += 1;
    }

    /// The limit that the connection has exceeded, if any.
    pub fn overdue(&self, limits: &ConnectionSettings) -> Option<Overdue> {
        let state = self.state.lock();
        if state.in_flight > 0 {
            return None;
        }
        let over = |since: Instant, limit: Duration| since.elapsed() >= limit;
        if state.head_since.is_some_and(|since| over(since, limits.header_timeout())) {
            return Some(Overdue::Head);
        }
        over(state.idle_since, limits.idle_timeout()).then_some(Overdue::Idle)
    }

    /// True for the first call after the connection has reached its maximum age.
    pub fn retires(&self, limits: &ConnectionSettings) -> bool {
        let extra = limits.max_age() / 10 * u32::from(self.extra_age) / 256;
        self.opened.elapsed() >= limits.max_age() + extra && !self.is_retired.swap(true, Relaxed)
    }

    /// True once the connection has reached its maximum age.
    pub fn is_retired(&self) -> bool {
        self.is_retired.load(Relaxed)
    }

    /// The connection's claim to stay open when another connection needs its place. `None` if the connection must stay
    /// open: it has a request of a known caller, or became busy less than `strangers_time` ago.
    pub fn claim(&self, strangers_time: Duration) -> Option<Claim> {
        let state = self.state.lock();
        if state.in_flight == 0 {
            return Some(Claim::Idle(state.idle_since));
        }
        let lasts = state.known == 0 && state.busy_since.elapsed() >= strangers_time;
        lasts.then_some(Claim::Strangers(state.busy_since))
    }

    /// Time since the last request of an HTTP/1 connection ended, or zero if a request is in progress. `None` over
    /// HTTP/2.
    pub fn rest_over_http1(&self) -> Option<Duration> {
        let state = self.state.lock();
        (!state.http2).then(|| if state.in_flight > 0 { Duration::ZERO } else { state.idle_since.elapsed() })
    }

    /// Reports that the peer has used up its budget of frames.
    pub fn flood(&self) {
        self.flooded.notify_one();
    }

    /// Completes once the peer has used up its budget of frames.
    pub async fn flooded(&self) {
        self.flooded.notified().await;
    }

    /// Asks the connection's task to close it.
    pub fn evict(&self) {
        self.evicted.notify_one();
    }

    /// Completes once the connection must close to make room for another one.
    pub async fn evicted(&self) {
        self.evicted.notified().await;
    }
}

/// A request in progress, from its head to the end of its response.
#[derive(Debug)]
pub(super) struct InFlight {
    activity: Arc<Activity>,
    /// The standing of the request's caller.
    pub standing: Standing,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut state = self.activity.state.lock();
        state.in_flight -= 1;
        state.known -= usize::from(self.standing.is_known());
        if state.in_flight == 0 {
            state.idle_since = Instant::now();
        }
    }
}
