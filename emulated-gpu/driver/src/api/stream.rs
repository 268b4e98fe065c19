//! C functions for streams (`cuStream…`) and for host functions in a stream (`cuLaunchHostFunc`).

use std::ffi::c_void;

use super::{Out, calls};
use crate::context::{STREAMS, create_stream, stream};
use crate::error::{Error, Outcome};
use crate::event::EVENTS;

/// A host function of a stream (`CUhostFn`).
type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;

/// The argument of a host function. The program promises that the pointer is valid on another thread.
struct Argument(*mut c_void);

// SAFETY: `cuLaunchHostFunc` documents that the function runs on a thread of the driver.
unsafe impl Send for Argument {}

impl Argument {
    fn get(&self) -> *mut c_void {
        self.0
    }
}

calls! {
    fn cuStreamCreate(handle: Out<*mut c_void>, flags: u32) {
        handle.set(create_stream(flags)?)
    }
    fn cuStreamCreateWithPriority(handle: Out<*mut c_void>, flags: u32, _priority: i32) {
        handle.set(create_stream(flags)?)
    }
    fn cuStreamDestroy_v2(handle: *mut c_void) {
        let stream = STREAMS.remove(handle)?;
        stream.context.queue.close(stream.line);
        Ok(())
    }
    fn cuStreamGetFlags(handle: *mut c_void, flags: Out<u32>) {
        flags.set(if handle.addr() < 3 { 0 } else { STREAMS.get(handle)?.flags })
    }
    fn cuStreamGetPriority(handle: *mut c_void, priority: Out<i32>) {
        stream(handle)?;
        priority.set(0)
    }
    fn cuStreamGetCtx(handle: *mut c_void, context: Out<*mut c_void>) {
        context.set(std::ptr::without_provenance_mut(stream(handle)?.0.handle))
    }
    fn cuStreamGetDevice(handle: *mut c_void, device: Out<i32>) {
        device.set(stream(handle)?.0.ordinal as i32)
    }
    fn cuStreamSynchronize(handle: *mut c_void) {
        let (context, line) = stream(handle)?;
        context.queue.wait_for_line(line)
    }
    fn cuStreamQuery(handle: *mut c_void) {
        let (context, line) = stream(handle)?;
        if context.queue.is_idle(line)? { Ok(()) } else { Err(Error::NOT_READY) }
    }
    fn cuStreamWaitEvent(handle: *mut c_void, event: *mut c_void, _flags: u32) {
        let (context, line) = stream(handle)?;
        EVENTS.get(event)?.hold(&context, line)
    }
    fn cuLaunchHostFunc(handle: *mut c_void, function: HostFunction, argument: *mut c_void) {
        let (context, line) = stream(handle)?;
        let function = function.ok_or(Error::INVALID_VALUE)?;
        let argument = Argument(argument);
        context.submit(line, move |_| -> Outcome {
            // SAFETY: the program passed the function together with this argument.
            unsafe { function(argument.get()) };
            Ok(())
        })
    }
    fn cuStreamIsCapturing(handle: *mut c_void, status: Out<u32>) {
        stream(handle)?;
        status.set(0)
    }
}
