//! Decode rows that are prepared for the next plan while the device still runs the current step.
//!
//! Most rows of a step are decodes. Everything in a decode row but its input token is known before the previous step
//! returns, and the engine fills in the token. Rows are prepared on the assumption that the current step succeeds and
//! ends no request. Once that step is committed, the plan takes each prepared row whose assumption held, drops the
//! other prepared rows, and makes the missing rows itself.
//!
//! Arrivals, the ends of requests and the step's duration are not known in advance. Admission, preemption and the
//! tokens of each prefill depend on them, so the plan alone decides these. A plan with prepared rows is therefore
//! equal, row by row, to the plan without them. A prepared row holds no page and no slot.

use std::{collections::BTreeMap, vec};

use crate::{request::Running, step::Row, ticket::Ticket};

/// Decode rows that the next plan may take: at most one for each request, in the order of their tickets.
#[derive(Debug, Default)]
pub(crate) struct PreparedDecodes(vec::IntoIter<Row>);

impl PreparedDecodes {
    /// Prepares the next decode of every request that will decode.
    pub fn new(running: &BTreeMap<Ticket, Running>, page_tokens: usize) -> Self {
        let mut rows = Vec::with_capacity(running.len());
        rows.extend(running.iter().filter_map(|(&ticket, request)| request.next_decode(ticket, page_tokens)));
        Self(rows.into_iter())
    }

    /// Takes the prepared row of the request of `ticket`, if there is such a row and `holds` is true for the row. Calls
    /// must come in the order of tickets, because a call drops the rows of all earlier tickets.
    pub fn take(&mut self, ticket: Ticket, holds: impl FnOnce(&Row) -> bool) -> Option<Row> {
        // The row is compared where it is and moved only if it matches: moving a row takes longer than comparing it.
        while let Some(row) = self.0.as_slice().first().filter(|row| row.ticket <= ticket) {
            if row.ticket == ticket {
                return if holds(row) { self.0.next() } else { None };
            }
            self.0.next();
        }
        None
    }
}
