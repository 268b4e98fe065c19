//! The table of driver functions that `libcublasLt` and `libnccl` call; see `tutti-emulated-exports`.

use std::ffi::{CStr, c_char, c_int, c_void};

use tutti_emulated_exports::{DriverTable, RawWork, StreamContext, VERSION};

use crate::context::stream;
use crate::error::{Error, Outcome, code};
use crate::faults::FaultKind;
use crate::launch::{PRODUCT, submit_with};
use crate::memory::{illegal, report};
use crate::queue::Entry;
use crate::state;

/// The table. Its name is `tutti_emulated_exports::SYMBOL`.
#[unsafe(no_mangle)]
pub static tutti_emulated_driver_table: DriverTable = DriverTable {
    version: VERSION,
    describe,
    submit,
    holds,
    readable,
    writable,
    copy_out,
    copy_in,
    never_joins,
};

/// Work of `libcublasLt` or `libnccl`. A drop before the work has run calls the owner's function with `false`.
struct ForeignWork {
    work: RawWork,
    state: *mut c_void,
}

// SAFETY: the state comes from a closure that is `Send`.
unsafe impl Send for ForeignWork {}

impl ForeignWork {
    fn run(self) -> Outcome {
        // SAFETY: the owner's function consumes its state. The function runs once, because `forget` prevents the drop.
        let result = unsafe { (self.work)(self.state, true) };
        std::mem::forget(self);
        if result == 0 { Ok(()) } else { Err(Error(result)) }
    }
}

impl Drop for ForeignWork {
    fn drop(&mut self) {
        // SAFETY: the work has not run, so the owner's function has not consumed its state yet.
        unsafe { (self.work)(self.state, false) };
    }
}

unsafe extern "C" fn describe(of: *mut c_void, out: *mut StreamContext) -> c_int {
    code(stream(of).map(|(context, _)| {
        let found = StreamContext {
            context: std::ptr::without_provenance_mut(context.handle),
            device: context.device as u32,
            ordinal: context.ordinal as u32,
        };
        // SAFETY: the caller's pointer is valid for a write.
        unsafe { out.write(found) };
    }))
}

unsafe extern "C" fn submit(to: *mut c_void, blocking: bool, work: RawWork, state: *mut c_void) -> c_int {
    let foreign = ForeignWork { work, state };
    code(stream(to).and_then(|(context, line)| {
        if blocking {
            return context.queue.submit(line, Entry::Blocking(Box::new(move || foreign.run())));
        }
        let kinds = [FaultKind::Break, FaultKind::Fail, FaultKind::Hang];
        let fault = context.settings.faults.next(&kinds, context.device, PRODUCT);
        submit_with(&context, line, fault, PRODUCT.to_owned(), move |_| foreign.run())
    }))
}

extern "C" fn holds(context: *mut c_void, address: u64, bytes: u64) -> bool {
    state::context(context).is_ok_and(|context| context.memory.check(address, bytes).is_ok())
}

/// Returns the text that names the reader or writer of a range.
fn name<'a>(by: *const c_char) -> std::borrow::Cow<'a, str> {
    // SAFETY: the calling library passes a text that ends with a zero byte.
    unsafe { CStr::from_ptr(by) }.to_string_lossy()
}

extern "C" fn readable(context: *mut c_void, address: u64, bytes: u64, by: *const c_char) -> *const u8 {
    let Ok(context) = state::context(context) else { return std::ptr::null() };
    let memory = &context.memory.device;
    let range = memory.host_pointer(address, bytes).and_then(|start| {
        let unwritten =
            if context.settings.uninitialised { memory.first_unwritten(address, bytes)? } else { None };
        Ok((start, unwritten))
    });
    match range {
        Ok((start, None)) => start,
        Ok((_, Some(at))) => {
            report(context.device, &format!("{} reads address {at:#x}, which nothing wrote", name(by)));
            std::ptr::null()
        }
        Err(error) => {
            illegal(&name(by), context.device, &error);
            std::ptr::null()
        }
    }
}

extern "C" fn writable(context: *mut c_void, address: u64, bytes: u64, by: *const c_char) -> *mut u8 {
    let Ok(context) = state::context(context) else { return std::ptr::null_mut() };
    let memory = &context.memory.device;
    match memory
        .host_pointer(address, bytes)
        .and_then(|start| memory.mark_written(address, bytes).map(|()| start))
    {
        Ok(start) => start,
        Err(error) => {
            illegal(&name(by), context.device, &error);
            std::ptr::null_mut()
        }
    }
}

unsafe extern "C" fn copy_out(context: *mut c_void, target: *mut u8, source: u64, bytes: u64) -> c_int {
    code(state::context(context).and_then(|context| {
        // SAFETY: the caller's buffer has `bytes` bytes.
        let target = unsafe { std::slice::from_raw_parts_mut(target, bytes as usize) };
        let copied = context.memory.device.copy_out(source, target);
        copied.map_err(|error| illegal("collective", context.device, &error))
    }))
}

unsafe extern "C" fn copy_in(context: *mut c_void, target: u64, source: *const u8, bytes: u64) -> c_int {
    code(state::context(context).and_then(|context| {
        // SAFETY: the caller's buffer has `bytes` bytes.
        let source = unsafe { std::slice::from_raw_parts(source, bytes as usize) };
        let copied = context.memory.device.copy_in(target, source);
        copied.map_err(|error| illegal("collective", context.device, &error))
    }))
}

unsafe extern "C" fn never_joins(device: u32, call: *const c_char) -> bool {
    let Ok(settings) = state::settings() else { return false };
    settings.faults.next(&[FaultKind::NeverJoins], device as usize, &name(call)).is_some()
}
