//! The drain of a process that serves clients.
//!
//! 1. `/ready` reports not ready, and HTTP/1 responses close their connections. New requests are still served for the
//!    lame-duck time, in which load balancers notice the drain.
//! 2. Over new connections, only the routes of operators work, and HTTP answers all other requests with 503. A request
//!    over a connection that is still open is served, because its client cannot know of the drain.
//! 3. Once no request runs, or the drain timeout has passed, the [`Background`] drains in the remaining time.
//! 4. All connections close, and the [`Background`] stops.

use std::{future::pending, time::Duration};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::servers::IsIdle;
use crate::Error;

/// Time for which the process waits for connections to close once no request runs. The wait is bounded, because a
/// client may keep its connection open, and a gRPC health watch never ends by itself.
pub(super) const CLOSING: Duration = Duration::from_secs(3);
/// Time between two checks whether requests run.
const CHECK: Duration = Duration::from_millis(100);

/// The time that running requests have to finish.
#[derive(Clone, Copy, Debug)]
pub struct Drain {
    /// Total time of the drain.
    pub patience: Duration,
    /// The time at which the drain ends.
    pub deadline: Instant,
}

impl Drain {
    /// A drain that begins now.
    pub fn new(patience: Duration) -> Self {
        Self { patience, deadline: Instant::now() + patience }
    }
}

/// Work behind the servers of a process, such as a conductor's workers.
pub trait Background {
    /// Completes only if the process cannot continue, with the reason.
    fn failed(&mut self) -> impl Future<Output = Error> {
        pending()
    }

    /// Takes no more requests, waits for the running ones, and ends those that have not finished in time.
    fn drain(&mut self, drain: Drain) -> impl Future<Output = ()>;

    /// Completes once nothing runs any more. Called after [`Background::drain`].
    fn stop(self) -> impl Future<Output = ()>
    where
        Self: Sized,
    {
        async {}
    }
}

/// Completes once all `servers` have ended, or no request has run for [`CLOSING`]. The servers accept no new
/// connections but still serve requests: a client whose stream ends may send its next request over the same connection.
/// Only the response to that request tells the client to use another connection.
pub(super) async fn at_rest(servers: &mut JoinSet<Result<(), Error>>, is_idle: &IsIdle) {
    let idle = async {
        let mut rest = Duration::ZERO;
        while rest < CLOSING {
            sleep(CHECK).await;
            rest = if is_idle() { rest + CHECK } else { Duration::ZERO };
        }
    };
    tokio::select! {
        () = ended(servers) => {}
        () = idle => {}
    }
}

/// Completes once all of `servers` have ended.
pub(super) async fn ended(servers: &mut JoinSet<Result<(), Error>>) {
    while servers.join_next().await.is_some() {}
}
