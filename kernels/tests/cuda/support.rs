//! Devices, numbers and steps for the tests.

#[path = "../support/numbers.rs"]
mod numbers;
#[path = "../support/paths.rs"]
mod paths;
#[path = "../support/steps.rs"]
mod steps;

use std::io::Write;
use std::sync::Once;

use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_kernels::cuda::{self, CudaDevice, KernelCache};
use tutti_kernels::{
    Collectives, DeltaRule, Dense, Device, DeviceError, Encoder, Experts, PagedAttention, Recurrence,
    Sampler, StepResults,
};

pub use numbers::{Random, assert_near, bits, bytes, matrix, stored};
pub use steps::{Share, begin};

/// A device with all families of operations that the CPU device and the CUDA device have in common.
pub trait Families:
    Dense + Encoder + Experts + PagedAttention + DeltaRule + Recurrence + Collectives + Sampler
{
}

impl<D: Dense + Encoder + Experts + PagedAttention + DeltaRule + Recurrence + Collectives + Sampler> Families
    for D
{
}

/// A computation that runs on any device.
pub trait Case {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32>;
}

/// Reports that a test is skipped, or fails if the environment requires the test. The first report goes directly to
/// stderr, since the test harness shows a test's output only if the test fails.
pub fn skipped(test: &str, why: &str) {
    static SAID: Once = Once::new();
    assert!(std::env::var_os("CUDA_TESTS").is_none_or(|value| value != "required"), "{test}: {why}");
    SAID.call_once(|| {
        let _ = std::io::stderr().write_all(format!("SKIPPED, {test} and more: {why}\n").as_bytes());
    });
    eprintln!("{test}: SKIPPED: {why}");
}

/// Opens the first GPU. If there is none, reports it and returns `None`. Also reports the instruction paths that the
/// CPU lacks.
pub fn cuda(test: &str) -> Option<CudaDevice> {
    paths::testable(test);
    match cuda::gpus() {
        Ok(_) => Some(CudaDevice::open(0, &KernelCache::of_user()).unwrap()),
        Err(missing) => {
            skipped(test, &missing.to_string());
            None
        }
    }
}

/// Returns a CPU device for each instruction path of this machine. A GPU must give the numbers of all of them, so that
/// the result of a test does not depend on the machine.
pub fn cpus() -> impl Iterator<Item = (Isa, CpuDevice)> {
    Isa::supported().map(|isa| (isa, CpuDevice::new(1, isa).unwrap()))
}

/// Asserts that a GPU gives the CPU's numbers up to `tolerance`, relative to the largest of them, on each instruction
/// path.
#[track_caller]
pub fn compare(gpu: &mut CudaDevice, what: &str, case: &impl Case, tolerance: f32) {
    let got = case.run(gpu);
    for (isa, mut cpu) in cpus() {
        assert_near(&format!("{what} on {isa}"), &got, &case.run(&mut cpu), f64::from(tolerance));
    }
}

/// A tensor with room for more rows, which holds `values` in rows of `width`.
pub fn tensor<D: Device>(device: &mut D, width: usize, values: &[f32]) -> D::Tensor {
    let mut tensor = device.tensor(values.len() / width + 1, width).unwrap();
    device.upload(values, &mut tensor).unwrap();
    tensor
}

/// The live values of a tensor.
pub fn values<D: Device>(device: &mut D, tensor: &D::Tensor) -> Vec<f32> {
    let mut values = Vec::new();
    device.download(tensor, &mut values).unwrap();
    values
}

/// Ends the step and returns its results.
pub fn results<D: Device>(device: &mut D) -> Result<StepResults, DeviceError> {
    let (mut done, mut results) = (device.end_step()?, StepResults::default());
    assert!(device.collect(&mut done, None, &mut results)?, "a wait without a limit ends with the step");
    Ok(results)
}
