//! The collectives in flight. A rank that never joins one makes the streams of all others wait for ever.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::DeviceError;
use crate::collective::Operation;
use crate::cuda::context::{Event, Gpu};

/// The collectives that the stream has not passed, as far as is known.
///
/// The clock measures the time since the stream last passed a collective, or since one was enqueued while it had none.
/// So a long step does not count as a hang, as long as its collectives go by.
pub(super) struct InFlight {
    gpu: Arc<Gpu>,
    /// A point behind each collective.
    ahead: VecDeque<(Event, Operation)>,
    /// Events to use again.
    free: Vec<Event>,
    since: Instant,
}

impl InFlight {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: gpu.clone(), ahead: VecDeque::new(), free: Vec::new(), since: Instant::now() }
    }

    /// Marks the point behind a collective that has just been enqueued.
    pub(super) fn mark(&mut self, operation: Operation) -> Result<(), DeviceError> {
        let event = match self.free.pop() {
            Some(event) => event.record_again()?,
            None => Event::record(&self.gpu)?,
        };
        if self.ahead.is_empty() {
            self.since = Instant::now();
        }
        self.ahead.push_back((event, operation));
        Ok(())
    }

    /// Forgets the collectives that the stream has passed. Returns the next one and the time for which it is due.
    pub(super) fn next(&mut self) -> Result<Option<(Operation, Duration)>, DeviceError> {
        while let Some((event, operation)) = self.ahead.front() {
            let reached =
                event.is_reached().map_err(|error| self.gpu.lost("waiting for a collective", error))?;
            if !reached {
                return Ok(Some((*operation, self.since.elapsed())));
            }
            self.since = Instant::now();
            self.free.extend(self.ahead.pop_front().map(|(event, _)| event));
        }
        Ok(None)
    }
}
