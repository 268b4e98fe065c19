//! Random numbers, conversions and comparisons for tests.

use tutti_kernels::{Device, HostMatrix, Quantize, WeightType};

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

/// Loads a matrix of `rows` outputs.
pub fn matrix<D: Device>(device: &mut D, dtype: WeightType, rows: usize, values: &[f32]) -> D::Matrix {
    let bytes = bytes(dtype, values);
    let source = HostMatrix::new(&bytes, dtype, rows, values.len() / rows);
    device.matrix(&[source], Quantize::None).unwrap()
}

/// The bits of the values, for an exact comparison.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Asserts that the difference of the values is small relative to the largest wanted value. With a tolerance of 0, the
/// values must be equal.
#[track_caller]
pub fn assert_near<W: Copy + Into<f64>>(what: &str, got: &[f32], want: &[W], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    let want: Vec<f64> = want.iter().map(|&x| x.into()).collect();
    let scale = want.iter().fold(1e-30_f64, |scale, x| scale.max(x.abs()));
    for (index, (got, want)) in got.iter().zip(&want).enumerate() {
        let error = (f64::from(*got) - want).abs() / scale;
        // Written so that the assertion also fails for a NaN.
        assert!(error <= tolerance, "{what}: element {index} is {got}, wanted {want}: off by {error:e}");
    }
}
