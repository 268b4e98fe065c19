//! Tests matrix products against double precision. Also tests that other rows and threads change no bit.

use tutti_kernels::cpu::CpuDevice;
use tutti_kernels::{
    Dense, Device, DeviceError, GroupedBuffers, GroupedLinear, HostMatrix, Linear, Norm, Quantize, WeightType,
};

use crate::support::{Random, assert_near, bits, bytes, devices, in_bfp_blocks, matrix, stored, tensor};

const TYPES: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::Bf16];

/// The exact operands of a product after rounding: weights as they are stored, and activations as they are packed. For
/// bfloat16, weights and activations are in bfloat16 if the path has bfloat16 dot products, and otherwise in block
/// floating point.
fn operands(path: &str, dtype: WeightType, weights: &[f32], x: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let kept: Vec<f32> = weights.iter().map(|&w| stored(dtype, w)).collect();
    let widened = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect();
    match dtype {
        WeightType::Bf16 if path.starts_with("avx512-bf16") => {
            (widened(&kept), x.iter().map(|&x| f64::from(stored(dtype, x))).collect())
        }
        WeightType::Bf16 => (in_bfp_blocks(&kept, 12), in_bfp_blocks(x, 13)),
        WeightType::F32 | WeightType::F16 => (widened(&kept), widened(x)),
    }
}

fn dot(x: &[f64], w: &[f64]) -> f64 {
    x.iter().zip(w).map(|(x, w)| x * w).sum()
}

fn product(
    device: &mut CpuDevice,
    dtype: WeightType,
    outputs: usize,
    weights: &[f32],
    x: &[f32],
) -> Vec<f32> {
    let inputs = weights.len() / outputs;
    let weight = matrix(device, dtype, outputs, weights);
    let x = tensor(device, inputs, x);
    let mut out = device.tensor(x.live(), outputs).unwrap();
    device.linear(Linear::plain(&x, &weight), &mut out).unwrap();
    out.values().to_vec()
}

#[test]
fn products_are_those_of_double_precision() {
    for (name, mut device) in devices("products") {
        let mut random = Random::new(1);
        let shapes = [(1, 64, 48), (3, 1, 1), (2, 7, 17), (13, 130, 100), (40, 96, 64), (17, 1300, 20)];
        for (rows, inputs, outputs) in shapes {
            for dtype in TYPES {
                let weights = random.normals(outputs * inputs, 0.5);
                let x = random.normals(rows * inputs, 1.0);
                let mut want = Vec::new();
                for x in x.chunks(inputs) {
                    for w in weights.chunks(inputs) {
                        let (w, x) = operands(&name, dtype, w, x);
                        want.push(dot(&x, &w));
                    }
                }
                let got = product(&mut device, dtype, outputs, &weights, &x);
                assert_near(&format!("{name} {dtype:?} {rows}x{inputs}x{outputs}"), &got, &want, 2e-6);
            }
        }
    }
}

/// Block floating point is closer to f32 than activations in bfloat16, even if one activation is far larger than the
/// others.
#[test]
fn bf16_products_stray_less_than_bf16_activations_would() {
    let (inputs, outputs) = (512, 64);
    for (name, mut device) in devices("straying") {
        if name.starts_with("avx512-bf16") {
            continue;
        }
        let mut random = Random::new(9);
        for outlier in [1.0, 50.3, 1003.7] {
            let weights = random.normals(outputs * inputs, 0.5);
            let mut x = random.normals(inputs, 1.0);
            x.iter_mut().step_by(100).for_each(|x| *x *= outlier);
            let kept: Vec<f64> = weights.iter().map(|&w| f64::from(stored(WeightType::Bf16, w))).collect();
            let want = |x: &[f64]| kept.chunks(inputs).map(|w| dot(x, w)).collect::<Vec<_>>();
            let exact = want(&x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
            let rounded =
                want(&x.iter().map(|&x| f64::from(stored(WeightType::Bf16, x))).collect::<Vec<_>>());
            let got = product(&mut device, WeightType::Bf16, outputs, &weights, &x);
            let off = |y: &mut dyn Iterator<Item = f64>| -> f64 {
                y.zip(&exact).map(|(y, exact)| (y - exact).powi(2)).sum::<f64>().sqrt()
            };
            let (block_float, bf16) =
                (off(&mut got.iter().map(|&y| f64::from(y))), off(&mut rounded.into_iter()));
            assert!(
                block_float < bf16 / 2.0,
                "{name}, outliers of {outlier}: off by {block_float:e}, in bfloat16 {bf16:e}"
            );
        }
    }
}

/// The operands give the largest possible sums of a BFP block.
#[test]
fn bf16_sums_do_not_overflow() {
    let (inputs, outputs) = (200, 16);
    for (name, mut device) in devices("largest sums") {
        for (sign, exponent) in [(1.0, 0), (-1.0, 0), (1.0, -40), (-1.0, 50)] {
            // Weights are 1.1111111 in binary. Activations round up to 2.
            let scale = 2f32.powi(exponent);
            let weights = vec![255.0 / 128.0 * scale; outputs * inputs];
            let x = vec![1.999_999_9 * sign; inputs];
            let got = product(&mut device, WeightType::Bf16, outputs, &weights, &x);
            let want = f64::from(255.0 / 128.0 * scale) * 2.0 * f64::from(sign) * inputs as f64;
            assert_near(&name, &got, &vec![want; outputs], 2e-6);
        }
    }
}

/// A NaN or infinity makes all results of its own row or output NaN or infinite. All other results keep their bits.
#[test]
fn what_is_not_finite_stays_where_it_belongs() {
    let (rows, inputs, outputs) = (7, 150, 40);
    for (name, mut device) in devices("not finite") {
        let mut random = Random::new(10);
        for dtype in TYPES {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let (mut weights, mut x) =
                    (vec![0.25; outputs * inputs], random.normals(rows * inputs, 1e-3));
                let clean = product(&mut device, dtype, outputs, &weights, &x);
                (weights[11 * inputs + 70], x[3 * inputs + 149]) = (bad, bad);
                let got = product(&mut device, dtype, outputs, &weights, &x);
                for (i, (got, clean)) in got.iter().zip(&clean).enumerate() {
                    let (row, output) = (i / outputs, i % outputs);
                    let what = format!("{name} {dtype:?}, {bad}: row {row}, output {output} is {got}");
                    if row == 3 || output == 11 {
                        assert!(!got.is_finite(), "{what}");
                    } else {
                        assert_eq!(got, clean, "{what}");
                    }
                }
            }
        }
    }
}

/// A row's bits do not depend on the number or contents of the other rows, nor on the number of threads.
#[test]
fn a_row_has_the_same_bits_alone_and_in_any_batch() {
    let mut references: Vec<(String, Vec<u32>)> = Vec::new();
    for (name, mut device) in devices("batches") {
        let mut random = Random::new(2);
        for dtype in TYPES {
            for (inputs, outputs) in [(33, 130), (256, 66), (512, 528)] {
                let weights = random.normals(outputs * inputs, 0.5);
                let x = random.normals(70 * inputs, 1.0);
                let weight = matrix(&mut device, dtype, outputs, &weights);
                let mut out = device.tensor(70, outputs).unwrap();
                let mut alone = Vec::new();
                for row in x.chunks(inputs) {
                    let row = tensor(&mut device, inputs, row);
                    device.linear(Linear::plain(&row, &weight), &mut out).unwrap();
                    alone.extend(bits(out.values()));
                }
                let mut sizes: Vec<usize> = (1..=26).collect();
                sizes.extend([31, 48, 64, 70]);
                for rows in sizes {
                    let first = random.below(70 - rows + 1);
                    let batch = tensor(&mut device, inputs, &x[first * inputs..(first + rows) * inputs]);
                    device.linear(Linear::plain(&batch, &weight), &mut out).unwrap();
                    let want = &alone[first * outputs..(first + rows) * outputs];
                    assert!(bits(out.values()) == want, "{name} {dtype:?} {inputs}x{outputs}: {rows} rows");
                }
                let path = name.split(' ').next().unwrap();
                references.push((format!("{path} {dtype:?} {inputs}x{outputs}"), alone));
            }
        }
    }
    // Another number of threads on one path gives the same bits.
    references.sort();
    for pair in references.chunks(2) {
        assert_eq!(pair[0].0, pair[1].0);
        assert!(pair[0].1 == pair[1].1, "{} differs between thread counts", pair[0].0);
    }
}

/// Sixteen rows of 4,200 inputs are too large for a thread's own copy of the activations. All threads then pack the
/// activations together. A row's bits do not change.
#[test]
fn a_row_has_the_same_bits_in_a_tile_that_all_threads_pack() {
    let (rows, inputs, outputs) = (16, 4200, 40);
    for (name, mut device) in devices("large tiles") {
        let mut random = Random::new(12);
        for dtype in TYPES {
            let weights = random.normals(outputs * inputs, 0.5);
            let x = random.normals(rows * inputs, 1.0);
            let batched = product(&mut device, dtype, outputs, &weights, &x);
            for row in [0, 7, 15] {
                let x = &x[row * inputs..(row + 1) * inputs];
                let alone = product(&mut device, dtype, outputs, &weights, x);
                let of_row = &batched[row * outputs..(row + 1) * outputs];
                assert!(bits(of_row) == bits(&alone), "{name} {dtype:?}: row {row}");
            }
        }
    }
}

/// Sums of BFP blocks are exact, so all paths without dot products of bfloat16 round alike.
#[test]
fn bf16_has_the_same_bits_on_every_path() {
    let mut random = Random::new(3);
    let (inputs, outputs) = (300, 50);
    let (weights, x) = (random.normals(outputs * inputs, 0.5), random.normals(5 * inputs, 1.0));
    let mut first: Option<Vec<u32>> = None;
    for (name, mut device) in devices("paths") {
        let got = product(&mut device, WeightType::Bf16, outputs, &weights, &x);
        if name.starts_with("avx512-bf16") {
            continue;
        }
        assert!(*first.get_or_insert_with(|| bits(&got)) == bits(&got), "{name}");
    }
}

#[test]
fn bias_residual_and_parts() {
    for (name, mut device) in devices("bias") {
        let mut random = Random::new(4);
        let (inputs, parts) = (40, [20, 5, 30]);
        let outputs = parts.iter().sum();
        let weights = random.normals(outputs * inputs, 0.5);
        let raw = bytes(WeightType::F32, &weights);
        let mut rest = &raw[..];
        let split: Vec<HostMatrix<'_>> = parts
            .iter()
            .map(|&rows| {
                let (bytes, after) = rest.split_at(rows * inputs * 4);
                rest = after;
                HostMatrix::new(bytes, WeightType::F32, rows, inputs)
            })
            .collect();
        let fused = device.matrix(&split, Quantize::None).unwrap();
        for rows in [1, 9, 16, 20] {
            let (x, bias) = (random.normals(rows * inputs, 1.0), random.normals(outputs, 1.0));
            let before = random.normals(rows * outputs, 1.0);
            let plain = product(&mut device, WeightType::F32, outputs, &weights, &x);
            let x = tensor(&mut device, inputs, &x);
            let vector = device.vector(&bias).unwrap();
            let mut out = tensor(&mut device, outputs, &before);
            device.linear(Linear { bias: Some(&vector), ..Linear::plain(&x, &fused) }, &mut out).unwrap();
            let want: Vec<f32> = plain.iter().enumerate().map(|(i, y)| y + bias[i % outputs]).collect();
            assert_eq!(out.values(), want, "{name}, {rows} rows");
            out.fill(&before).unwrap();
            device.linear_add(Linear { bias: Some(&vector), ..Linear::plain(&x, &fused) }, &mut out).unwrap();
            let want: Vec<f32> = before.iter().zip(&want).map(|(before, y)| before + y).collect();
            assert_eq!(out.values(), want, "{name}, {rows} rows");
        }
    }
}

/// A norm that is fused with the product gives the same bits as a separate norm.
#[test]
fn a_fused_norm_changes_no_bits() {
    for (name, mut device) in devices("fused norm") {
        let mut random = Random::new(8);
        for (inputs, outputs) in [(5, 20), (130, 40), (1100, 33)] {
            let weights = bytes(WeightType::Bf16, &random.normals(outputs * inputs, 0.5));
            let source = HostMatrix::new(&weights, WeightType::Bf16, outputs, inputs);
            let norm = device.vector(&random.normals(inputs, 1.0)).unwrap();
            let norm = || Norm { weight: &norm, eps: 1e-6 };
            for quantize in [Quantize::None, Quantize::Int8, Quantize::Int4] {
                let weight = device.matrix(&[source], quantize).unwrap();
                for rows in [1, 2, 7, 40] {
                    let x = random.normals(rows * inputs, 3.0);
                    let x = tensor(&mut device, inputs, &x);
                    let mut normed = device.tensor(rows, inputs).unwrap();
                    let mut want = device.tensor(rows, outputs).unwrap();
                    let mut got = device.tensor(rows, outputs).unwrap();
                    device.rms_norm(&x, norm(), &mut normed).unwrap();
                    device.linear(Linear::plain(&normed, &weight), &mut want).unwrap();
                    device
                        .linear(Linear { norm: Some(norm()), ..Linear::plain(&x, &weight) }, &mut got)
                        .unwrap();
                    let what = format!("{name} {quantize:?} {rows}x{inputs}x{outputs}");
                    assert!(bits(got.values()) == bits(want.values()), "{what}");
                }
            }
        }
    }
}

/// Each group of columns has the product with its own weight, with the bits of a product of that group alone.
#[test]
fn a_grouped_product_is_the_product_of_each_group() {
    let (groups, inputs, outputs, most) = (3, 50, 20, 40);
    for (name, mut device) in devices("grouped products") {
        let mut random = Random::new(23);
        for dtype in TYPES {
            let of_group: Vec<_> = (0..groups).map(|_| random.normals(outputs * inputs, 0.5)).collect();
            let weights: Vec<_> = of_group.iter().map(|w| matrix(&mut device, dtype, outputs, w)).collect();
            let mut buffers = GroupedBuffers {
                inputs: device.tensor(groups * most, inputs).unwrap(),
                outputs: device.tensor(groups * most, outputs).unwrap(),
            };
            let mut out = device.tensor(most, groups * outputs).unwrap();
            for rows in [1, 2, 17, 40] {
                let values = random.normals(rows * groups * inputs, 1.0);
                let x = tensor(&mut device, groups * inputs, &values);
                let linear = GroupedLinear { x: &x, weights: &weights, buffers: &mut buffers };
                device.grouped_linear(linear, &mut out).unwrap();
                let found = out.values().to_vec();
                for (group, weights) in of_group.iter().enumerate() {
                    let rows = values.chunks(inputs).skip(group).step_by(groups);
                    let x: Vec<f32> = rows.flatten().copied().collect();
                    let want = product(&mut device, dtype, outputs, weights, &x);
                    let rows = found.chunks(outputs).skip(group).step_by(groups);
                    let found: Vec<f32> = rows.flatten().copied().collect();
                    assert!(bits(&found) == bits(&want), "{name} {dtype:?} group {group} of {groups}");
                }
            }
            let x = tensor(&mut device, inputs, &vec![1.0; inputs]);
            let linear = GroupedLinear { x: &x, weights: &weights, buffers: &mut buffers };
            let refused = device.grouped_linear(linear, &mut out);
            assert!(matches!(refused, Err(DeviceError::Misuse(_))), "{refused:?}");
        }
    }
}
