//! Tests weights that are codes: products against plain arithmetic and against the CPU device, the bits of rows, and
//! embeddings.

#[path = "../cpu/grouped/source.rs"]
#[allow(dead_code, reason = "the CPU's tests use all of it")]
mod source;

use half::bf16;
use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_kernels::{
    Dense, Device, DeviceError, Embed, GateUp, Linear, Norm, PlanesShape, QuantizedType, ScaleType,
    VocabularyShard,
};

pub use self::source::Source;
use crate::support::{Case, Families, Random, Share, assert_near, begin, bits, cuda, matrix, tensor, values};

pub const TYPES: [QuantizedType; 4] =
    [QuantizedType::Int4, QuantizedType::Int8, QuantizedType::E4m3, QuantizedType::E2m1];

/// The numbers that a group subtracts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Offset {
    None,
    ZeroPoints,
    Minima,
}

/// Returns the CPU device of the fastest path, with activations in f32.
fn cpu() -> CpuDevice {
    let isa = Isa::supported().last().unwrap();
    CpuDevice::new(1, isa).unwrap().with_quantised_activations(false)
}

/// A random matrix. Integers alone have offsets.
fn random_source(
    random: &mut Random,
    element: QuantizedType,
    shape: (usize, usize),
    block: (usize, usize),
    (scales, offset): (ScaleType, Offset),
) -> Source {
    let source = Source::random(random, element, shape, block, (scales, offset == Offset::ZeroPoints));
    let is_integer = matches!(element, QuantizedType::Int4 | QuantizedType::Int8);
    if offset == Offset::Minima && is_integer { source.with_minima(random) } else { source }
}

fn rounded(x: f32) -> f64 {
    f64::from(bf16::from_f32(x).to_f32())
}

/// The products in double precision of inputs and weights that are rounded to bf16 once.
fn wanted(source: &Source, x: &[f32]) -> Vec<f64> {
    let weights: Vec<f64> = (0..source.rows * source.columns)
        .map(|i| rounded(source.weight(i / source.columns, i % source.columns) as f32))
        .collect();
    let rows = x.chunks(source.columns).flat_map(|x| {
        let x: Vec<f64> = x.iter().map(|x| rounded(*x)).collect();
        let dot = |row: &[f64]| row.iter().zip(&x).map(|(w, x)| w * x).sum::<f64>();
        weights.chunks(source.columns).map(dot).collect::<Vec<_>>()
    });
    rows.collect()
}

fn product<D: Families>(device: &mut D, weight: &D::Matrix, outputs: usize, x: &[f32]) -> Vec<f32> {
    let inputs = device.matrix_shape(weight)[1];
    let input = tensor(device, inputs, x);
    let mut out = device.tensor(x.len() / inputs, outputs).unwrap();
    device.linear(Linear::plain(&input, weight), &mut out).unwrap();
    values(device, &out)
}

#[test]
fn codes_have_the_products_of_their_rounded_values() {
    let Some(mut gpu) = cuda("codes") else { return };
    let mut cpu = cpu();
    let mut random = Random::new(71);
    for element in TYPES {
        for (rows, outputs, inputs, block) in [
            (1, 1, 1, (1, 32)),
            (3, 17, 16, (1, 16)),
            (1, 70, 64, (1, 64)),
            (2, 5, 47, (1, 16)),
            (16, 64, 136, (1, 128)),
            (17, 65, 200, (1, 32)),
            (65, 40, 130, (64, 128)),
            // Several splits, and a last one that is partial.
            (4, 66, 1100, (1, 32)),
            (7, 130, 1544, (128, 128)),
            (33, 20, 520, (1, 600)),
        ] {
            for kind in [
                (ScaleType::F32, Offset::None),
                (ScaleType::F16, Offset::ZeroPoints),
                (ScaleType::F32, Offset::ZeroPoints),
                (ScaleType::F16, Offset::Minima),
            ] {
                let source = random_source(&mut random, element, (outputs, inputs), block, kind);
                let x = random.normals(rows * inputs, 1.0);
                let weight = gpu.quantized_matrix(&[source.view()]).unwrap();
                let got = product(&mut gpu, &weight, outputs, &x);
                let what = format!("{element:?} {rows} x {inputs} x {outputs} {block:?} {kind:?}");
                assert_near(&what, &got, &wanted(&source, &x), 1e-5);
                let weight = cpu.quantized_matrix(&[source.view()]).unwrap();
                let of_cpu = product(&mut cpu, &weight, outputs, &x);
                assert_near(&format!("{what}, the CPU"), &got, &of_cpu, 2e-2);
            }
        }
    }
}

/// Each code of a type in a row of its own, so that products are the weights themselves.
#[test]
fn every_code_has_its_value() {
    let Some(mut gpu) = cuda("all codes") else { return };
    for element in TYPES {
        let count = 1 << element.bits();
        let codes: Vec<u8> = (0..count).flat_map(|code| [0, code as u8]).collect();
        let scales: Vec<f32> = (0..count).map(|code| 0.37 + code as f32 / 1024.0).collect();
        let source = Source::new(element, (count, 2), (1, 32), codes, scales, None);
        let weight = gpu.quantized_matrix(&[source.view()]).unwrap();
        let got = product(&mut gpu, &weight, count, &[0.0, 1.0]);
        for (code, got) in got.iter().enumerate() {
            if element == QuantizedType::E4m3 && code & 0x7f == 0x7f {
                assert!(got.is_nan(), "{element:?} {code:#x}: {got}");
                continue;
            }
            let want = rounded(source.weight(code, 1) as f32);
            assert!(f64::from(*got) == want, "{element:?} {code:#x}: {got}, wanted {want}");
        }
    }
}

/// Rows alone, in narrow tiles, in wide tiles, and in blocks that compute one split or all splits.
#[test]
fn a_row_of_a_product_with_codes_has_its_bits_in_any_batch() {
    let Some(gpu) = cuda("bits of codes") else { return };
    let emulated = gpu.describe().contains("emulated");
    let mut gpus = [gpu, cuda("no splits").unwrap().with_enough_tiles(0)];
    let shapes =
        if emulated { &[(72, 1096), (8, 203)][..] } else { &[(6144, 4096), (4096, 12_288), (72, 203)] };
    let mut random = Random::new(72);
    for element in TYPES {
        for &(outputs, inputs) in shapes {
            let kind = (ScaleType::F16, Offset::ZeroPoints);
            let source = random_source(&mut random, element, (outputs, inputs), (1, 32), kind);
            let most = if emulated { 130 } else { 300 };
            let x = random.normals(most * inputs, 1.0);
            let mut alone: Vec<Option<Vec<u32>>> = vec![None; most];
            for (index, gpu) in gpus.iter_mut().enumerate() {
                let weight = gpu.quantized_matrix(&[source.view()]).unwrap();
                for rows in [1, 7, 16, 17, 64, 65, most] {
                    let all = product(gpu, &weight, outputs, &x[..rows * inputs]);
                    for row in [0, rows / 2, rows - 1] {
                        let x = &x[row * inputs..(row + 1) * inputs];
                        let wanted =
                            alone[row].get_or_insert_with(|| bits(&product(gpu, &weight, outputs, x)));
                        let got = bits(&all[row * outputs..(row + 1) * outputs]);
                        assert_eq!(
                            got, *wanted,
                            "{element:?} {outputs} x {inputs}: {index}, row {row} of {rows}"
                        );
                    }
                }
            }
        }
    }
}

/// Fused matrices of codes, with a norm, a bias, a residual and a gate.
struct Layer(QuantizedType);

impl Case for Layer {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let (rows, width, outputs) = (9, 160, 48);
        let mut random = Random::new(73);
        let mut source = |outputs, inputs, block| {
            let kind = (ScaleType::F32, Offset::None);
            random_source(&mut random, self.0, (outputs, inputs), block, kind)
        };
        let (q, k, v) =
            (source(outputs, width, (16, 32)), source(7, width, (1, 64)), source(8, width, (1, 200)));
        let (gate, up) = (source(outputs, width, (1, 128)), source(outputs, width, (16, 32)));
        let down = source(width, outputs, (1, 16));
        let fused = device.quantized_matrix(&[q.view(), k.view(), v.view()]).unwrap();
        let pair = device.quantized_gate_up([gate.view(), up.view()]).unwrap();
        let down = device.quantized_matrix(&[down.view()]).unwrap();
        let x = tensor(device, width, &random.normals(rows * width, 1.0));
        let norms = device.vector(&random.normals(width, 1.0)).unwrap();
        let bias = device.vector(&random.normals(outputs + 15, 0.5)).unwrap();
        let norm = || Some(Norm { weight: &norms, eps: 1e-6 });
        let mut qkv = device.tensor(rows, outputs + 15).unwrap();
        device.linear(Linear { x: &x, norm: norm(), weight: &fused, bias: Some(&bias) }, &mut qkv).unwrap();
        let mut gates = device.tensor(rows, outputs).unwrap();
        device.gate_up(GateUp { x: &x, norm: norm(), weight: &pair, limit: None }, &mut gates).unwrap();
        let mut sum = tensor(device, width, &random.normals(rows * width, 0.5));
        device.linear_add(Linear::plain(&gates, &down), &mut sum).unwrap();
        let mut all = values(device, &qkv);
        for tensor in [&gates, &sum] {
            let largest = all.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let values = values(device, tensor);
            let scale = largest / values.iter().fold(1e-30f32, |most, x| most.max(x.abs()));
            all.extend(values.iter().map(|x| x * scale));
        }
        all
    }
}

#[test]
fn fused_codes_with_norm_bias_gate_and_residual_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("layers of codes") else { return };
    for element in TYPES {
        let want = Layer(element).run(&mut cpu());
        assert_near(&format!("{element:?}"), &Layer(element).run(&mut gpu), &want, 1e-2);
    }
}

/// Embeddings from a table of codes and from a shard, in f32.
struct Table(QuantizedType, Offset);

impl Case for Table {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let (vocabulary, width) = (50, 147);
        let mut random = Random::new(74);
        let kind = (ScaleType::F16, self.1);
        let source = random_source(&mut random, self.0, (vocabulary, width), (1, 32), kind);
        let table = device.quantized_matrix(&[source.view()]).unwrap();
        let shard = random_source(&mut random, self.0, (20, width), (20, 16), kind);
        let shard = device.quantized_matrix(&[shard.view()]).unwrap();
        let ids = [9, 10, 29, 30, 0, 49];
        let mut planes = device.planes(&PlanesShape::default()).unwrap();
        begin(device, &mut planes, &[Share { tokens: 6, ..Share::default() }], &ids, &[], &[]).unwrap();
        let mut out = device.tensor(6, width).unwrap();
        let mut all = Vec::new();
        for (table, shard) in [(&table, None), (&shard, Some(VocabularyShard { first: 10, vocabulary }))] {
            device.embed(Embed { table, shard }, &mut out).unwrap();
            all.extend(values(device, &out));
        }
        all
    }
}

#[test]
fn embeddings_of_codes_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("tables of codes") else { return };
    for element in TYPES {
        for offset in [Offset::None, Offset::ZeroPoints, Offset::Minima] {
            let case = Table(element, offset);
            assert_near(&format!("{element:?} {offset:?}"), &case.run(&mut gpu), &case.run(&mut cpu()), 0.0);
        }
    }
}

#[test]
fn a_matrix_of_codes_takes_the_memory_of_its_codes() {
    let Some(mut gpu) = cuda("size of codes") else { return };
    for (element, group, scales, offset, bits) in [
        (QuantizedType::Int4, 32, ScaleType::F16, Offset::None, 4.5),
        (QuantizedType::Int4, 128, ScaleType::F16, Offset::ZeroPoints, 4.1875),
        (QuantizedType::E2m1, 32, ScaleType::F32, Offset::None, 5.0),
        (QuantizedType::E4m3, 256, ScaleType::F32, Offset::None, 8.25),
        (QuantizedType::E4m3, 1024, ScaleType::F32, Offset::None, 8.0625),
    ] {
        let source = random_source(&mut Random::new(75), element, (64, 512), (1, group), (scales, offset));
        let weight = gpu.quantized_matrix(&[source.view()]).unwrap();
        let got = gpu.matrix_bytes(&weight) as f64 * 8.0 / f64::from(64 * 512);
        assert_eq!(got, bits, "{element:?} {group} {scales:?} {offset:?}");
    }
}

#[test]
fn matrices_of_codes_that_do_not_fit_are_refused() {
    let Some(mut gpu) = cuda("refusals of codes") else { return };
    let new = |element, rows, columns| {
        random_source(&mut Random::new(76), element, (rows, columns), (1, 32), (ScaleType::F32, Offset::None))
    };
    let (int4, wider) = (new(QuantizedType::Int4, 4, 64), new(QuantizedType::Int4, 4, 96));
    let (e4m3, taller) = (new(QuantizedType::E4m3, 4, 64), new(QuantizedType::Int4, 5, 64));
    for other in [&wider, &e4m3] {
        let refused = gpu.quantized_matrix(&[int4.view(), other.view()]).map(|_| ());
        assert!(matches!(refused, Err(DeviceError::Unsupported(_))), "{refused:?}");
    }
    let refused = gpu.quantized_gate_up([int4.view(), taller.view()]).map(|_| ());
    assert!(matches!(refused, Err(DeviceError::Misuse(_))), "{refused:?}");
    let none = gpu.quantized_matrix(&[]).map(|_| ());
    assert!(matches!(none, Err(DeviceError::Misuse(_))), "{none:?}");
    let short = tutti_kernels::QuantizedRows { scales: &int4.scales[1..], ..int4.view() };
    let refused = gpu.quantized_matrix(&[short]).map(|_| ());
    assert!(matches!(refused, Err(DeviceError::Misuse(_))), "{refused:?}");
}

/// A layer may have codes beside unquantised weights: an LM head in bf16, for example.
#[test]
fn codes_and_stored_weights_share_inputs() {
    let Some(mut gpu) = cuda("codes beside weights") else { return };
    let mut random = Random::new(77);
    let kind = (ScaleType::F32, Offset::None);
    let source = random_source(&mut random, QuantizedType::E4m3, (24, 64), (1, 64), kind);
    let numbers: Vec<f32> = (0..24 * 64).map(|i| source.weight(i / 64, i % 64) as f32).collect();
    let codes = gpu.quantized_matrix(&[source.view()]).unwrap();
    let x = tensor(&mut gpu, 64, &random.normals(5 * 64, 1.0));
    for dtype in [tutti_kernels::WeightType::F32, tutti_kernels::WeightType::Bf16] {
        let stored = matrix(&mut gpu, dtype, 24, &numbers);
        let mut results = Vec::new();
        for weight in [&codes, &stored, &codes] {
            let mut out = gpu.tensor(5, 24).unwrap();
            gpu.linear(Linear::plain(&x, weight), &mut out).unwrap();
            results.push(values(&mut gpu, &out));
        }
        assert_eq!(bits(&results[0]), bits(&results[2]), "{dtype:?}");
        assert_near(&format!("{dtype:?}"), &results[0], &results[1], 1e-2);
    }
}
