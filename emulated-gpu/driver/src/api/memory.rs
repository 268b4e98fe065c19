//! Memory and copies.
//!
//! Copies follow CUDA's page "API synchronization behavior". Pinned host memory is read and written when the copy runs
//! in its stream. Pageable memory is read during the call. A copy to pageable memory ends before the call returns.

use std::ffi::c_void;
use std::sync::Arc;

use super::{Out, calls};
use crate::context::{Context, stream};
use crate::error::{Error, Outcome};
use crate::host_memory;
use crate::memory::{illegal, is_device_address};
use crate::queue::LEGACY;
use crate::state;

/// `CU_MEMHOSTALLOC_DEVICEMAP`: kernels can read and write the memory.
const DEVICE_MAP: u32 = 2;

/// A host range that enqueued work reads or writes.
struct HostRange {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the range outlives the work. Pinned memory is freed after all work, and a call with pageable memory waits for
// its work.
unsafe impl Send for HostRange {}

impl HostRange {
    fn new(start: *const c_void, bytes: usize) -> Outcome<Self> {
        if start.is_null() || is_device_address(start.addr() as u64) {
            return Err(Error::INVALID_VALUE);
        }
        Ok(HostRange { start: start.cast::<u8>().cast_mut(), bytes })
    }

    fn is_pinned(&self) -> bool {
        host_memory::is_pinned(self.start.addr(), self.bytes)
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the program passed a range of `bytes` bytes, and does not touch the range before the copy has run.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the program passed a range of `bytes` bytes, and does not touch the range before the copy has run.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

/// States whether a call waits for its work before it returns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waits {
    Yes,
    No,
}

fn run(
    context: &Arc<Context>,
    line: u64,
    waits: Waits,
    work: impl FnOnce(&Context) -> Outcome + Send + 'static,
) -> Outcome {
    match waits {
        Waits::Yes => context.run(line, work),
        Waits::No => context.submit(line, work),
    }
}

fn to_device(
    to: (Arc<Context>, u64),
    target: u64,
    source: *const c_void,
    bytes: usize,
    waits: Waits,
) -> Outcome {
    let (context, line) = to;
    context.queue.check()?;
    if bytes == 0 {
        return Ok(());
    }
    let source = HostRange::new(source, bytes)?;
    context.memory.check(target, bytes as u64)?;
    let copy = move |context: &Context, source: &[u8]| {
        let copied = context.memory.device.copy_in(target, source);
        copied.map_err(|error| illegal("copy to the device", context.device, &error))
    };
    if source.is_pinned() {
        run(&context, line, waits, move |context| copy(context, source.bytes()))
    } else {
        let staged = source.bytes().to_vec();
        run(&context, line, waits, move |context| copy(context, &staged))
    }
}

fn to_host(
    from: (Arc<Context>, u64),
    target: *mut c_void,
    source: u64,
    bytes: usize,
    waits: Waits,
) -> Outcome {
    let (context, line) = from;
    context.queue.check()?;
    if bytes == 0 {
        return Ok(());
    }
    let mut target = HostRange::new(target, bytes)?;
    context.memory.check(source, bytes as u64)?;
    let waits = if target.is_pinned() { waits } else { Waits::Yes };
    run(&context, line, waits, move |context| {
        let copied = context.memory.device.copy_out(source, target.bytes_mut());
        copied.map_err(|error| illegal("copy to the host", context.device, &error))
    })
}

fn within(on: (Arc<Context>, u64), target: u64, source: u64, bytes: usize, waits: Waits) -> Outcome {
    let (context, line) = on;
    context.queue.check()?;
    if bytes == 0 {
        return Ok(());
    }
    context.memory.check(target, bytes as u64)?;
    context.memory.check(source, bytes as u64)?;
    run(&context, line, waits, move |context| {
        let copied = context.memory.device.copy_within(target, source, bytes as u64);
        copied.map_err(|error| illegal("copy on the device", context.device, &error))
    })
}

/// Fills `count` elements at `target` with `pattern`, which holds the bytes of one element.
fn fill(on: (Arc<Context>, u64), target: u64, pattern: &[u8], count: usize, waits: Waits) -> Outcome {
    let (context, line) = on;
    context.queue.check()?;
    if count == 0 {
        return Ok(());
    }
    let bytes = count.checked_mul(pattern.len()).ok_or(Error::INVALID_VALUE)? as u64;
    if !target.is_multiple_of(pattern.len() as u64) {
        return Err(Error::INVALID_VALUE);
    }
    context.memory.check(target, bytes)?;
    let pattern = pattern.to_vec();
    run(&context, line, waits, move |context| {
        let filled = context.memory.device.fill(target, bytes, &pattern);
        filled.map_err(|error| illegal("fill", context.device, &error))
    })
}

/// Returns the current context and its legacy default stream, which calls without a stream argument use.
fn legacy() -> Outcome<(Arc<Context>, u64)> {
    Ok((state::current()?, LEGACY))
}

calls! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let context = state::current()?;
        context.queue.check()?;
        free.set(context.memory.free_bytes() as usize)?;
        total.set(context.memory.capacity as usize)
    }
    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        if bytes == 0 {
            return Err(Error::INVALID_VALUE);
        }
        address.set(state::current()?.allocate(bytes as u64)?)
    }
    /// Allocates at once, not in stream order. So the address is also valid in other streams at once.
    fn cuMemAllocAsync(address: Out<u64>, bytes: usize, of: *mut c_void) {
        let (context, _) = stream(of)?;
        address.set(if bytes == 0 { 0 } else { context.allocate(bytes as u64)? })
    }
    fn cuMemFree_v2(address: u64) {
        if address == 0 {
            return Ok(());
        }
        let context = state::current()?;
        context.queue.check()?;
        context.memory.will_free(address)?;
        context.queue.wait_for_all()?;
        context.memory.free(address)
    }
    fn cuMemFreeAsync(address: u64, of: *mut c_void) {
        let (context, line) = stream(of)?;
        context.queue.check()?;
        if address == 0 {
            return Ok(());
        }
        context.memory.will_free(address)?;
        context.submit(line, move |context| context.memory.free(address))
    }
    fn cuMemGetAddressRange_v2(base: Out<u64>, bytes: Out<usize>, address: u64) {
        let context = state::current()?;
        let (first, size) = context.memory.device.allocation(address).ok_or(Error::NOT_FOUND)?;
        base.set_if_wanted(first);
        bytes.set_if_wanted(size as usize);
        Ok(())
    }
    fn cuMemHostAlloc(block: Out<*mut c_void>, bytes: usize, flags: u32) {
        let context = state::current()?;
        context.queue.check()?;
        block.set(match flags & DEVICE_MAP {
            0 => host_memory::allocate(bytes)?,
            _ => host_memory::allocate_mapped(&context, bytes)?,
        })
    }
    fn cuMemHostGetDevicePointer_v2(address: Out<u64>, host: *const c_void, _flags: u32) {
        state::current()?;
        address.set(host_memory::device_address(host)?)
    }
    fn cuMemAllocHost_v2(block: Out<*mut c_void>, bytes: usize) {
        state::current()?.queue.check()?;
        block.set(host_memory::allocate(bytes)?)
    }
    fn cuMemFreeHost(block: *mut c_void) {
        for context in state::contexts() {
            // If the wait returns an error, the memory can still be freed, because a context with an error runs no more
            // work.
            let _ = context.queue.wait_for_all();
        }
        host_memory::free(block)
    }
    fn cuMemcpyHtoD_v2(target: u64, source: *const c_void, bytes: usize) {
        to_device(legacy()?, target, source, bytes, Waits::Yes)
    }
    fn cuMemcpyHtoDAsync_v2(target: u64, source: *const c_void, bytes: usize, of: *mut c_void) {
        to_device(stream(of)?, target, source, bytes, Waits::No)
    }
    fn cuMemcpyDtoH_v2(target: *mut c_void, source: u64, bytes: usize) {
        to_host(legacy()?, target, source, bytes, Waits::Yes)
    }
    fn cuMemcpyDtoHAsync_v2(target: *mut c_void, source: u64, bytes: usize, of: *mut c_void) {
        to_host(stream(of)?, target, source, bytes, Waits::No)
    }
    fn cuMemcpyDtoD_v2(target: u64, source: u64, bytes: usize) {
        within(legacy()?, target, source, bytes, Waits::No)
    }
    fn cuMemcpyDtoDAsync_v2(target: u64, source: u64, bytes: usize, of: *mut c_void) {
        within(stream(of)?, target, source, bytes, Waits::No)
    }
    fn cuMemsetD8_v2(target: u64, value: u8, count: usize) {
        fill(legacy()?, target, &[value], count, Waits::No)
    }
    fn cuMemsetD8Async(target: u64, value: u8, count: usize, of: *mut c_void) {
        fill(stream(of)?, target, &[value], count, Waits::No)
    }
    fn cuMemsetD16_v2(target: u64, value: u16, count: usize) {
        fill(legacy()?, target, &value.to_ne_bytes(), count, Waits::No)
    }
    fn cuMemsetD16Async(target: u64, value: u16, count: usize, of: *mut c_void) {
        fill(stream(of)?, target, &value.to_ne_bytes(), count, Waits::No)
    }
    fn cuMemsetD32_v2(target: u64, value: u32, count: usize) {
        fill(legacy()?, target, &value.to_ne_bytes(), count, Waits::No)
    }
    fn cuMemsetD32Async(target: u64, value: u32, count: usize, of: *mut c_void) {
        fill(stream(of)?, target, &value.to_ne_bytes(), count, Waits::No)
    }
}
