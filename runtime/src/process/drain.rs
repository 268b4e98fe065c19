//! The drain of a process that serves clients.
//!
//! 1. `/ready` says no, and answers over HTTP/1 move their clients to other connections. New requests are served for
//!    the lame-duck time, in which load balancers notice.
//! 2. New connections get no request served: HTTP answers 503, and only the routes of operators work. A request over a
//!    connection that is still open is served, because its client cannot know of the drain.
//! 3. Once no request runs, or the drain timeout has passed, what is behind the servers drains in the rest of the time.
//! 4. All connections close, and what is behind the servers stops.

use std::{future::pending, time::Duration};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::servers::IsIdle;
use crate::Error;

/// Time for which the process waits for connections to close once no request is left. The wait is bounded because a
/// client may keep its connection, and its health watch never ends by itself.
pub(super) const CLOSING: Duration = Duration::from_secs(3);
/// Time between two looks at whether requests run.
const CHECK: Duration = Duration::from_millis(100);

/// The time that running requests have to finish.
#[derive(Clone, Copy, Debug)]
pub struct Drain {
    /// The whole time.
    pub patience: Duration,
    /// The end of that time.
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

/// Completes once all of `servers` have ended, which do not accept connections any more, or no request has been running
/// for [`CLOSING`]. Requests are served meanwhile: a client whose stream ends may send its next request over the same
/// connection, and learns only from that answer to use another one.
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
