//! Helpers of the tests: devices, numbers and steps.

#[path = "../support/numbers.rs"]
mod numbers;
#[path = "../support/paths.rs"]
mod paths;
#[path = "../support/steps.rs"]
mod steps;

use std::time::Instant;

use tutti_kernels::cpu::{CpuDevice, Isa, Planes, Tensor};
use tutti_kernels::{Device, DeviceError, PlanesShape, StepResults};

pub use numbers::{Random, assert_near, bits, bytes, matrix, stored};
pub use paths::testable;
pub use steps::Share;

/// Devices on every instruction path that this machine supports, with one thread and with two.
pub fn devices(test: &str) -> Vec<(String, CpuDevice)> {
    let variants = testable(test).into_iter().flat_map(|isa| [1, 2].map(|threads| (isa, threads)));
    variants
        .map(|(isa, threads)| {
            (format!("{isa} with {threads} threads"), CpuDevice::new(threads, isa).unwrap())
        })
        .collect()
}

/// Numbers after rounding to block floating point, in BFP blocks of sixty-four whose largest magnitude has `bits` bits.
pub fn in_bfp_blocks(x: &[f32], bits: i32) -> Vec<f64> {
    let round = |block: &[f32]| {
        let largest = block.iter().fold(0.0f64, |most, x| most.max(f64::from(x.abs())));
        let unit = if largest == 0.0 { 1.0 } else { 2f64.powi(largest.log2().floor() as i32 + 1 - bits) };
        block.iter().map(|x| (f64::from(*x) / unit).round_ties_even() * unit).collect::<Vec<_>>()
    };
    x.chunks(64).flat_map(round).collect()
}

/// A tensor that holds `values`, in rows of `width`.
pub fn tensor(device: &mut CpuDevice, width: usize, values: &[f32]) -> Tensor {
    let mut tensor = device.tensor(values.len() / width, width).unwrap();
    tensor.fill(values).unwrap();
    tensor
}

/// Begins a step with these rows, without planes.
pub fn begin(device: &mut CpuDevice, shares: &[Share], ids: &[u32], logit_rows: &[usize]) {
    let mut planes = device.planes(&PlanesShape::default()).unwrap();
    try_begin(device, &mut planes, shares, ids, logit_rows).unwrap();
}

/// Begins a step with these rows.
pub fn try_begin(
    device: &mut CpuDevice,
    planes: &mut Planes,
    shares: &[Share],
    ids: &[u32],
    logit_rows: &[usize],
) -> Result<(), DeviceError> {
    steps::begin(device, planes, shares, ids, logit_rows, &[])
}

/// Ends the step and returns its results.
pub fn results(device: &mut CpuDevice) -> StepResults {
    let (mut done, mut results) = (device.end_step().unwrap(), StepResults::default());
    assert!(device.collect(&mut done, Some(Instant::now()), &mut results).unwrap(), "a CPU is never late");
    results
}
