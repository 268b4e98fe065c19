//! Sends a workload as a closed or an open loop.

use std::{
    io::{IsTerminal, Write},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Semaphore, mpsc},
    task::JoinSet,
    time::{Instant, sleep_until, timeout_at},
};

use crate::{
    Error,
    arrivals::Arrivals,
    client::Client,
    outcome::Outcome,
    statistics::{Objectives, Sent, Statistics},
    workload::Request,
};

/// Interval of the progress line on a terminal.
const PROGRESS: Duration = Duration::from_secs(1);

/// The times at which requests are sent.
#[derive(Clone, Debug)]
pub enum Load {
    /// A fixed number of requests is in flight. The next one is sent when an earlier one has been answered.
    Closed {
        /// Requests in flight.
        concurrency: usize,
    },
    /// Each request is sent at a time that was decided before the run.
    Open {
        /// The source of the times.
        times: Times,
        /// Maximum number of requests in flight. A request that is due waits for room, and its latency includes the
        /// wait.
        max_in_flight: usize,
    },
}

/// Times of an open loop.
#[derive(Clone, Debug)]
pub enum Times {
    /// Drawn from an arrival process.
    Drawn(Arrivals),
    /// Given by the workload.
    OfWorkload,
}

/// The end of a run. At the end, the run waits for the requests that are still in flight.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of requests.
    pub requests: Option<u64>,
    /// Time after which no request is sent.
    pub duration: Option<Duration>,
}

/// The result of a run.
#[derive(Debug)]
pub struct Measured {
    /// Counts and histograms.
    pub statistics: Statistics,
    /// Time from the start to the last answer or the interruption.
    pub duration: Duration,
    /// True if the run was interrupted. Requests that were in flight then have no outcome.
    pub interrupted: bool,
}

/// Sends requests that are not measured, at most `concurrency` at once. Returns the first failure.
pub async fn warm_up(
    client: &Arc<Client>,
    requests: &mut mpsc::Receiver<Result<Request, Error>>,
    count: u64,
    concurrency: usize,
) -> Result<Option<String>, Error> {
    let mut tasks: JoinSet<Outcome> = JoinSet::new();
    let mut failure = None;
    let mut note = |ended: Result<Outcome, _>| {
        if let Ok(Outcome { failure: Some(why), .. }) = ended {
            failure.get_or_insert(format!("{}: {}", why.kind, why.message));
        }
    };
    for _ in 0..count {
        let Some(request) = requests.recv().await.transpose()? else { break };
        if tasks.len() >= concurrency
            && let Some(ended) = tasks.join_next().await
        {
            note(ended);
        }
        let client = client.clone();
        tasks.spawn(async move { client.send(request).await });
    }
    while let Some(ended) = tasks.join_next().await {
        note(ended);
    }
    Ok(failure)
}

/// Sends requests until a limit or the end of the workload is reached, or until `interruption` completes.
pub async fn run(
    client: Arc<Client>,
    mut requests: mpsc::Receiver<Result<Request, Error>>,
    load: Load,
    limits: Limits,
    objectives: Objectives,
    interruption: impl Future<Output = ()>,
) -> Result<Measured, Error> {
    let statistics = Arc::new(Mutex::new(Statistics::new(objectives)));
    let start = Instant::now();
    let sender = Sender { client, statistics: statistics.clone(), start, tasks: JoinSet::new() };
    let interrupted = tokio::select! {
        ended = sender.send_all(&mut requests, load, limits) => { ended?; false }
        () = interruption => true,
        never = show_progress(&statistics, start) => match never {},
    };
    let duration = start.elapsed();
    // Aborted tasks may still share the statistics, so the figures are copied.
    let statistics = statistics.lock().unwrap_or_else(PoisonError::into_inner).clone();
    Ok(Measured { statistics, duration, interrupted })
}

struct Sender {
    client: Arc<Client>,
    statistics: Arc<Mutex<Statistics>>,
    start: Instant,
    /// Requests in flight. Dropping the set aborts them.
    tasks: JoinSet<()>,
}

impl Sender {
    async fn send_all(
        mut self,
        requests: &mut mpsc::Receiver<Result<Request, Error>>,
        load: Load,
        limits: Limits,
    ) -> Result<(), Error> {
        // Tokio's clock cannot represent deadlines as late as the largest duration.
        let deadline = limits.duration.and_then(|duration| self.start.checked_add(duration));
        let far = Instant::now() + Duration::from_secs(86_400 * 365);
        let (room, mut times) = match load {
            Load::Closed { concurrency } => (concurrency, None),
            Load::Open { times, max_in_flight } => (max_in_flight, Some(times)),
        };
        let room = Arc::new(Semaphore::new(room));
        for _ in 0..limits.requests.unwrap_or(u64::MAX) {
            // A request of a closed loop is due as soon as there is room for it.
            let mut permit = None;
            if times.is_none() {
                permit = timeout_at(deadline.unwrap_or(far), room.clone().acquire_owned()).await.ok();
                if permit.is_none() {
                    break;
                }
            }
            let Some(request) = requests.recv().await.transpose()? else { break };
            let due = match &mut times {
                None => Instant::now(),
                Some(Times::Drawn(arrivals)) => self.start + arrivals.next().unwrap_or_default(),
                Some(Times::OfWorkload) => self.start + request.at.unwrap_or_default(),
            };
            if deadline.is_some_and(|deadline| due >= deadline) {
                break;
            }
            if times.is_some() {
                sleep_until(due).await;
                permit = Some(room.clone().acquire_owned().await);
            }
            while self.tasks.try_join_next().is_some() {}
            self.spawn(request, due, permit);
        }
        while self.tasks.join_next().await.is_some() {}
        Ok(())
    }

    /// Sends a request in a separate task, which holds `permit` until the request has ended.
    fn spawn(&mut self, request: Request, due: Instant, permit: impl Send + 'static) {
        let (client, statistics, start) = (self.client.clone(), self.statistics.clone(), self.start);
        self.tasks.spawn(async move {
            let sent = Sent { due: due - start, at: start.elapsed() };
            lock(&statistics).send(sent);
            let outcome = client.send(request).await;
            lock(&statistics).end(sent, outcome);
            drop(permit);
        });
    }
}

fn lock(statistics: &Mutex<Statistics>) -> std::sync::MutexGuard<'_, Statistics> {
    statistics.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shows counts on standard error, if that is a terminal.
async fn show_progress(statistics: &Mutex<Statistics>, start: Instant) -> std::convert::Infallible {
    if !std::io::stderr().is_terminal() {
        std::future::pending::<()>().await;
    }
    loop {
        tokio::time::sleep(PROGRESS).await;
        let line = {
            let s = lock(statistics);
            let seconds = start.elapsed().as_secs();
            format!(
                "{seconds} s: {} sent, {} served, {} failed, {} in flight",
                s.sent,
                s.served,
                s.failed,
                s.in_flight()
            )
        };
        // The error is ignored: a terminal that takes no output must not stop the run.
        let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
    }
}
