//! Launches a kernel over a grid of thread blocks.

use crate::exec::global_shadow::{LAST_LAUNCH, Orders};
use crate::exec::{Run, run_blocks};
use crate::{Checks, DeviceMemory, Fault, FaultKind, Grid, Kernel, Module};

/// Limits of a launch, as on devices of compute capability 8.0 to 9.0.
const MOST_THREADS: u64 = 1024;
const MOST_THREADS_OF_AXIS: [u32; 3] = [1024, 1024, 64];
const MOST_BLOCKS_OF_AXIS: [u32; 3] = [0x7fff_ffff, 65_535, 65_535];
const MOST_SHARED_BYTES: u32 = 227 * 1024;

/// Runs a kernel over a grid, and returns when the kernel has ended. `parameters` holds the kernel's parameters, each
/// at its offset.
///
/// # Errors
///
/// The first fault. It ends the launch. Writes before the fault stay in memory.
pub fn launch(
    module: &Module,
    kernel: &Kernel,
    grid: &Grid,
    parameters: &[u8],
    memory: &DeviceMemory,
    checks: &Checks,
) -> Result<(), Box<Fault>> {
    let refuse = |kind, what| Err(Box::new(Fault::of_launch(kind, &kernel.name, what)));
    if let Some(error) = &kernel.error {
        return refuse(FaultKind::Unsupported, error.to_string());
    }
    if let Some(what) = unfit(kernel, grid, parameters) {
        return refuse(FaultKind::Launch, what);
    }
    if !processor_fits() {
        return refuse(FaultKind::Unsupported, "the emulator needs a processor with AVX2 and FMA".to_owned());
    }
    let mut variables = Vec::new();
    for variable in &module.variables {
        match variable.address {
            Some(address) => variables.push(address),
            None => return refuse(FaultKind::Launch, "the module is not loaded".to_owned()),
        }
    }
    // A kernel reads each parameter at the parameter's alignment, which is at most 8 bytes.
    let mut aligned = vec![0u64; parameters.len().div_ceil(8)];
    for (word, bytes) in aligned.iter_mut().zip(parameters.chunks(8)) {
        let mut padded = [0; 8];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(padded);
    }
    // SAFETY: `aligned` holds at least `parameters.len()` bytes.
    let parameters = unsafe { std::slice::from_raw_parts(aligned.as_ptr().cast::<u8>(), parameters.len()) };
    let watched = memory.is_watched();
    let races = watched && checks.races;
    let run = Run {
        program: &kernel.program,
        kernel: &kernel.name,
        grid: *grid,
        parameters,
        memory: memory.snapshot(),
        device: memory,
        variables,
        checks: *checks,
        watched,
        shadows: checks.races || checks.uninitialised,
        launch_number: if races { memory.next_launch(LAST_LAUNCH) } else { 0 },
        orders: Orders::new(if races { grid.block_count() } else { 0 }),
        early_copies: checks.seed.is_some_and(|seed| seed % 2 == 1),
    };
    run_blocks(&run)
}

/// Returns the reason why a launch does not fit its kernel; none if the launch fits.
fn unfit(kernel: &Kernel, grid: &Grid, parameters: &[u8]) -> Option<String> {
    let (given, taken) = (parameters.len(), kernel.parameter_bytes());
    if given != taken as usize {
        return Some(format!("{given} bytes of parameters, the kernel takes {taken}"));
    }
    for axis in 0..3 {
        let (threads, blocks) = (grid.threads[axis], grid.blocks[axis]);
        if !(1..=MOST_THREADS_OF_AXIS[axis]).contains(&threads) {
            return Some(format!("{threads} threads on axis {axis}"));
        }
        if !(1..=MOST_BLOCKS_OF_AXIS[axis]).contains(&blocks) {
            return Some(format!("{blocks} blocks on axis {axis}"));
        }
    }
    let threads = grid.threads_per_block();
    let most = kernel.max_threads_per_block.map_or(MOST_THREADS, u64::from).min(MOST_THREADS);
    if threads > most {
        return Some(format!("{threads} threads per block, the kernel allows {most}"));
    }
    let shared = u64::from(kernel.static_shared_bytes) + u64::from(grid.dynamic_shared_bytes);
    if shared > u64::from(MOST_SHARED_BYTES) {
        return Some(format!("{shared} bytes of shared memory, a block may have {MOST_SHARED_BYTES}"));
    }
    None
}

/// True if the host's processor has the instructions that the loops over lanes are compiled for.
fn processor_fits() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("fma")
        && std::arch::is_x86_feature_detected!("f16c")
        && std::arch::is_x86_feature_detected!("bmi2")
        && std::arch::is_x86_feature_detected!("lzcnt");
    #[cfg(not(target_arch = "x86_64"))]
    true
}
