//! Matrix products.

use tutti_kernels::cpu::CpuDevice;
use tutti_kernels::{Device, HostMatrix, Norm, Quantize, WeightType};

use crate::support::{Random, assert_near, bits, bytes, devices, matrix, stored, tensor};

const TYPES: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::Bf16];

/// Activations meet bfloat16 weights as bfloat16.
fn at_the_door(dtype: WeightType, x: f32) -> f32 {
    if dtype == WeightType::Bf16 { stored(dtype, x) } else { x }
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
    device.linear(&x, &weight, None, &mut out).unwrap();
    out.values().to_vec()
}

#[test]
fn products_are_those_of_double_precision() {
    for (name, mut device) in devices("products") {
        let mut random = Random::new(1);
        for (rows, inputs, outputs) in [(1, 64, 48), (3, 1, 1), (2, 7, 17), (13, 130, 100), (40, 96, 64)] {
            for dtype in TYPES {
                let weights = random.normals(outputs * inputs, 0.5);
                let x = random.normals(rows * inputs, 1.0);
                let want: Vec<f64> = (0..rows * outputs)
                    .map(|i| {
                        let (x, w) = (
                            &x[i / outputs * inputs..][..inputs],
                            &weights[i % outputs * inputs..][..inputs],
                        );
                        x.iter()
                            .zip(w)
                            .map(|(&x, &w)| f64::from(at_the_door(dtype, x)) * f64::from(stored(dtype, w)))
                            .sum()
                    })
                    .collect();
                let got = product(&mut device, dtype, outputs, &weights, &x);
                assert_near(&format!("{name} {dtype:?} {rows}x{inputs}x{outputs}"), &got, &want, 2e-6);
            }
        }
    }
}

/// Promise 8: a row's bits do not depend on how many rows, or which, are computed beside it, nor on threads.
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
                    device.linear(&row, &weight, None, &mut out).unwrap();
                    alone.extend(bits(out.values()));
                }
                let mut sizes: Vec<usize> = (1..=26).collect();
                sizes.extend([31, 48, 64, 70]);
                for rows in sizes {
                    let first = random.below(70 - rows + 1);
                    let batch = tensor(&mut device, inputs, &x[first * inputs..(first + rows) * inputs]);
                    device.linear(&batch, &weight, None, &mut out).unwrap();
                    let want = &alone[first * outputs..(first + rows) * outputs];
                    assert!(bits(out.values()) == want, "{name} {dtype:?} {inputs}x{outputs}: {rows} rows");
                }
                let path = name.split(' ').next().unwrap();
                references.push((format!("{path} {dtype:?} {inputs}x{outputs}"), alone));
            }
        }
    }
    // The same path with another number of threads came to the same bits.
    references.sort();
    for pair in references.chunks(2) {
        assert_eq!(pair[0].0, pair[1].0);
        assert!(pair[0].1 == pair[1].1, "{} differs between thread counts", pair[0].0);
    }
}

/// bfloat16 products are exact, so every path but the one with dot-product instructions rounds alike.
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
        let (rows, inputs, parts) = (9, 40, [20, 5, 30]);
        let outputs = parts.iter().sum();
        let weights = random.normals(outputs * inputs, 0.5);
        let (x, bias) = (random.normals(rows * inputs, 1.0), random.normals(outputs, 1.0));
        let before = random.normals(rows * outputs, 1.0);
        let plain = product(&mut device, WeightType::F32, outputs, &weights, &x);
        let raw = bytes(WeightType::F32, &weights);
        let mut rest = &raw[..];
        let split: Vec<HostMatrix<'_>> = parts
            .iter()
            .map(|&rows| {
                let (bytes, after) = rest.split_at(rows * inputs * 4);
                rest = after;
                HostMatrix { bytes, dtype: WeightType::F32, rows, columns: inputs }
            })
            .collect();
        let fused = device.matrix(&split, Quantize::None).unwrap();
        let x = tensor(&mut device, inputs, &x);
        let vector = device.vector(&bias).unwrap();
        let mut out = tensor(&mut device, outputs, &before);
        device.linear(&x, &fused, Some(&vector), &mut out).unwrap();
        let want: Vec<f32> = plain.iter().enumerate().map(|(i, y)| y + bias[i % outputs]).collect();
        assert_eq!(out.values(), want, "{name}");
        out.fill(&before).unwrap();
        device.linear_add(&x, &fused, Some(&vector), &mut out).unwrap();
        let want: Vec<f32> = before.iter().zip(&want).map(|(before, y)| before + y).collect();
        assert_eq!(out.values(), want, "{name}");
    }
}

/// A norm at the door gives the bits that one before it gives.
#[test]
fn a_norm_on_the_way_changes_no_bits() {
    for (name, mut device) in devices("norm at the door") {
        let mut random = Random::new(8);
        for (inputs, outputs) in [(5, 20), (130, 40), (1100, 33)] {
            let weights = bytes(WeightType::Bf16, &random.normals(outputs * inputs, 0.5));
            let part =
                HostMatrix { bytes: &weights, dtype: WeightType::Bf16, rows: outputs, columns: inputs };
            let norm = device.vector(&random.normals(inputs, 1.0)).unwrap();
            let norm = || Norm { weight: &norm, eps: 1e-6 };
            for quantize in [Quantize::None, Quantize::Int8] {
                let weight = device.matrix(&[part], quantize).unwrap();
                for rows in [1, 2, 7, 40] {
                    let x = random.normals(rows * inputs, 3.0);
                    let x = tensor(&mut device, inputs, &x);
                    let mut normed = device.tensor(rows, inputs).unwrap();
                    let mut want = device.tensor(rows, outputs).unwrap();
                    let mut got = device.tensor(rows, outputs).unwrap();
                    device.rms_norm(&x, norm(), &mut normed).unwrap();
                    device.linear(&normed, &weight, None, &mut want).unwrap();
                    device.norm_linear(&x, norm(), &weight, None, &mut got).unwrap();
                    let what = format!("{name} {quantize:?} {rows}x{inputs}x{outputs}");
                    assert!(bits(got.values()) == bits(want.values()), "{what}");
                }
            }
        }
    }
}
