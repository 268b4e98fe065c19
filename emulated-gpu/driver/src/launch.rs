//! Launches of kernels: the checks at the call, and the work in the stream.

use std::ffi::c_void;
use std::sync::Arc;

use tutti_emulated_gpu::{Checks, FaultKind as KernelFault, Grid, Kernel, launch};

use crate::context::Context;
use crate::error::{Error, Outcome};
use crate::faults::FaultKind;
use crate::memory::report;
use crate::module::Function;
use crate::queue::Entry;

/// Largest number of blocks in each direction.
const MAX_BLOCKS: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// Largest number of threads in each direction.
const MAX_THREADS: [u32; 3] = [1024, 1024, 64];

/// Faults on demand that can apply to a launch.
pub const LAUNCH_FAULTS: &[FaultKind] =
    &[FaultKind::Refuse, FaultKind::Break, FaultKind::Fail, FaultKind::Hang];
/// Name of a cuBLASLt matrix product in `EMULATED_GPU_FAULTS`.
pub const PRODUCT: &str = "cublasLtMatmul";

/// Keys of the list `extra` (`CU_LAUNCH_PARAM_…`).
const END: usize = 0;
const BUFFER_POINTER: usize = 1;
const BUFFER_SIZE: usize = 2;

/// Launches a function in a stream.
///
/// # Errors
///
/// `INVALID_VALUE` for a grid, a block or shared memory beyond the limits of the device or the function,
/// `LAUNCH_OUT_OF_RESOURCES` by a rule of `EMULATED_GPU_FAULTS`, `INVALID_HANDLE` for a function of another context,
/// and the sticky error.
pub fn submit(
    context: &Arc<Context>,
    line: u64,
    function: Arc<Function>,
    grid: Grid,
    parameters: Vec<u8>,
) -> Outcome {
    context.queue.check()?;
    if !Arc::ptr_eq(&function.module.context, context) {
        return Err(Error::INVALID_HANDLE);
    }
    let kernel = function.kernel()?;
    check(&function, kernel, &grid)?;
    let fault = context.settings.faults.next(LAUNCH_FAULTS, context.device, &kernel.name);
    if fault == Some(FaultKind::Refuse) {
        return Err(Error::LAUNCH_OUT_OF_RESOURCES);
    }
    let name = kernel.name.clone();
    submit_with(context, line, fault, name, move |context| run(context, &function, &grid, &parameters))
}

/// Enqueues `work`, the launch of kernel `name`, in a stream, and applies `fault`. A launch with the fault `Fail` or
/// `Hang` still runs `work` first.
///
/// # Errors
///
/// As for [`Context::submit`].
pub fn submit_with(
    context: &Arc<Context>,
    line: u64,
    fault: Option<FaultKind>,
    name: String,
    work: impl FnOnce(&Context) -> Outcome + Send + 'static,
) -> Outcome {
    match fault {
        Some(FaultKind::Break) => context.submit(line, move |context| {
            report(context.device, &format!("kernel {name}: the memory fails on demand"));
            Err(Error::ECC_UNCORRECTABLE)
        }),
        Some(FaultKind::Fail) => context.submit(line, move |context| {
            work(context)?;
            report(context.device, &format!("kernel {name}: fails on demand"));
            Err(Error::LAUNCH_FAILED)
        }),
        Some(FaultKind::Hang) => {
            context.submit(line, work)?;
            context.queue.submit(line, Entry::Hang)
        }
        _ => context.submit(line, work),
    }
}

fn check(function: &Function, kernel: &Kernel, grid: &Grid) -> Outcome {
    let fits = |n: [u32; 3], max: [u32; 3]| n.iter().zip(max).all(|(&n, max)| (1..=max).contains(&n));
    let allowed = fits(grid.blocks, MAX_BLOCKS)
        && fits(grid.threads, MAX_THREADS)
        && grid.threads_per_block() <= u64::from(Function::max_threads(kernel))
        && grid.dynamic_shared_bytes <= function.dynamic_shared_limit(kernel);
    if allowed { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

fn run(context: &Context, function: &Function, grid: &Grid, parameters: &[u8]) -> Outcome {
    let settings = context.settings;
    let checks = Checks {
        seed: settings.seed,
        races: settings.races,
        uninitialised: settings.uninitialised,
        threads: settings.threads,
    };
    let kernel = function.kernel()?;
    launch(&function.module.module, kernel, grid, parameters, &context.memory.device, &checks).map_err(
        |fault| {
            report(context.device, &fault.to_string());
            error(fault.kind)
        },
    )
}

/// Returns the error that a real GPU reports for a fault. A fault that a real GPU does not detect becomes a failed
/// launch.
fn error(fault: KernelFault) -> Error {
    match fault {
        KernelFault::OutOfBounds | KernelFault::UseAfterFree => Error::ILLEGAL_ADDRESS,
        KernelFault::Misaligned => Error::MISALIGNED_ADDRESS,
        KernelFault::Trap => Error::ASSERT,
        KernelFault::Stuck => Error::LAUNCH_TIMEOUT,
        _ => Error::LAUNCH_FAILED,
    }
}

/// Copies a kernel's arguments into its block of parameters.
///
/// # Errors
///
/// `INVALID_VALUE` if the kernel has parameters and both lists are missing, an argument is null, or the size of the
/// buffer in `extra` is not that of the block.
///
/// # Safety
///
/// `arguments` is null or holds a pointer to each argument, of the size that the kernel declares; `extra` is null or a
/// list of keys and values that ends with `END`.
pub unsafe fn parameters(
    kernel: &Kernel,
    arguments: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Outcome<Vec<u8>> {
    let mut block = vec![0; kernel.parameter_bytes() as usize];
    if !extra.is_null() {
        // SAFETY: `extra` is not null, so the caller promises that it is a list that ends with `END`.
        return unsafe { from_buffer(block, extra) };
    }
    if arguments.is_null() && !kernel.parameters.is_empty() {
        return Err(Error::INVALID_VALUE);
    }
    for (index, parameter) in kernel.parameters.iter().enumerate() {
        // SAFETY: the list has one pointer per parameter.
        let argument = unsafe { *arguments.add(index) };
        if argument.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        let (offset, bytes) = (parameter.offset as usize, parameter.bytes as usize);
        // SAFETY: the argument has as many bytes as the kernel declares.
        let argument = unsafe { std::slice::from_raw_parts(argument.cast::<u8>(), bytes) };
        block[offset..offset + bytes].copy_from_slice(argument);
    }
    Ok(block)
}

/// Copies the parameters from the single buffer that the list `extra` names.
///
/// # Safety
///
/// As for [`parameters`].
unsafe fn from_buffer(block: Vec<u8>, mut extra: *mut *mut c_void) -> Outcome<Vec<u8>> {
    let (mut buffer, mut size) = (std::ptr::null::<u8>(), None);
    loop {
        // SAFETY: `END` ends the list, and a value follows each other key.
        let (key, value) = unsafe {
            match (*extra).addr() {
                END => break,
                key => (key, *extra.add(1)),
            }
        };
        match key {
            BUFFER_POINTER => buffer = value.cast::<u8>(),
            // SAFETY: the value of this key is a pointer to a size.
            BUFFER_SIZE => size = Some(unsafe { *value.cast::<usize>() }),
            _ => return Err(Error::INVALID_VALUE),
        }
        // SAFETY: the list has not ended, so another element follows the two that were read.
        extra = unsafe { extra.add(2) };
    }
    if buffer.is_null() || size != Some(block.len()) {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the program passed the buffer with this size.
    Ok(unsafe { std::slice::from_raw_parts(buffer, block.len()) }.to_vec())
}
