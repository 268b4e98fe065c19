//! Ids as types, so that a rank is never taken for a worker nor a graph for a request.

use std::fmt;

use crate::cluster::v1 as pb;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// One request, minted by the conductor that accepted it; never a client's own number.
    RequestId(u64)
}
id! {
    /// Which try of a request: 0, then one more for each replay.
    Incarnation(u32)
}
id! {
    /// Which worker graph of a request, in the order in which they run.
    GraphId(u32)
}
id! {
    /// Which forward pass of a worker graph, counted from 0.
    Epoch(u32)
}
id! {
    /// Place in the cluster's order of processes; within a TP group, rank 0 of the group leads.
    Rank(u32)
}
id! {
    /// One life of one worker process: a restarted worker has a new id, so messages of the old one match nothing.
    WorkerId(u32)
}
id! {
    /// A worker's own count of steps.
    StepNumber(u64)
}

impl Incarnation {
    /// The next try.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl Epoch {
    /// The next pass.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// Names one try of one part of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GraphKey {
    /// The request.
    pub request: RequestId,
    /// Which try of it.
    pub incarnation: Incarnation,
    /// Which of its worker graphs.
    pub graph: GraphId,
}

impl fmt::Display for GraphKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.request, self.incarnation, self.graph)
    }
}

impl From<GraphKey> for pb::GraphKey {
    fn from(key: GraphKey) -> Self {
        Self { request: key.request.0, incarnation: key.incarnation.0, graph: key.graph.0 }
    }
}

impl From<pb::GraphKey> for GraphKey {
    fn from(key: pb::GraphKey) -> Self {
        Self {
            request: RequestId(key.request),
            incarnation: Incarnation(key.incarnation),
            graph: GraphId(key.graph),
        }
    }
}
