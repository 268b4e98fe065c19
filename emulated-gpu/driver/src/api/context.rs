//! Contexts: the primary context of each device, and the current context of a thread.

use std::ffi::c_void;

use super::{Out, calls};
use crate::error::Error;
use crate::state;

calls! {
    fn cuDevicePrimaryCtxRetain(context: Out<*mut c_void>, device: i32) {
        context.set(state::retain(device)?)
    }
    fn cuDevicePrimaryCtxRelease_v2(device: i32) {
        state::release(device)
    }
    fn cuDevicePrimaryCtxGetState(device: i32, flags: Out<u32>, active: Out<i32>) {
        let ordinal = state::device(device)?;
        flags.set_if_wanted(0);
        active.set(i32::from(state::contexts().iter().any(|context| context.ordinal == ordinal)))
    }
    fn cuCtxSetCurrent(context: *mut c_void) {
        state::set_current(context)
    }
    fn cuCtxGetCurrent(context: Out<*mut c_void>) {
        state::settings()?;
        context.set(state::current_handle())
    }
    fn cuCtxPushCurrent_v2(context: *mut c_void) {
        state::push_current(context)
    }
    fn cuCtxPopCurrent_v2(context: Out<*mut c_void>) {
        let popped = state::pop_current()?;
        context.set_if_wanted(popped);
        Ok(())
    }
    fn cuCtxGetDevice(device: Out<i32>) {
        device.set(state::current()?.ordinal as i32)
    }
    fn cuCtxSynchronize() {
        state::current()?.queue.wait_for_all()
    }
    fn cuCtxSetFlags(_flags: u32) {
        state::current().map(drop)
    }
    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        state::current()?;
        least.set_if_wanted(0);
        greatest.set_if_wanted(0);
        Ok(())
    }
    fn cuCtxGetLimit(_value: Out<usize>, _limit: u32) {
        Err(Error::UNSUPPORTED_LIMIT)
    }
    fn cuCtxSetLimit(_limit: u32, _value: usize) {
        Err(Error::UNSUPPORTED_LIMIT)
    }
    fn cuCtxGetCacheConfig(config: Out<u32>) {
        state::current()?;
        config.set(0)
    }
    fn cuCtxSetCacheConfig(_config: u32) {
        state::current().map(drop)
    }
}
