//! C functions for events (`cuEvent…`).

use std::ffi::c_void;
use std::sync::Arc;

use super::{Out, calls};
use crate::context::stream;
use crate::event::{EVENTS, Event};
use crate::state;

calls! {
    fn cuEventCreate(handle: Out<*mut c_void>, flags: u32) {
        let context = state::current()?;
        context.queue.check()?;
        handle.set(EVENTS.insert(Arc::new(Event::new(context, flags))))
    }
    fn cuEventDestroy_v2(handle: *mut c_void) {
        EVENTS.remove(handle).map(drop)
    }
    fn cuEventRecord(handle: *mut c_void, of: *mut c_void) {
        let (context, line) = stream(of)?;
        EVENTS.get(handle)?.record(&context, line)
    }
    fn cuEventRecordWithFlags(handle: *mut c_void, of: *mut c_void, _flags: u32) {
        let (context, line) = stream(of)?;
        EVENTS.get(handle)?.record(&context, line)
    }
    fn cuEventQuery(handle: *mut c_void) {
        EVENTS.get(handle)?.query()
    }
    fn cuEventSynchronize(handle: *mut c_void) {
        EVENTS.get(handle)?.synchronise()
    }
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: *mut c_void, end: *mut c_void) {
        milliseconds.set(EVENTS.get(start)?.milliseconds_until(&*EVENTS.get(end)?)?)
    }
    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: *mut c_void, end: *mut c_void) {
        milliseconds.set(EVENTS.get(start)?.milliseconds_until(&*EVENTS.get(end)?)?)
    }
}
