//! The order of requests.

/// A request's position in the one order that every policy follows: requests are admitted and served from the start of
/// the order, and preempted from its end. The position never changes, so the first request stays first until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket {
    /// The number of the next step when the request arrived, plus `HEAD_START` times the request's priority. A lower
    /// value comes first.
    pub came: i64,
    /// Serial number of the request, which orders requests with an equal `came`.
    pub number: u64,
}
