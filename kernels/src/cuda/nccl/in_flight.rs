//! The collectives in flight. If a rank never joins a collective, the streams of all other ranks wait for ever.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::DeviceError;
use crate::collective::Operation;
use crate::cuda::context::{Event, Gpu};

/// The collectives that the stream has not passed yet, as far as the host knows.
///
/// The clock starts when a collective is enqueued while none is in flight, and restarts whenever the stream passes one.
/// A long step therefore does not count as a hang as long as its collectives complete.
pub(super) struct InFlight {
    gpu: Arc<Gpu>,
    /// The collectives in order, each with an event that was recorded after it.
    ahead: VecDeque<(Event, Operation)>,
    /// Events to reuse.
    free: Vec<Event>,
    since: Instant,
}

impl InFlight {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Self {
        Self { gpu: gpu.clone(), ahead: VecDeque::new(), free: Vec::new(), since: Instant::now() }
    }

    /// Records an event after a collective that has just been enqueued.
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

    /// Forgets the collectives that the stream has passed. Returns the next collective, and the time since the clock's
    /// last start.
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
