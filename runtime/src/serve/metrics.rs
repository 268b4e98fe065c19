//! Counts of connections, by listener.

use prometheus_client::encoding::EncodeLabelSet;

use crate::{
    declare_metrics,
    metrics::metrics::{counter::Counter, family::Family, gauge::Gauge},
};

/// Purpose of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Clients over HTTP.
    Http,
    /// Clients over gRPC.
    Grpc,
    /// Probes and scrapers, at the address for operations.
    Operations,
    /// Routers and operators.
    Cluster,
    /// Workers that join.
    Workers,
}

impl Purpose {
    fn label(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
            Self::Operations => "operations",
            Self::Cluster => "cluster",
            Self::Workers => "workers",
        }
    }
}

/// Reason for which a server closes a connection before its peer does, apart from shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Closed {
    /// The listener or the peer has its maximum number of connections, and all of them are busy.
    Limit,
    /// The connection was idle, and the server closed it to make room for another one.
    Evicted,
    /// The TLS handshake failed or took too long.
    Handshake,
    /// The head of a request took too long.
    Head,
    /// The connection had no request for too long.
    Idle,
    /// The connection reached its maximum age.
    Age,
    /// The peer sent too many frames that carry no request.
    Flood,
}

impl Closed {
    const ALL: [Self; 7] =
        [Self::Limit, Self::Evicted, Self::Handshake, Self::Head, Self::Idle, Self::Age, Self::Flood];

    fn label(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Evicted => "evicted",
            Self::Handshake => "handshake",
            Self::Head => "head_timeout",
            Self::Idle => "idle_timeout",
            Self::Age => "max_age",
            Self::Flood => "flood",
        }
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ListenerLabel {
    listener: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ClosedLabel {
    listener: &'static str,
    reason: &'static str,
}

declare_metrics! {
    /// Metrics of all listeners of a process. Clones share the metrics.
    #[derive(Clone, Debug, Default)]
    pub struct ConnectionMetrics {
        open: Family<ListenerLabel, Gauge>, "connections_open", "Open connections";
        closed: Family<ClosedLabel, Counter>, "connections_closed",
            "Connections that the server closed before their peers did, by reason";
    }
}

impl ConnectionMetrics {
    /// The metrics of one listener.
    pub(super) fn of(&self, purpose: Purpose) -> ListenerMetrics {
        let listener = purpose.label();
        let open = self.open.get_or_create(&ListenerLabel { listener }).clone();
        // Creates each reason's series at 0. Otherwise Prometheus would not see the first close as an increase.
        for reason in Closed::ALL {
            self.closed.get_or_create(&ClosedLabel { listener, reason: reason.label() }).inc_by(0);
        }
        ListenerMetrics { listener, open, closed: self.closed.clone() }
    }
}

/// Metrics of one listener.
#[derive(Clone, Debug, Default)]
pub(super) struct ListenerMetrics {
    listener: &'static str,
    open: Gauge,
    closed: Family<ClosedLabel, Counter>,
}

impl ListenerMetrics {
    /// Counts a connection as open until the value is dropped.
    pub fn opened(&self) -> OpenCount {
        self.open.inc();
        OpenCount(self.open.clone())
    }

    /// Counts a connection that the server closes.
    pub fn closed(&self, reason: Closed) {
        let label = ClosedLabel { listener: self.listener, reason: reason.label() };
        self.closed.get_or_create(&label).inc();
    }
}

/// Counts one connection as open until the value is dropped.
#[derive(Debug)]
pub(super) struct OpenCount(Gauge);

impl Drop for OpenCount {
    fn drop(&mut self) {
        self.0.dec();
    }
}
