//! Both devices, numbers and steps.

use std::io::Write;
use std::sync::Once;

use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_kernels::cuda::{self, CudaDevice, KernelCache};
use tutti_kernels::{
    Collectives, DeltaRule, Dense, Device, DeviceError, Experts, HostMatrix, PageId, PagedAttention,
    Quantize, Recurrence, RowInputs, Sampler, SlotCopy, SlotId, StepInputs, StepResults, WeightType,
};

/// A device with the families that both devices have.
pub trait Families:
    Dense + Experts + PagedAttention + DeltaRule + Recurrence + Collectives + Sampler
{
}

impl<D: Dense + Experts + PagedAttention + DeltaRule + Recurrence + Collectives + Sampler> Families for D {}

/// A computation that is the same on every device.
pub trait Case {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32>;
}

/// Says that a test has not run, or fails if the environment requires it. The first line goes directly to stderr, since
/// the test harness shows a test's output only if the test fails.
pub fn skipped(test: &str, why: &str) {
    static SAID: Once = Once::new();
    assert!(std::env::var_os("CUDA_TESTS").is_none_or(|value| value != "required"), "{test}: {why}");
    SAID.call_once(|| {
        let _ = std::io::stderr().write_all(format!("SKIPPED, {test} and more: {why}\n").as_bytes());
    });
    eprintln!("{test}: SKIPPED: {why}");
}

/// The first GPU; `None` if there is none, which is said.
pub fn cuda(test: &str) -> Option<CudaDevice> {
    match cuda::gpus() {
        Ok(_) => Some(CudaDevice::open(0, &KernelCache::of_user()).unwrap()),
        Err(missing) => {
            skipped(test, &missing.to_string());
            None
        }
    }
}

pub fn cpu() -> CpuDevice {
    CpuDevice::new(1, Isa::detect()).unwrap()
}

/// Asserts that a GPU gives the CPU's numbers up to `tolerance`, relative to the largest of them.
#[track_caller]
pub fn compare(gpu: &mut CudaDevice, what: &str, case: &impl Case, tolerance: f32) {
    compare_numbers(what, &case.run(gpu), &case.run(&mut cpu()), tolerance);
}

/// As [`compare`], of numbers that are there.
#[track_caller]
pub fn compare_numbers(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(1e-30f32, |scale, x| scale.max(x.abs()));
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got - want).abs() / scale;
        // The comparison also fails for a NaN.
        assert!(error <= tolerance, "{what}: element {index} is {got}, wanted {want}: off by {error:e}");
    }
}

/// A pseudo-random generator with a fixed sequence per seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678)
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % end as u64) as usize
    }

    /// Approximately normal numbers with the given standard deviation.
    pub fn normals(&mut self, count: usize, deviation: f32) -> Vec<f32> {
        let uniform = |random: &mut Self| random.below(1 << 24) as f32 / (1 << 24) as f32;
        (0..count).map(|_| ((0..12).map(|_| uniform(self)).sum::<f32>() - 6.0) * deviation).collect()
    }
}

/// Little-endian bytes of the values as `dtype`.
pub fn bytes(dtype: WeightType, values: &[f32]) -> Vec<u8> {
    let element = |&x: &f32| -> Vec<u8> {
        match dtype {
            WeightType::F32 => x.to_le_bytes().to_vec(),
            WeightType::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
            WeightType::Bf16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
        }
    };
    values.iter().flat_map(element).collect()
}

/// A device matrix of `rows` outputs.
pub fn matrix<D: Device>(device: &mut D, dtype: WeightType, rows: usize, values: &[f32]) -> D::Matrix {
    let bytes = bytes(dtype, values);
    let source = HostMatrix::new(&bytes, dtype, rows, values.len() / rows);
    device.matrix(&[source], Quantize::None).unwrap()
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

/// One row of a step.
#[derive(Clone, Debug, Default)]
pub struct Share {
    pub tokens: usize,
    pub start: usize,
    pub pages: Vec<PageId>,
    pub slot: u32,
    pub continues: bool,
}

/// Begins a step with these rows. `ids` may be empty: all zero.
pub fn begin<D: Device>(
    device: &mut D,
    planes: &mut D::Planes,
    shares: &[Share],
    ids: &[u32],
    logit_rows: &[usize],
    copies: &[SlotCopy],
) -> Result<(), DeviceError> {
    let (mut rows, mut positions) = (Vec::new(), Vec::new());
    for share in shares {
        let (first_token, tokens, start) = (positions.len(), share.tokens, share.start);
        let (slot, continues) = (SlotId(share.slot), share.continues);
        rows.push(RowInputs { first_token, tokens, start, slot, continues, block_table: &share.pages });
        positions.extend((start..start + tokens).map(|position| position as f32));
    }
    let zeros = vec![0; positions.len()];
    let token_ids = if ids.is_empty() { &zeros } else { ids };
    let positions = [&positions[..]; 3];
    let shape = None;
    device.begin_step(&StepInputs { token_ids, positions, rows: &rows, copies, logit_rows, shape }, planes)
}

/// Ends the step and returns its results.
pub fn results<D: Device>(device: &mut D) -> Result<StepResults, DeviceError> {
    let (mut done, mut results) = (device.end_step()?, StepResults::default());
    assert!(device.collect(&mut done, None, &mut results)?, "a wait without a limit ends with the step");
    Ok(results)
}
