//! Tests products of weights that a checkpoint stores quantised against plain arithmetic.

mod source;

use tutti_kernels::cpu::{CpuDevice, Isa, PackedOutcome, PackedWeights, Tensor, Weights};
use tutti_kernels::{
    Dense, Device, DeviceError, Embed, GateUp, GroupOffsets, Linear, QuantizedRows, QuantizedType, ScaleType,
};

use self::source::Source;
pub use self::source::quantised;
use crate::support::{Random, Share, assert_near, begin, bits, devices, tensor};

const TYPES: [QuantizedType; 4] =
    [QuantizedType::Int4, QuantizedType::Int8, QuantizedType::E4m3, QuantizedType::E2m1];
const CHUNK: usize = 128;

fn product(device: &mut CpuDevice, x: &Tensor, weights: &Weights, outputs: usize) -> Vec<f32> {
    let mut out = device.tensor(x.live(), outputs).unwrap();
    device.linear(Linear::plain(x, weights), &mut out).unwrap();
    out.values().to_vec()
}

#[test]
fn int4_has_the_bits_of_plain_arithmetic_on_every_path() {
    for (name, mut device) in devices("int4 rows") {
        let mut random = Random::new(31);
        for (rows, inputs, outputs, group) in [
            (1, 128, 48, 32),
            (2, 1, 1, 32),
            (3, 7, 17, 128),
            (5, 130, 100, 64),
            (13, 384, 33, 32),
            (16, 160, 20, 128),
            (29, 259, 64, 64),
            (4, 300, 40, 300),
            (2, 512, 35, 256),
        ] {
            for (kind, has_minima) in [
                ((ScaleType::F16, false), false),
                ((ScaleType::F16, true), false),
                ((ScaleType::F16, false), true),
                ((ScaleType::F32, false), false),
                ((ScaleType::F32, true), false),
                ((ScaleType::F32, false), true),
            ] {
                let mut source =
                    Source::random(&mut random, QuantizedType::Int4, (outputs, inputs), (1, group), kind);
                if has_minima {
                    source = source.with_minima(&mut random);
                }
                let weights = device.quantized_matrix(&[source.view()]).unwrap();
                let x = random.normals(rows * inputs, 1.0);
                let got = {
                    let x = tensor(&mut device, inputs, &x);
                    product(&mut device, &x, &weights, outputs)
                };
                for (i, got) in got.iter().enumerate() {
                    let want = source.dot(i % outputs, &x[i / outputs * inputs..][..inputs], 0.0);
                    assert_eq!(
                        got.to_bits(),
                        want.to_bits(),
                        "{name} {rows}x{inputs}x{outputs} {group} {kind:?} {has_minima}, {i}: {got}, wanted {want}"
                    );
                }
            }
        }
    }
}

/// The largest codes and activations of one sign: the sums of products of bytes have the largest possible magnitude.
#[test]
fn nothing_saturates() {
    for (name, mut device) in devices("int4 extremes") {
        for (sign, code, zeros) in [(1.0, 15, None), (-1.0, 15, None), (1.0, 0, None), (-1.0, 15, Some(0))] {
            for group in [32, 128] {
                let (inputs, outputs) = (256, 20);
                let count = outputs * inputs / group;
                let source = Source::new(
                    QuantizedType::Int4,
                    (outputs, inputs),
                    (1, group),
                    vec![code; outputs * inputs],
                    vec![0.5; count],
                    zeros.map(|zero| vec![zero; count]),
                );
                let weights = device.quantized_matrix(&[source.view()]).unwrap();
                let x = vec![sign * 3.0; inputs];
                let want = source.dot(0, &x, 0.0);
                assert_near(&name, &[want], &source.product(&x)[..1], 1e-5);
                let x = tensor(&mut device, inputs, &x);
                let got = product(&mut device, &x, &weights, outputs);
                assert!(
                    got.iter().all(|got| got.to_bits() == want.to_bits()),
                    "{name}: {got:?}, wanted {want}"
                );
            }
        }
    }
}

#[test]
fn all_codes_with_activations_in_f32_are_near_double_precision() {
    for (name, device) in devices("widened") {
        let mut device = device.with_quantised_activations(false);
        let mut random = Random::new(32);
        for element in TYPES {
            for (rows, inputs, outputs, block) in [
                (1, 128, 48, (1, 32)),
                (2, 1, 1, (1, 128)),
                (3, 7, 17, (1, 16)),
                (5, 130, 100, (1, 16)),
                (13, 384, 133, (128, 128)),
                (29, 259, 64, (1, 259)),
                (4, 160, 40, (1, 64)),
            ] {
                for (kind, has_minima) in [
                    ((ScaleType::F16, true), false),
                    ((ScaleType::F32, false), false),
                    ((ScaleType::F16, false), true),
                ] {
                    let mut source = Source::random(&mut random, element, (outputs, inputs), block, kind);
                    match element {
                        QuantizedType::Int4 | QuantizedType::Int8 if has_minima => {
                            source = source.with_minima(&mut random);
                        }
                        _ => {}
                    }
                    let weights = device.quantized_matrix(&[source.view()]).unwrap();
                    let x = random.normals(rows * inputs, 1.0);
                    let got = {
                        let x = tensor(&mut device, inputs, &x);
                        product(&mut device, &x, &weights, outputs)
                    };
                    let what = format!("{name} {element:?} {rows}x{inputs}x{outputs} {block:?} {kind:?}");
                    assert_near(&what, &got, &source.product(&x), 3e-6);
                }
            }
        }
    }
}

/// Paths with fused multiply-adds have the same bits, and a row has the same bits alone and in any batch.
#[test]
fn a_row_has_the_same_bits_alone_in_any_batch_and_on_any_path() {
    for (element, full) in
        TYPES.into_iter().map(|element| (element, true)).chain([(QuantizedType::Int4, false)])
    {
        let (inputs, outputs) = (560, 130);
        let mut of_paths: Vec<(String, Vec<u32>)> = Vec::new();
        for (name, device) in devices("grouped batches") {
            let mut device = device.with_quantised_activations(!full);
            let mut random = Random::new(33);
            let kind = (ScaleType::F32, true);
            let source = Source::random(&mut random, element, (outputs, inputs), (1, 32), kind);
            let weights = device.quantized_matrix(&[source.view()]).unwrap();
            let x = random.normals(40 * inputs, 1.0);
            let mut alone = Vec::new();
            for row in x.chunks(inputs) {
                let row = tensor(&mut device, inputs, row);
                alone.extend(bits(&product(&mut device, &row, &weights, outputs)));
            }
            for rows in (1..=16).chain([31, 40]) {
                let first = random.below(40 - rows + 1);
                let batch = tensor(&mut device, inputs, &x[first * inputs..(first + rows) * inputs]);
                let got = bits(&product(&mut device, &batch, &weights, outputs));
                let want = &alone[first * outputs..(first + rows) * outputs];
                assert!(got == want, "{name} {element:?}: {rows} rows");
            }
            if !full || !name.starts_with(&Isa::Portable.to_string()) {
                of_paths.push((name, alone));
            }
        }
        for (name, other) in &of_paths {
            assert!(*other == of_paths[0].1, "{element:?}: {name} differs from {}", of_paths[0].0);
        }
    }
}

#[test]
fn bias_residual_fused_rows_and_pairs() {
    for (name, mut device) in devices("grouped parts") {
        let mut random = Random::new(34);
        let (rows, inputs) = (19, 320);
        for element in TYPES {
            let kind = (ScaleType::F16, false);
            let mut part = |outputs| Source::random(&mut random, element, (outputs, inputs), (1, 32), kind);
            let (top, bottom) = (part(24), part(24));
            let outputs = top.rows + bottom.rows;
            let fused = device.quantized_matrix(&[top.view(), bottom.view()]).unwrap();
            assert_eq!(device.matrix_shape(&fused), [outputs, inputs]);
            let values = random.normals(rows * inputs, 1.0);
            let x = tensor(&mut device, inputs, &values);
            let parts = [&top, &bottom].map(|part| {
                let weights = device.quantized_matrix(&[part.view()]).unwrap();
                product(&mut device, &x, &weights, part.rows)
            });
            let stacked: Vec<f32> = (0..rows)
                .flat_map(|row| parts.iter().flat_map(move |part| &part[row * 24..][..24]).copied())
                .collect();
            assert_eq!(
                bits(&product(&mut device, &x, &fused, outputs)),
                bits(&stacked),
                "{name} {element:?}"
            );

            let (bias, before) = (random.normals(outputs, 1.0), random.normals(rows * outputs, 1.0));
            let vector = device.vector(&bias).unwrap();
            let mut out = tensor(&mut device, outputs, &before);
            device.linear_add(Linear { bias: Some(&vector), ..Linear::plain(&x, &fused) }, &mut out).unwrap();
            let want: Vec<f64> = stacked
                .iter()
                .enumerate()
                .map(|(i, y)| f64::from(*y) + f64::from(before[i]) + f64::from(bias[i % outputs]))
                .collect();
            assert_near(&name, out.values(), &want, 1e-6);

            let pair = device.quantized_gate_up([top.view(), bottom.view()]).unwrap();
            let mut gated = device.tensor(rows, top.rows).unwrap();
            device.gate_up(GateUp { x: &x, norm: None, weight: &pair, limit: None }, &mut gated).unwrap();
            let silu = |gate: f32| f64::from(gate) / (1.0 + (-f64::from(gate)).exp());
            let want: Vec<f64> =
                parts[0].iter().zip(&parts[1]).map(|(gate, up)| silu(*gate) * f64::from(*up)).collect();
            assert_near(&name, gated.values(), &want, 1e-5);
        }
    }
}

#[test]
fn a_row_of_a_table_is_dequantised() {
    for (name, mut device) in devices("grouped table") {
        let mut random = Random::new(35);
        for (element, block) in TYPES.into_iter().zip([(1, 32), (1, 150), (16, 128), (1, 16)]) {
            let (width, vocabulary) = (CHUNK + 22, 37);
            let kind = (ScaleType::F32, true);
            let mut source = Source::random(&mut random, element, (vocabulary, width), block, kind);
            if element == QuantizedType::Int4 {
                source = source.with_minima(&mut random);
            }
            let table = device.quantized_matrix(&[source.view()]).unwrap();
            let ids = [36, 0, 17, 5];
            begin(&mut device, &[Share { tokens: 4, ..Share::default() }], &ids, &[]);
            let mut out = device.tensor(4, width).unwrap();
            device.embed(Embed { table: &table, shard: None }, &mut out).unwrap();
            for (id, row) in ids.iter().zip(out.values().chunks(width)) {
                let want: Vec<f32> = (0..width).map(|i| source.weight(*id as usize, i) as f32).collect();
                let near = |(one, other): (&f32, &f32)| (one - other).abs() <= 1e-6;
                let equal = match source.minima {
                    None => row == want,
                    // With scales of 24 bits, a product and its difference from a minimum are rounded.
                    Some(_) => row.iter().zip(&want).all(near),
                };
                assert!(equal, "{name} {element:?}: id {id}");
            }
        }
    }
}

/// A NaN or infinite activation, and a weight that is NaN, make the result NaN.
#[test]
fn what_is_not_finite_does_not_come_out_as_a_number() {
    for (name, mut device) in devices("grouped poison") {
        let new =
            |element, code| Source::new(element, (3, 200), (1, 32), vec![code; 600], vec![1.0; 21], None);
        for source in [new(QuantizedType::Int4, 9), new(QuantizedType::E4m3, 0x38)] {
            let weights = device.quantized_matrix(&[source.view()]).unwrap();
            for bad in [f32::NAN, f32::INFINITY] {
                let mut values = vec![1.0; 200];
                values[150] = bad;
                let x = tensor(&mut device, 200, &values);
                let got = product(&mut device, &x, &weights, 3);
                assert!(got.iter().all(|y| !y.is_finite()), "{name}: {bad} became {got:?}");
            }
        }
        let mut source = new(QuantizedType::E4m3, 0x38);
        source.codes[230] = 0xff;
        let source = Source::new(source.element, (3, 200), (1, 32), source.codes, source.scales, None);
        let weights = device.quantized_matrix(&[source.view()]).unwrap();
        let x = tensor(&mut device, 200, &[1.0; 200]);
        let got = product(&mut device, &x, &weights, 3);
        assert!(got[0] == 200.0 && got[1].is_nan() && got[2] == 200.0, "{name}: {got:?}");
    }
}

#[test]
fn four_bits_stay_four_bits() {
    for (name, mut device) in devices("grouped size") {
        let mut random = Random::new(36);
        for (element, group, kind, bits) in [
            (QuantizedType::Int4, 32, (ScaleType::F16, false), 4.5),
            (QuantizedType::Int4, 32, (ScaleType::F16, true), 5.0),
            (QuantizedType::Int4, 128, (ScaleType::F16, false), 4.5),
            (QuantizedType::E2m1, 32, (ScaleType::F32, false), 5.0),
            (QuantizedType::E4m3, 128, (ScaleType::F32, false), 8.5),
        ] {
            let source = Source::random(&mut random, element, (64, 512), (1, group), kind);
            let weights = device.quantized_matrix(&[source.view()]).unwrap();
            let most = (64 * 512) as f64 * bits / 8.0;
            assert!(device.matrix_bytes(&weights) as f64 <= most, "{name} {element:?} {group} {kind:?}");
        }
    }
}

#[test]
fn rows_that_do_not_fit_are_refused() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let mut random = Random::new(37);
    let kind = (ScaleType::F16, true);
    let source = Source::random(&mut random, QuantizedType::Int4, (4, 64), (1, 32), kind);
    let view = source.view();
    let refused = |device: &mut CpuDevice, rows: QuantizedRows<'_>| match device.quantized_matrix(&[rows]) {
        Err(DeviceError::Misuse(why) | DeviceError::Unsupported(why)) => why,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("{rows:?} is taken"),
    };
    for (rows, named) in [
        (QuantizedRows { codes: &source.packed[1..], ..view }, "bytes of codes"),
        (QuantizedRows { stride: 31, ..view }, "rows of 31 bytes"),
        (QuantizedRows { scales: &source.scales[1..], ..view }, "7 scales"),
        (QuantizedRows { offsets: GroupOffsets::ZeroPoints(&[0; 7]), ..view }, "7 zero points"),
        (QuantizedRows { offsets: GroupOffsets::ZeroPoints(&[16; 8]), ..view }, "8 zero points"),
        (QuantizedRows { offsets: GroupOffsets::Minima(&[0.1; 7]), ..view }, "7 minima"),
        (QuantizedRows { offsets: GroupOffsets::Minima(&[0.1; 8]), ..view }, "8 minima"),
        (QuantizedRows { scales: &[0.1; 8], ..view }, "no F16"),
        (QuantizedRows { group: 0, ..view }, "groups of 1 x 0"),
        (QuantizedRows { group: 24, ..view }, "groups of 24 inputs"),
        (QuantizedRows { element: QuantizedType::E2m1, ..view }, "zero points"),
    ] {
        let why = refused(&mut device, rows);
        assert!(why.contains(named), "{why}, wanted {named}");
    }
    let other = Source::random(&mut random, QuantizedType::E2m1, (4, 64), (1, 32), kind);
    let fused = device.quantized_matrix(&[view, other.view()]).map(|_| ());
    assert!(matches!(fused, Err(DeviceError::Unsupported(_))), "{fused:?}");
}

#[test]
fn a_later_start_maps_the_rows_that_were_packed() {
    let mut random = Random::new(38);
    let kind = (ScaleType::F32, true);
    let sources = TYPES.map(|element| Source::random(&mut random, element, (33, 200), (1, 64), kind));
    let x = random.normals(3 * 200, 1.0);
    let dir = tempfile::tempdir().unwrap();
    let mut outcomes = Vec::new();
    let mut of_starts = Vec::new();
    for _ in 0..2 {
        let packed = PackedWeights::open(dir.path(), "a checkpoint");
        let device = CpuDevice::new(2, Isa::detect()).unwrap();
        let mut device = device.with_packed_weights(packed.clone());
        let weights = sources.each_ref().map(|source| device.quantized_matrix(&[source.view()]).unwrap());
        outcomes.push(packed.finish());
        let x = tensor(&mut device, 200, &x);
        of_starts.push(weights.map(|weights| bits(&product(&mut device, &x, &weights, 33))));
    }
    assert_eq!(outcomes, [PackedOutcome::Written, PackedOutcome::Mapped]);
    assert_eq!(of_starts[0], of_starts[1]);
}
