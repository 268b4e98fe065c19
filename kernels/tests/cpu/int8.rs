//! Tests matrix products and embeddings in int8 against plain arithmetic.

use tutti_kernels::cpu::{CpuDevice, Tensor, Weights};
use tutti_kernels::{Dense, Device, Embed, HostMatrix, Linear, Quantize, WeightType};

use crate::support::{Random, Share, begin, bits, bytes, devices, stored, tensor};

const TYPES: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::Bf16];
const GROUP: usize = 128;

fn int8(device: &mut CpuDevice, dtype: WeightType, outputs: usize, values: &[f32]) -> Weights {
    let bytes = bytes(dtype, values);
    let source = HostMatrix::new(&bytes, dtype, outputs, values.len() / outputs);
    device.matrix(&[source], Quantize::Int8).unwrap()
}

/// The quantised numbers of a group, and its scale.
fn quantised(group: &[f32]) -> (Vec<i32>, f32) {
    let largest = group.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    if largest == 0.0 {
        return (vec![0; group.len()], 0.0);
    }
    let steps = group.iter().map(|x| (x * (127.0 / largest)).round_ties_even() as i32);
    (steps.collect(), largest / 127.0)
}

/// Reference for one output, with the documented order of operations.
fn reference(x: &[f32], w: &[f32], before: f32) -> f32 {
    x.chunks(GROUP).zip(w.chunks(GROUP)).fold(before, |sum, (x, w)| {
        let ((x, x_scale), (w, w_scale)) = (quantised(x), quantised(w));
        let dot: i32 = x.iter().zip(&w).map(|(x, w)| x * w).sum();
        (dot as f32).mul_add(w_scale * x_scale, sum)
    })
}

fn product(device: &mut CpuDevice, x: &Tensor, weights: &Weights, outputs: usize) -> Vec<f32> {
    let mut out = device.tensor(x.live(), outputs).unwrap();
    device.linear(Linear::plain(x, weights), &mut out).unwrap();
    out.values().to_vec()
}

#[test]
fn products_have_the_bits_of_plain_arithmetic_on_every_path() {
    for (name, mut device) in devices("int8 products") {
        let mut random = Random::new(21);
        for (rows, inputs, outputs) in
            [(1, 128, 48), (2, 1, 1), (3, 7, 17), (5, 130, 100), (13, 384, 33), (29, 259, 64)]
        {
            for dtype in TYPES {
                let weights = random.normals(outputs * inputs, 0.5);
                let weight = int8(&mut device, dtype, outputs, &weights);
                let weights: Vec<f32> = weights.iter().map(|&w| stored(dtype, w)).collect();
                let x = random.normals(rows * inputs, 1.0);
                let got = {
                    let x = tensor(&mut device, inputs, &x);
                    product(&mut device, &x, &weight, outputs)
                };
                for (i, got) in got.iter().enumerate() {
                    let (x, w) =
                        (&x[i / outputs * inputs..][..inputs], &weights[i % outputs * inputs..][..inputs]);
                    let want = reference(x, w, 0.0);
                    assert_eq!(
                        got.to_bits(),
                        want.to_bits(),
                        "{name} {dtype:?} {rows}x{inputs}x{outputs}, element {i}: {got}, wanted {want}"
                    );
                }
            }
        }
    }
}

/// The largest quantised numbers, all of one sign: the sums of products of bytes have the largest possible magnitude.
#[test]
fn nothing_saturates() {
    for (name, mut device) in devices("int8 extremes") {
        for (sign, inputs) in [(1.0, 256), (-1.0, 256), (1.0, 6)] {
            let weight = int8(&mut device, WeightType::F32, 20, &vec![2.0; 20 * inputs]);
            let x = tensor(&mut device, inputs, &vec![sign * 3.0; inputs]);
            let got = product(&mut device, &x, &weight, 20);
            let want = reference(&vec![sign * 3.0; inputs], &vec![2.0; inputs], 0.0);
            assert!((want / (sign * 6.0 * inputs as f32) - 1.0).abs() < 1e-5);
            assert!(got.iter().all(|got| got.to_bits() == want.to_bits()), "{name}: {got:?}, wanted {want}");
        }
    }
}

/// A row's bits do not depend on the number or contents of the other rows.
#[test]
fn a_row_has_the_same_bits_alone_and_in_any_batch() {
    for (name, mut device) in devices("int8 batches") {
        let mut random = Random::new(22);
        for (inputs, outputs) in [(33, 130), (1100, 528)] {
            let weights = random.normals(outputs * inputs, 0.5);
            let weight = int8(&mut device, WeightType::Bf16, outputs, &weights);
            let x = random.normals(70 * inputs, 1.0);
            let mut alone = Vec::new();
            for row in x.chunks(inputs) {
                let row = tensor(&mut device, inputs, row);
                alone.extend(bits(&product(&mut device, &row, &weight, outputs)));
            }
            for rows in (1..=26).chain([31, 48, 64, 70]) {
                let first = random.below(70 - rows + 1);
                let batch = tensor(&mut device, inputs, &x[first * inputs..(first + rows) * inputs]);
                let got = bits(&product(&mut device, &batch, &weight, outputs));
                let want = &alone[first * outputs..(first + rows) * outputs];
                assert!(got == want, "{name} {inputs}x{outputs}: {rows} rows");
            }
        }
    }
}

#[test]
fn bias_residual_and_parts() {
    for (name, mut device) in devices("int8 bias") {
        let mut random = Random::new(23);
        let (rows, inputs, outputs) = (29, 700, 55);
        let weights = random.normals(outputs * inputs, 0.5);
        let (x, bias) = (random.normals(rows * inputs, 1.0), random.normals(outputs, 1.0));
        let before = random.normals(rows * outputs, 1.0);
        let weight = int8(&mut device, WeightType::F32, outputs, &weights);
        let values = x;
        let x = tensor(&mut device, inputs, &values);
        let plain = product(&mut device, &x, &weight, outputs);
        let raw = bytes(WeightType::F32, &weights);
        let (top, bottom) = raw.split_at(18 * inputs * 4);
        let part = |bytes, rows| HostMatrix::new(bytes, WeightType::F32, rows, inputs);
        let fused = device.matrix(&[part(top, 18), part(bottom, 37)], Quantize::Int8).unwrap();
        let vector = device.vector(&bias).unwrap();
        let mut out = tensor(&mut device, outputs, &before);
        device.linear(Linear { bias: Some(&vector), ..Linear::plain(&x, &fused) }, &mut out).unwrap();
        let want: Vec<f32> = plain.iter().enumerate().map(|(i, y)| y + bias[i % outputs]).collect();
        assert_eq!(out.values(), want, "{name}");
        out.fill(&before).unwrap();
        device.linear_add(Linear { bias: Some(&vector), ..Linear::plain(&x, &fused) }, &mut out).unwrap();
        let want: Vec<f32> = before
            .iter()
            .enumerate()
            .map(|(i, &before)| {
                let (row, output) = (i / outputs, i % outputs);
                let (x, w) = (&values[row * inputs..][..inputs], &weights[output * inputs..][..inputs]);
                reference(x, w, before) + bias[output]
            })
            .collect();
        assert_eq!(out.values(), want, "{name}");
    }
}

#[test]
fn an_embedding_is_its_quantised_row() {
    for (name, mut device) in devices("int8 embedding") {
        let mut random = Random::new(24);
        let (width, vocabulary) = (150, 37);
        let values = random.normals(vocabulary * width, 1.0);
        let table = int8(&mut device, WeightType::F32, vocabulary, &values);
        let ids = [36, 0, 17, 5];
        begin(&mut device, &[Share { tokens: 4, ..Share::default() }], &ids, &[]);
        let mut out = device.tensor(4, width).unwrap();
        device.embed(Embed { table: &table, shard: None }, &mut out).unwrap();
        for (id, row) in ids.iter().zip(out.values().chunks(width)) {
            let want: Vec<f32> = values[*id as usize * width..][..width]
                .chunks(GROUP)
                .flat_map(|group| {
                    let (steps, scale) = quantised(group);
                    steps.into_iter().map(move |step| step as f32 * scale)
                })
                .collect();
            assert_eq!(row, want, "{name}: id {id}");
        }
    }
}

/// A NaN or infinite activation makes the result infinite or NaN.
#[test]
fn what_is_not_finite_does_not_come_out_as_a_number() {
    for (name, mut device) in devices("int8 poison") {
        let weight = int8(&mut device, WeightType::F32, 3, &[1.0; 3 * 200]);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut values = vec![1.0; 200];
            values[150] = bad;
            let x = tensor(&mut device, 200, &values);
            let got = product(&mut device, &x, &weight, 3);
            assert!(got.iter().all(|y| y.is_nan()), "{name}: {bad} became {got:?}");
        }
    }
}

/// A matrix in int8 takes one byte per weight, plus a thirty-second of a byte for the scales.
#[test]
fn it_takes_little_more_than_a_byte_an_element() {
    for (name, mut device) in devices("int8 size") {
        let weight = int8(&mut device, WeightType::F32, 64, &vec![1.0; 64 * 512]);
        assert_eq!(device.matrix_bytes(&weight), 64 * 512 + 64 * 4 * 4, "{name}");
    }
}
