//! Events: a program records a point of a stream in an event, and can wait for this point.

use std::sync::{Arc, Mutex, PoisonError};

use crate::context::Context;
use crate::error::{Error, Outcome};
use crate::handles::Handles;
use crate::queue::{Entry, Point};

/// All events by their handles.
pub static EVENTS: Handles<Event> = Handles::new();

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

/// An event. It holds the last recorded point.
pub struct Event {
    context: Arc<Context>,
    timed: bool,
    latest: Mutex<Option<Arc<Point>>>,
}

impl Event {
    /// Creates an event without a recorded point.
    pub fn new(context: Arc<Context>, flags: u32) -> Self {
        Event { context, timed: flags & DISABLE_TIMING == 0, latest: Mutex::new(None) }
    }

    fn latest(&self) -> Option<Arc<Point>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records a point after all work that a stream has now. A stream that waits for an earlier point of this event
    /// keeps waiting for that point.
    ///
    /// # Errors
    ///
    /// `INVALID_HANDLE` for a stream of another context, and the sticky error.
    pub fn record(&self, context: &Arc<Context>, line: u64) -> Outcome {
        if !Arc::ptr_eq(&self.context, context) {
            return Err(Error::INVALID_HANDLE);
        }
        let point = Arc::new(Point::default());
        context.queue.submit(line, Entry::Record(point.clone()))?;
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(point);
        Ok(())
    }

    /// Makes a stream wait for the latest point. If no point has been recorded, the stream does not wait.
    ///
    /// # Errors
    ///
    /// `INVALID_HANDLE` for a stream of another context, and the sticky error.
    pub fn hold(&self, context: &Arc<Context>, line: u64) -> Outcome {
        if !Arc::ptr_eq(&self.context, context) {
            return Err(Error::INVALID_HANDLE);
        }
        match self.latest() {
            Some(point) => context.queue.submit(line, Entry::Wait(point)),
            None => context.queue.check(),
        }
    }

    /// Blocks the host until the latest point is past.
    ///
    /// # Errors
    ///
    /// The sticky error.
    pub fn synchronise(&self) -> Outcome {
        match self.latest() {
            Some(point) => self.context.queue.wait_for_point(&point),
            None => self.context.queue.check(),
        }
    }

    /// Returns `Ok` if the latest point is past.
    ///
    /// # Errors
    ///
    /// `NOT_READY` if the point is not past, and the sticky error.
    pub fn query(&self) -> Outcome {
        self.context.queue.check()?;
        if self.latest().is_none_or(|point| point.is_past()) { Ok(()) } else { Err(Error::NOT_READY) }
    }

    /// Returns the milliseconds from this event to `end`.
    ///
    /// # Errors
    ///
    /// `INVALID_HANDLE` if an event has no recorded point or no timing, `NOT_READY` if a point is not past.
    pub fn milliseconds_until(&self, end: &Event) -> Outcome<f32> {
        self.context.queue.check()?;
        if !self.timed || !end.timed {
            return Err(Error::INVALID_HANDLE);
        }
        let (start, end) = (self.latest().zip(end.latest())).ok_or(Error::INVALID_HANDLE)?;
        let (start, end) = start.time().zip(end.time()).ok_or(Error::NOT_READY)?;
        Ok(match end.checked_duration_since(start) {
            Some(after) => after.as_secs_f32() * 1e3,
            None => -start.duration_since(end).as_secs_f32() * 1e3,
        })
    }
}
