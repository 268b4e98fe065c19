//! The servers of a process, from the first connection to the end of the drain.

use tokio::{
    task::JoinSet,
    time::{Duration, sleep, timeout, timeout_at},
};
use tonic::service::Routes;
use tutti_settings::AddressSettings;

use super::{
    Background, Drain, Ports, Started,
    drain::{CLOSING, at_rest, ended},
};
use crate::{
    Error,
    health::Health,
    live::LiveSettings,
    operations::{self, Viewer},
    serve::{self, ConnectionLimits, ConnectionMetrics, Listener, Purpose, Windows},
    shutdown::Shutdown,
};

/// Services of a process for its clients.
pub struct Front {
    /// Routes of clients over HTTP.
    pub routes: axum::Router,
    /// Routes over HTTP that refuse requests, for clients that connect late in a drain.
    pub refusals: axum::Router,
    /// Services over gRPC.
    pub services: Routes,
    /// The readiness of the process.
    pub health: Health,
    /// True if no request of a client is running.
    pub is_idle: IsIdle,
}

/// Returns true if no request of a client is running.
pub(super) type IsIdle = Box<dyn Fn() -> bool + Send + Sync>;

/// Servers that end once `closing` begins.
#[derive(Default)]
struct Group {
    servers: JoinSet<Result<(), Error>>,
    closing: Shutdown,
}

impl Group {
    fn http(&mut self, listener: Listener, routes: axum::Router, connections: impl Into<ConnectionLimits>) {
        self.servers.spawn(serve::http(listener, routes, connections.into(), self.closing.clone()));
    }

    fn grpc(&mut self, listener: Listener, routes: Routes, connections: impl Into<ConnectionLimits>) {
        let windows = Windows::default();
        self.servers.spawn(serve::grpc(listener, routes, windows, connections.into(), self.closing.clone()));
    }

    /// Waits until a server ends too early, and returns the reason. Never returns if there is no server.
    async fn failed(&mut self) -> Error {
        match self.servers.join_next().await {
            None => std::future::pending().await,
            Some(Ok(Err(error))) => error,
            Some(Ok(Ok(()))) => Error::internal("a server has stopped serving"),
            Some(Err(error)) => Error::internal(format!("a server broke: {error}")),
        }
    }
}

/// The running servers of a process.
pub struct Servers {
    live: LiveSettings,
    addresses: AddressSettings,
    counts: ConnectionMetrics,
    health: Health,
    is_idle: IsIdle,
    /// Servers of clients. They accept no connections once the lame-duck time is over.
    clients: Group,
    /// Servers that accept connections until the end of the drain.
    others: Group,
    /// Listener and routes for clients that connect after the lame-duck time. The listener shares the socket of the
    /// clients' HTTP listener, so that connections in the accept queue are not reset.
    late: (Listener, axum::Router),
}

impl Servers {
    /// Serves clients and operators at their ports. Must be called inside a Tokio runtime.
    pub fn start<S>(process: &Started<S>, ports: Ports, front: Front) -> Result<Self, Error> {
        let Front { routes, refusals, services, health, is_idle } = front;
        let Ports { http, grpc, operations: probes, tls, addresses } = ports;
        process.metrics.follow_readiness(health.clone());
        let routes_for = |viewer| operations::routes(health.clone(), process.metrics.clone(), viewer);
        let (public, operations) = (routes_for(Viewer::Anyone), routes_for(Viewer::Operator));
        let moving = |routes| operations::moving_clients(public.clone().merge(routes), health.clone());
        let connections = process.live.connections.clone();
        let (http, grpc) = serve::encrypted(http, grpc, tls, process.metrics.reloads());
        let http = http.counted(&process.counts, Purpose::Http);
        let grpc = grpc.counted(&process.counts, Purpose::Grpc);
        let late =
            http.duplicate().map_err(|e| Error::internal(format!("cannot share the HTTP port: {e}")))?;
        let late = (late, moving(refusals));
        let (mut clients, mut others) = (Group::default(), Group::default());
        let of_clients = ConnectionLimits::from(connections.clone()).aging();
        clients.http(http, moving(routes), of_clients.clone());
        clients.grpc(grpc, services, of_clients);
        if let Some(probes) = probes {
            let probes = Listener::from(probes).counted(&process.counts, Purpose::Operations);
            others.http(probes, operations, connections);
        }
        let (live, counts) = (process.live.clone(), process.counts.clone());
        Ok(Self { live, addresses, counts, health, is_idle, clients, others, late })
    }

    /// Serves gRPC to other processes of the cluster, until the end of the drain. Each of their connections may have
    /// `streams` requests in progress.
    pub fn serve_cluster(&mut self, listener: impl Into<Listener>, routes: Routes, streams: u32) {
        let connections = ConnectionLimits::from(self.live.connections.clone()).with_streams(streams);
        self.others.grpc(listener.into().counted(&self.counts, Purpose::Cluster), routes, connections);
    }

    /// Serves until `shutdown` begins, and drains: see the module `drain`.
    ///
    /// # Errors
    /// A failure of a server or of `background` that ends the process without a shutdown.
    pub async fn run(mut self, shutdown: &Shutdown, mut background: impl Background) -> Result<(), Error> {
        tokio::select! {
            () = shutdown.begun() => {}
            error = background.failed() => return Err(error),
            error = self.clients.failed() => return Err(error),
            error = self.others.failed() => return Err(error),
        }
        self.health.drain();
        let lame_duck = self.live.drain.get().lame_duck(&self.addresses);
        tokio::select! {
            () = sleep(lame_duck) => {}
            error = background.failed() => return Err(error),
        }
        let Self { live, is_idle, mut clients, mut others, late: (late, routes), .. } = self;
        // With a lame-duck time, clients may be on other machines. A gentle close loses none of their requests.
        if lame_duck == Duration::ZERO {
            clients.closing.begin();
        } else {
            clients.closing.begin_gently();
        }
        others.http(late, routes, live.connections.clone());
        let drain = Drain::new(live.drain.get().drain_timeout());
        let finished = tokio::select! {
            finished = timeout_at(drain.deadline, at_rest(&mut clients.servers, &is_idle)) => finished.is_ok(),
            error = background.failed() => return Err(error),
        };
        background.drain(drain).await;
        others.closing.begin();
        let closed = async {
            // The clients of requests that did not finish in time must still receive the outcome.
            if !finished {
                ended(&mut clients.servers).await;
            }
            ended(&mut others.servers).await;
        };
        let _ = tokio::join!(timeout(CLOSING, closed), background.stop());
        tracing::info!("drained");
        Ok(())
    }
}
