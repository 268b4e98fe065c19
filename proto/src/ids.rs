//! Typed ids, so that a rank cannot be mistaken for a worker, nor a graph for a request.

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
    /// A request's id. The conductor chooses the id when it accepts the request. A client never chooses it.
    RequestId(u64)
}
id! {
    /// The number of a request's try. The first try is 0, and each replay adds one.
    Incarnation(u32)
}
id! {
    /// A worker graph's number within one try of a request.
    GraphId(u32)
}
id! {
    /// A forward pass of a worker graph, counted from 0.
    Epoch(u32)
}
id! {
    /// A worker's index among the cluster's workers, or within its tensor-parallel (TP) group. Rank 0 of a TP group is
    /// the group's leader.
    Rank(u32)
}
id! {
    /// A worker process. A restarted worker gets a new id, so that late messages of the old process match no worker.
    WorkerId(u32)
}
id! {
    /// A step's number among the steps of one worker.
    StepNumber(u64)
}

impl Incarnation {
    /// The number of the next try.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl Epoch {
    /// The number of the next forward pass.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

/// The identity of one worker graph of one try of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GraphKey {
    /// The request.
    pub request: RequestId,
    /// The try of the request.
    pub incarnation: Incarnation,
    /// The worker graph.
    pub graph: GraphId,
}

impl fmt::Display for GraphKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.request, self.incarnation, self.graph)
    }
}

impl GraphKey {
    /// Parses a displayed key; `None` if the text is not a key.
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split('.');
        let key = Self {
            request: RequestId(numbers.next()?.parse().ok()?),
            incarnation: Incarnation(numbers.next()?.parse().ok()?),
            graph: GraphId(numbers.next()?.parse().ok()?),
        };
        numbers.next().is_none().then_some(key)
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

#[cfg(test)]
mod tests;
