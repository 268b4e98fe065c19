//! Calls that the emulated driver refuses: graphs, managed memory and cooperative launches. They return
//! `CUDA_ERROR_NOT_SUPPORTED`, which is a clearer error than a missing symbol.

use std::ffi::c_void;

use super::calls;
use crate::error::Error;

calls! {
    fn cuStreamBeginCapture_v2(_stream: *mut c_void, _mode: u32) {
        Err(Error::NOT_SUPPORTED)
    }
    fn cuStreamEndCapture(_stream: *mut c_void, _graph: *mut c_void) {
        Err(Error::NOT_SUPPORTED)
    }
    fn cuGraphInstantiateWithFlags(_instance: *mut c_void, _graph: *mut c_void, _flags: u64) {
        Err(Error::NOT_SUPPORTED)
    }
    fn cuGraphLaunch(_instance: *mut c_void, _stream: *mut c_void) {
        Err(Error::NOT_SUPPORTED)
    }
    fn cuMemAllocManaged(_address: *mut u64, _bytes: usize, _flags: u32) {
        Err(Error::NOT_SUPPORTED)
    }
    fn cuLaunchCooperativeKernel(
        _function: *mut c_void, _bx: u32, _by: u32, _bz: u32, _tx: u32, _ty: u32, _tz: u32, _shared_bytes: u32,
        _stream: *mut c_void, _arguments: *mut *mut c_void,
    ) {
        Err(Error::NOT_SUPPORTED)
    }
}
