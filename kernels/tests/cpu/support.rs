//! Helpers of the tests: devices, numbers and steps.

use std::io::Write;
use std::sync::Once;

use std::time::Instant;

use tutti_kernels::cpu::{CpuDevice, Isa, Planes, Tensor, Weights};
use tutti_kernels::{
    Device, DeviceError, HostMatrix, PageId, PlanesShape, Quantize, RowInputs, SlotId, StepInputs,
    StepResults, WeightType,
};

/// Devices on every instruction path that this machine supports, with one thread and with two. Reports the other paths
/// on stderr: once directly, since the test harness shows a test's output only if the test fails, and then for each
/// test.
pub fn devices(test: &str) -> Vec<(String, CpuDevice)> {
    static SAID: Once = Once::new();
    let mut devices = Vec::new();
    for isa in Isa::ALL {
        if !isa.available() {
            SAID.call_once(|| {
                let line = format!("SKIPPED on {isa} and better: not here. See tests/emulated/run.\n");
                std::io::stderr().write_all(line.as_bytes()).unwrap();
            });
            eprintln!("{test}: SKIPPED on {isa}: this machine does not have it");
            continue;
        }
        for threads in [1, 2] {
            devices.push((format!("{isa} with {threads} threads"), CpuDevice::new(threads, isa).unwrap()));
        }
    }
    devices
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

/// The value after rounding to `dtype`.
pub fn stored(dtype: WeightType, x: f32) -> f32 {
    match dtype {
        WeightType::F32 => x,
        WeightType::F16 => half::f16::from_f32(x).to_f32(),
        WeightType::Bf16 => half::bf16::from_f32(x).to_f32(),
    }
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
pub fn matrix(device: &mut CpuDevice, dtype: WeightType, rows: usize, values: &[f32]) -> Weights {
    let bytes = bytes(dtype, values);
    let source = HostMatrix::new(&bytes, dtype, rows, values.len() / rows);
    device.matrix(&[source], Quantize::None).unwrap()
}

/// A tensor that holds `values`, in rows of `width`.
pub fn tensor(device: &mut CpuDevice, width: usize, values: &[f32]) -> Tensor {
    let mut tensor = device.tensor(values.len() / width, width).unwrap();
    tensor.fill(values).unwrap();
    tensor
}

/// One row of a step: its number of tokens, first position and pages.
#[derive(Clone, Debug)]
pub struct Share {
    pub tokens: usize,
    pub start: usize,
    pub pages: Vec<PageId>,
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
    let mut rows = Vec::new();
    let mut positions = Vec::new();
    for share in shares {
        let (first_token, tokens, start) = (positions.len(), share.tokens, share.start);
        rows.push(RowInputs {
            first_token,
            tokens,
            start,
            slot: SlotId::NULL,
            continues: false,
            block_table: &share.pages,
        });
        positions.extend((start..start + tokens).map(|position| position as f32));
    }
    let zeros = vec![0; positions.len()];
    let token_ids = if ids.is_empty() { &zeros } else { ids };
    let positions = [&positions[..]; 3];
    device.begin_step(
        &StepInputs { token_ids, positions, rows: &rows, copies: &[], logit_rows, shape: None },
        planes,
    )
}

/// Ends the step and returns its results.
pub fn results(device: &mut CpuDevice) -> StepResults {
    let (mut done, mut results) = (device.end_step().unwrap(), StepResults::default());
    assert!(device.collect(&mut done, Some(Instant::now()), &mut results).unwrap(), "a CPU is never late");
    results
}

/// The bits of the values, for an exact comparison.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Asserts that the difference of the values is small relative to the largest wanted value.
#[track_caller]
pub fn assert_near(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let scale = want.iter().fold(1e-30_f64, |scale, x| scale.max(x.abs()));
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs() / scale;
        // The comparison also fails for a NaN.
        assert!(error <= tolerance, "{what}: element {index} is {got}, wanted {want}: off by {error:e}");
    }
}
