//! The accept loop of a listener, and the task of each connection.

use std::{
    io,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use parking_lot::Mutex;
use tokio::{
    task::JoinSet,
    time::{interval, sleep, timeout},
};
use tutti_settings::ConnectionSettings;

use super::{
    activity::{Activity, Overdue},
    counted::{Bodies, CountedService},
    limits::ConnectionLimits,
    listener::Listener,
    metrics::{Closed, ListenerMetrics, OpenCount},
    open::{Entry, OpenConnections},
    stream::{ActiveStream, Peer, Socket, Stream, TimedSocket},
};
use crate::{
    live::Live,
    shutdown::Shutdown,
    tls::{RefusalLog, ServerTls},
};

/// Pause of an accept loop after an error of the system, such as too many open files. Without a pause, the error would
/// recur at once, and the loop would waste a core.
const PAUSE: Duration = Duration::from_millis(100);
/// Minimum time between two log lines about connections that are not served.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Time for which an HTTP/1 connection stays open after its last response when the server closes. A client may send its
/// next request just as a response ends, and that request is answered. Connections that are idle when the server begins
/// to close stay open for this time only if the close is gentle.
const LINGER: Duration = Duration::from_secs(1);
/// Maximum time for writing the last bytes to a peer that floods a connection.
const GOODBYE: Duration = Duration::from_millis(100);
/// Number of checks within the shorter of the two time limits of a connection.
const CHECKS: u32 = 8;
/// Maximum time between two checks, so that changed limits take effect soon.
const CHECKED_WITHIN: Duration = Duration::from_secs(1);

/// One listener's server.
pub(super) struct Server {
    routes: axum::Router,
    builder: Arc<Builder<TokioExecutor>>,
    bodies: Bodies,
    limits: Live<ConnectionSettings>,
    do_age: bool,
    open: Arc<OpenConnections>,
    refusals: Arc<Mutex<RefusalLog>>,
}

impl Server {
    pub fn new(
        routes: axum::Router,
        builder: Builder<TokioExecutor>,
        bodies: Bodies,
        connections: &ConnectionLimits,
    ) -> Self {
        let (limits, do_age) = (connections.live(), connections.do_age());
        let open = OpenConnections::new(limits.clone());
        Self { routes, builder: Arc::new(builder), bodies, limits, do_age, open, refusals: Arc::default() }
    }

    /// Accepts and serves connections until `closing` begins, and then waits for the open ones to end.
    pub async fn run(self, listener: Listener, closing: Shutdown) {
        let mut tasks = JoinSet::new();
        let mut log = SeldomLog::default();
        let write_timeout = self.limits.get().write_timeout();
        let mut begun = pin!(closing.begun());
        loop {
            let accepted = tokio::select! {
                () = &mut begun => break,
                Some(_) = tasks.join_next() => continue,
                accepted = listener.accept(write_timeout) => accepted,
            };
            match accepted {
                Ok((socket, peer)) => {
                    let activity = Activity::new();
                    let Some(entry) = self.open.enter(peer, &activity) else {
                        listener.metrics().closed(Closed::Limit);
                        log.warn(|count| {
                            tracing::warn!(count, ?peer, "closed new connections: too many are open")
                        });
                        continue;
                    };
                    let service = CountedService {
                        routes: self.routes.clone(),
                        peer,
                        activity: activity.clone(),
                        bodies: self.bodies.clone(),
                    };
                    let handshake = self.handshake(socket, peer, listener.tls().cloned());
                    let connection = self.connection(service, entry, listener.metrics());
                    tasks.spawn(connection.open(handshake, closing.clone()));
                }
                Err(error) if is_of_peer(&error) => {
                    tracing::debug!(%error, "a connection ended before its accept")
                }
                Err(error) => {
                    log.warn(
                        |count| tracing::warn!(count, %error, "cannot accept connections; pausing each time"),
                    );
                    self.open.make_room();
                    sleep(PAUSE).await;
                }
            }
        }
        drop(listener);
        while tasks.join_next().await.is_some() {}
    }

    /// Turns a socket into a stream of bytes, with a TLS handshake if the listener has TLS. `None` if the handshake
    /// fails.
    fn handshake(
        &self,
        socket: Socket,
        peer: Peer,
        tls: Option<ServerTls>,
    ) -> impl Future<Output = Option<Stream>> + Send + use<> {
        let limits = self.limits.get();
        let socket = TimedSocket::new(socket, limits.write_timeout());
        let (limit, refusals) = (limits.handshake_timeout(), self.refusals.clone());
        async move {
            let Some(tls) = tls else { return Some(Stream::Plain(socket)) };
            match tls.accept(socket, limit).await {
                Ok(stream) => Some(Stream::Tls(Box::new(stream))),
                Err(reason) => {
                    refuse(peer, &reason, &tls, &refusals);
                    None
                }
            }
        }
    }

    fn connection(&self, service: CountedService, entry: Entry, metrics: &ListenerMetrics) -> Connection {
        let activity = service.activity.clone();
        let (builder, limits) = (self.builder.clone(), self.limits.clone());
        let held = (entry, metrics.opened());
        let (metrics, do_age) = (metrics.clone(), self.do_age);
        Connection { builder, limits, do_age, service, activity, metrics, _held: held }
    }
}

/// Time until the next check of a connection's time limits, for heads and for idle connections.
fn check_after(limits: &ConnectionSettings) -> Duration {
    (limits.header_timeout().min(limits.idle_timeout()) / CHECKS).min(CHECKED_WITHIN)
}

/// Logs that a peer is refused: as a warning inside the cluster, and at a lower level at a public port, where this is
/// usual.
fn refuse(peer: Peer, reason: &str, tls: &ServerTls, log: &Mutex<RefusalLog>) {
    let Some(more) = log.lock().count() else { return };
    if tls.is_mutual() {
        tracing::warn!(%peer, reason, more, "refused a connection");
    } else {
        tracing::info!(%peer, reason, more, "refused a connection");
    }
}

/// True if an error of `accept` concerns only one connection, and not the listener.
fn is_of_peer(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// Counts events, and logs at most one line per [`LOG_INTERVAL`].
#[derive(Default)]
struct SeldomLog {
    count: u64,
    logged: Option<Instant>,
}

impl SeldomLog {
    fn warn(&mut self, log: impl FnOnce(u64)) {
        self.count += 1;
        if self.logged.is_none_or(|logged| logged.elapsed() >= LOG_INTERVAL) {
            log(self.count);
            (self.count, self.logged) = (0, Some(Instant::now()));
        }
    }
}

/// One connection with the state that its task needs.
struct Connection {
    builder: Arc<Builder<TokioExecutor>>,
    limits: Live<ConnectionSettings>,
    do_age: bool,
    service: CountedService,
    activity: Arc<Activity>,
    metrics: ListenerMetrics,
    _held: (Entry, OpenCount),
}

impl Connection {
    /// Performs the handshake and serves. Until the handshake ends, the connection counts as idle and may be closed to
    /// make room for others.
    async fn open(self, handshake: impl Future<Output = Option<Stream>>, closing: Shutdown) {
        let stream = tokio::select! {
            stream = handshake => stream,
            () = self.activity.evicted() => return self.metrics.closed(Closed::Evicted),
            () = closing.begun() => return,
        };
        match stream {
            Some(stream) => {
                let stream = ActiveStream::new(stream, self.activity.clone());
                self.serve(stream, closing).await;
            }
            None => self.metrics.closed(Closed::Handshake),
        }
    }

    /// Serves until the peer leaves, a limit is exceeded, or `closing` begins and the last response is sent.
    async fn serve(self, stream: ActiveStream, closing: Shutdown) {
        let Self { builder, limits, do_age, service, activity, metrics, _held } = self;
        let service = TowerToHyperService::new(service);
        let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
        let mut begun = pin!(closing.begun());
        let mut check = pin!(sleep(check_after(&limits.get())));
        let mut linger = interval(LINGER / CHECKS);
        let (mut is_closing, mut is_lingering, mut is_leaving) = (false, false, false);
        loop {
            tokio::select! {
                ended = connection.as_mut() => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, "a connection broke");
                    }
                    return;
                }
                () = activity.evicted() => return metrics.closed(Closed::Evicted),
                () = activity.flooded() => {
                    metrics.closed(Closed::Flood);
                    connection.as_mut().graceful_shutdown();
                    // No more frames are read. A GOAWAY tells the peer, if the peer reads it in time.
                    let _ = timeout(GOODBYE, connection).await;
                    return;
                }
                () = &mut begun, if !is_closing => {
                    is_closing = true;
                    let rest = activity.rest_over_http1();
                    let longest = if closing.is_gentle() { LINGER } else { Duration::ZERO };
                    is_lingering = rest.is_some_and(|rest| rest <= longest);
                    if !is_lingering {
                        connection.as_mut().graceful_shutdown();
                    }
                }
                _ = linger.tick(), if is_lingering => {
                    if activity.rest_over_http1().is_none_or(|rest| rest >= LINGER) {
                        is_lingering = false;
                        connection.as_mut().graceful_shutdown();
                    }
                }
                () = &mut check => {
                    let limits = limits.get();
                    check.as_mut().reset(tokio::time::Instant::now() + check_after(&limits));
                    if do_age && !is_leaving && activity.retires(&limits) {
                        metrics.closed(Closed::Age);
                        // The next HTTP/1 response closes the connection.
                        if activity.rest_over_http1().is_none() {
                            is_leaving = true;
                            connection.as_mut().graceful_shutdown();
                        }
                    }
                    match activity.overdue(&limits) {
                        None => {}
                        Some(Overdue::Idle) if !is_leaving => {
                            // Over HTTP/2 a GOAWAY tells the peer to open another connection for its next request.
                            is_leaving = true;
                            metrics.closed(Closed::Idle);
                            connection.as_mut().graceful_shutdown();
                        }
                        Some(Overdue::Head) => return metrics.closed(Closed::Head),
                        Some(Overdue::Idle) => return,
                    }
                }
            }
        }
    }
}
