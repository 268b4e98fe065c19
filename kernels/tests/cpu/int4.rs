//! Tests matrices that are quantised to four bits when they are loaded.

use tutti_kernels::cpu::{CpuDevice, Isa, Weights};
use tutti_kernels::{Dense, Device, DeviceError, Embed, HostMatrix, Linear, Quantize, WeightType};

use crate::grouped::quantised;
use crate::support::{Random, Share, assert_near, begin, bits, bytes, devices, stored, tensor};

const TYPES: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::Bf16];
const GROUP: usize = 32;

fn int4(device: &mut CpuDevice, dtype: WeightType, outputs: usize, values: &[f32]) -> Weights {
    let bytes = bytes(dtype, values);
    let source = HostMatrix::new(&bytes, dtype, outputs, values.len() / outputs);
    device.matrix(&[source], Quantize::Int4).unwrap()
}

/// The dequantised weights of a matrix.
fn weights_of(device: &mut CpuDevice, weights: &Weights) -> Vec<f32> {
    let [outputs, inputs] = device.matrix_shape(weights);
    let ids: Vec<u32> = (0..outputs as u32).collect();
    begin(device, &[Share { tokens: outputs, ..Share::default() }], &ids, &[]);
    let mut out = device.tensor(outputs, inputs).unwrap();
    device.embed(Embed { table: weights, shard: None }, &mut out).unwrap();
    out.values().to_vec()
}

/// Quantised weights have the same bits on every path, and are near the checkpoint's.
#[test]
fn weights_are_the_same_on_every_path() {
    let (outputs, inputs) = (37, 300);
    for dtype in TYPES {
        let mut random = Random::new(41);
        let values = random.normals(outputs * inputs, 0.05);
        let exact: Vec<f32> = values.iter().map(|&x| stored(dtype, x)).collect();
        let mut first: Option<Vec<u32>> = None;
        for (name, mut device) in devices("int4 weights") {
            let weights = int4(&mut device, dtype, outputs, &values);
            let got = weights_of(&mut device, &weights);
            let square =
                |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>();
            let error = square(&mut got.iter().zip(&exact).map(|(got, x)| got - x));
            let relative = (error / square(&mut exact.iter().copied())).sqrt();
            assert!((0.05..0.085).contains(&relative), "{name} {dtype:?}: {relative}");
            let got = bits(&got);
            assert!(first.get_or_insert_with(|| got.clone()) == &got, "{name} {dtype:?}");
        }
    }
}

/// Products are those of the dequantised weights with activations in eight bits, or in f32.
#[test]
fn products_are_those_of_the_dequantised_weights() {
    for full in [false, true] {
        for (name, device) in devices("int4 products") {
            let mut device = device.with_quantised_activations(!full);
            let mut random = Random::new(42);
            for (rows, inputs, outputs) in [(1, 128, 48), (2, 1, 1), (5, 130, 100), (29, 259, 64)] {
                let values = random.normals(outputs * inputs, 0.5);
                let weights = int4(&mut device, WeightType::Bf16, outputs, &values);
                let x = random.normals(rows * inputs, 1.0);
                let held = weights_of(&mut device, &weights);
                let got = {
                    let x = tensor(&mut device, inputs, &x);
                    let mut out = device.tensor(rows, outputs).unwrap();
                    device.linear(Linear::plain(&x, &weights), &mut out).unwrap();
                    out.values().to_vec()
                };
                let round = |x: &[f32]| -> Vec<f64> {
                    if full {
                        return x.iter().map(|x| f64::from(*x)).collect();
                    }
                    let groups = x.chunks(GROUP).map(quantised);
                    let number = |(numbers, scale): (Vec<i32>, f32)| {
                        numbers.into_iter().map(move |x| f64::from(x) * f64::from(scale))
                    };
                    groups.flat_map(number).collect()
                };
                let rows = x.chunks(inputs).map(round);
                let dot = |x: &[f64], w: &[f32]| x.iter().zip(w).map(|(x, w)| x * f64::from(*w)).sum();
                let want: Vec<f64> = rows
                    .flat_map(|x| held.chunks(inputs).map(|w| dot(&x, w)).collect::<Vec<f64>>())
                    .collect();
                assert_near(&format!("{name} {full} {inputs}x{outputs}"), &got, &want, 2e-6);
            }
        }
    }
}

/// Heads and tables have eight bits.
#[test]
fn heads_and_tables_have_eight_bits() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let values = bytes(WeightType::Bf16, &Random::new(43).normals(64 * 256, 1.0));
    let source = HostMatrix::new(&values, WeightType::Bf16, 64, 256);
    let eight = {
        let matrix = device.matrix(&[source], Quantize::Int8).unwrap();
        device.matrix_bytes(&matrix)
    };
    let head = device.head_matrix(&[source], Quantize::Int4).unwrap();
    let table = device.table_matrix(&[source], Quantize::Int4).unwrap();
    let tied = device.tied_matrix(&[source], Quantize::Int4).unwrap();
    let matrix = device.matrix(&[source], Quantize::Int4).unwrap();
    assert_eq!([head, table, tied].map(|matrix| device.matrix_bytes(&matrix)), [eight; 3]);
    assert_eq!(device.matrix_bytes(&matrix), 64 * 256 * 9 / 16);
}

/// A rank's share of the inputs consists of whole groups.
#[test]
fn a_share_that_cuts_a_group_is_refused() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let values = bytes(WeightType::F32, &Random::new(44).normals(4 * 96, 1.0));
    let mut share = |columns: usize| {
        let bytes = &values[..4 * (3 * 96 + columns)];
        let window = HostMatrix { bytes, dtype: WeightType::F32, rows: 4, columns, stride: 96 };
        device.matrix(&[window], Quantize::Int4).map(|_| ())
    };
    assert_eq!(share(64), Ok(()));
    assert_eq!(share(96), Ok(()));
    let Err(DeviceError::Unsupported(why)) = share(48) else { panic!("a share of 48 inputs is taken") };
    assert!(why.contains("int4: a share of 48 of 96 inputs cuts a group of 32"), "{why}");
}

/// Weights that are not finite, and weights that are too small or too large for an f16 scale.
#[test]
fn weights_at_the_ends_of_the_range() {
    for (name, mut device) in devices("int4 range") {
        let mut values = vec![0.5f32; 6 * GROUP];
        values[0] = f32::NAN;
        values[GROUP] = f32::INFINITY;
        values[2 * GROUP..3 * GROUP].fill(1e-38);
        values[3 * GROUP..4 * GROUP].fill(0.0);
        values[4 * GROUP..5 * GROUP].fill(-1e6);
        let weights = int4(&mut device, WeightType::F32, 6, &values);
        let got = weights_of(&mut device, &weights);
        let all =
            |row: usize, test: &dyn Fn(f32) -> bool| got[row * GROUP..][..GROUP].iter().all(|x| test(*x));
        assert!(all(0, &f32::is_nan) && all(1, &f32::is_nan), "{name}");
        assert!(all(2, &|x| x == 0.0) && all(3, &|x| x == 0.0), "{name}");
        assert!(all(4, &|x| x < -4e5), "{name}: {:?}", &got[4 * GROUP..][..3]);
        assert!(all(5, &|x| (x - 0.5).abs() < 1e-3), "{name}: {:?}", &got[5 * GROUP..][..3]);
    }
}
