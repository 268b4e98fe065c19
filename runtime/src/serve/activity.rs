//! The activity of one connection: requests in progress, a head that arrives, or nothing.

use std::{sync::Arc, time::Duration};

use http::Version;
use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};
use tutti_settings::ConnectionSettings;

/// The state of one connection, shared by its socket, its requests, and the table of open connections.
#[derive(Debug)]
pub(super) struct Activity {
    state: Mutex<State>,
    evicted: Notify,
}

#[derive(Debug)]
struct State {
    in_flight: usize,
    /// True once a request has come over HTTP/2. Bytes between two requests are then pings and the like.
    http2: bool,
    /// Time of the last request's end, or of the accept.
    idle_since: Instant,
    /// Arrival of the first byte since `idle_since`, unless a request is in progress.
    head_since: Option<Instant>,
}

/// A limit that a connection has exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    /// The head of a request has not arrived in time.
    Head,
    /// There has been no request for too long.
    Idle,
}

impl Activity {
    pub fn new() -> Arc<Self> {
        let state = State { in_flight: 0, http2: false, idle_since: Instant::now(), head_since: None };
        Arc::new(Self { state: Mutex::new(state), evicted: Notify::new() })
    }

    /// Notes that bytes have arrived.
    pub fn bytes_read(&self) {
        let mut state = self.state.lock();
        if state.in_flight == 0 && !state.http2 && state.head_since.is_none() {
            state.head_since = Some(Instant::now());
        }
    }

    /// Counts a request as in progress until the returned value is dropped.
    pub fn begin(self: &Arc<Self>, version: Version) -> InFlight {
        let mut state = self.state.lock();
        state.in_flight += 1;
        state.http2 |= version == Version::HTTP_2;
        state.head_since = None;
        InFlight(self.clone())
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

    /// Start of the time without a request; `None` while one is in progress.
    pub fn idle_since(&self) -> Option<Instant> {
        let state = self.state.lock();
        (state.in_flight == 0).then_some(state.idle_since)
    }

    /// Time since the connection last had a request, if it speaks HTTP/1: zero while one is in progress.
    pub fn rest_over_http1(&self) -> Option<Duration> {
        let state = self.state.lock();
        (!state.http2).then(|| if state.in_flight > 0 { Duration::ZERO } else { state.idle_since.elapsed() })
    }

    /// Asks the connection's task to close it.
    pub fn evict(&self) {
        self.evicted.notify_one();
    }

    /// Completes once the connection is to make room for another one.
    pub async fn evicted(&self) {
        self.evicted.notified().await;
    }
}

/// A request in progress, from its head to the end of its response.
#[derive(Debug)]
pub(super) struct InFlight(Arc<Activity>);

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.in_flight -= 1;
        if state.in_flight == 0 {
            state.idle_since = Instant::now();
        }
    }
}
