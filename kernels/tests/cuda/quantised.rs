//! Tests matrices that a GPU quantises when it loads them (`--quantize`): the weights are those of a CPU, to the bit.

use half::bf16;
use tutti_kernels::cuda::{CudaDevice, Matrix};
use tutti_kernels::{
    Dense, Device, DeviceError, Embed, GateUp, HostMatrix, Linear, PlanesShape, Quantize, WeightType,
};

use crate::support::{Families, Random, Share, assert_near, begin, bits, bytes, cpus, cuda, tensor, values};

const TYPES: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::Bf16];
const QUANTISED: [Quantize; 2] = [Quantize::Int8, Quantize::Int4];

/// The weights of some outputs of a matrix.
fn weights_of<D: Families>(device: &mut D, matrix: &D::Matrix, outputs: &[u32]) -> Vec<f32> {
    let inputs = device.matrix_shape(matrix)[1];
    let mut planes = device.planes(&PlanesShape::default()).unwrap();
    let tokens = outputs.len();
    begin(device, &mut planes, &[Share { tokens, ..Share::default() }], outputs, &[], &[]).unwrap();
    let mut out = device.tensor(tokens, inputs).unwrap();
    device.embed(Embed { table: matrix, shard: None }, &mut out).unwrap();
    values(device, &out)
}

fn all_weights_of<D: Families>(device: &mut D, matrix: &D::Matrix) -> Vec<f32> {
    let outputs: Vec<u32> = (0..device.matrix_shape(matrix)[0] as u32).collect();
    weights_of(device, matrix, &outputs)
}

#[test]
fn weights_that_a_gpu_quantises_are_those_of_the_cpu() {
    let Some(gpu) = cuda("quantised weights") else { return };
    let mut gpu = gpu.with_host_threads(3);
    let mut random = Random::new(81);
    for quantize in QUANTISED {
        for dtype in TYPES {
            for (outputs, inputs) in [(1, 1), (5, 47), (40, 130), (33, 300)] {
                let stored = bytes(dtype, &random.normals((outputs + 3) * inputs, 0.05));
                let (first, second) = stored.split_at(outputs * inputs * dtype.bytes());
                let sources = [
                    HostMatrix::new(first, dtype, outputs, inputs),
                    HostMatrix::new(second, dtype, 3, inputs),
                ];
                let matrix = gpu.matrix(&sources, quantize).unwrap();
                let got = all_weights_of(&mut gpu, &matrix);
                for (isa, mut cpu) in cpus() {
                    let matrix = cpu.matrix(&sources, quantize).unwrap();
                    let want = all_weights_of(&mut cpu, &matrix);
                    assert_eq!(bits(&got), bits(&want), "{quantize:?} {dtype:?} {outputs} x {inputs}, {isa}");
                }
            }
        }
    }
}

/// A matrix whose codes are copied in several pieces, and a share of another matrix's columns.
#[test]
fn large_matrices_and_shares_of_columns_are_quantised_row_by_row() {
    let Some(gpu) = cuda("quantised shares") else { return };
    let mut gpu = gpu.with_host_threads(2);
    let dtype = WeightType::Bf16;
    for (quantize, columns) in [(Quantize::Int8, 1100), (Quantize::Int4, 2080)] {
        let (rows, stride) = (8300, 2100);
        let len = ((rows - 1) * stride + columns) * dtype.bytes();
        // The numbers repeat, but at a distance that no two rows have.
        let numbers = bytes(dtype, &Random::new(82).normals(65_537, 0.05));
        let stored: Vec<u8> = numbers.iter().copied().cycle().take(len).collect();
        let source = HostMatrix { bytes: &stored, dtype, rows, columns, stride };
        let matrix = gpu.matrix(&[source], quantize).unwrap();
        // The second piece of 8 MiB begins with row 7,598 or 8,065.
        let chosen = [0, 1, 7597, 7598, 7599, 8064, 8065, 8299];
        let got = weights_of(&mut gpu, &matrix, &chosen);
        let (_, mut cpu) = cpus().last().unwrap();
        let matrix = cpu.matrix(&[source], quantize).unwrap();
        assert_eq!(bits(&got), bits(&weights_of(&mut cpu, &matrix, &chosen)), "{quantize:?}");
    }
}

fn linear(gpu: &mut CudaDevice, matrix: &Matrix, x: &[f32]) -> Vec<f32> {
    let [outputs, inputs] = gpu.matrix_shape(matrix);
    let x = tensor(gpu, inputs, x);
    let mut out = gpu.tensor(9, outputs).unwrap();
    gpu.linear(Linear::plain(&x, matrix), &mut out).unwrap();
    values(gpu, &out)
}

#[test]
fn products_and_gates_are_those_of_the_quantised_weights() {
    let Some(mut gpu) = cuda("quantised products") else { return };
    let (rows, outputs, inputs, dtype) = (9, 40, 300, WeightType::F32);
    let rounded = |x: f32| f64::from(bf16::from_f32(x).to_f32());
    let mut random = Random::new(83);
    for quantize in QUANTISED {
        let stored = [0, 1].map(|_| bytes(dtype, &random.normals(outputs * inputs, 0.05)));
        let sources = [0, 1].map(|index| HostMatrix::new(&stored[index], dtype, outputs, inputs));
        let x = random.normals(rows * inputs, 1.0);
        let products = sources.map(|source| {
            let matrix = gpu.matrix(&[source], quantize).unwrap();
            let weights = all_weights_of(&mut gpu, &matrix);
            let want: Vec<f64> = x
                .chunks(inputs)
                .flat_map(|x| weights.chunks(inputs).map(move |w| (x, w)))
                .map(|(x, w)| x.iter().zip(w).map(|(x, w)| rounded(*x) * rounded(*w)).sum())
                .collect();
            let got = linear(&mut gpu, &matrix, &x);
            assert_near(&format!("{quantize:?}"), &got, &want, 1e-5);
            got
        });
        let pair = gpu.gate_up_matrix(sources, quantize).unwrap();
        let input = tensor(&mut gpu, inputs, &x);
        let mut out = gpu.tensor(rows, outputs).unwrap();
        gpu.gate_up(GateUp { x: &input, norm: None, weight: &pair, limit: None }, &mut out).unwrap();
        let [gates, ups] = &products;
        let want = gates.iter().zip(ups).map(|(&gate, &up)| {
            let gate = f64::from(gate);
            gate / (1.0 + (-gate).exp()) * f64::from(up)
        });
        let want: Vec<f64> = want.collect();
        assert_near(&format!("gates of {quantize:?}"), &values(&mut gpu, &out), &want, 1e-5);
    }
}

#[test]
fn heads_and_tables_have_eight_bits_where_matrices_have_four() {
    let Some(mut gpu) = cuda("quantised heads") else { return };
    let (outputs, inputs, dtype) = (24, 256, WeightType::Bf16);
    let stored = bytes(dtype, &Random::new(84).normals(outputs * inputs, 0.05));
    let source = [HostMatrix::new(&stored, dtype, outputs, inputs)];
    let int8 = gpu.matrix(&source, Quantize::Int8).unwrap();
    let of_int8 = bits(&all_weights_of(&mut gpu, &int8));
    for quantize in QUANTISED {
        let heads = [
            gpu.head_matrix(&source, quantize).unwrap(),
            gpu.table_matrix(&source, quantize).unwrap(),
            gpu.tied_matrix(&source, quantize).unwrap(),
        ];
        for head in &heads {
            assert_eq!(bits(&all_weights_of(&mut gpu, head)), of_int8, "{quantize:?}");
        }
    }
    let int4 = gpu.matrix(&source, Quantize::Int4).unwrap();
    let weights = (outputs * inputs) as u64;
    assert_eq!(gpu.matrix_bytes(&int8) * 8, weights * 8 + weights / 4);
    assert_eq!(gpu.matrix_bytes(&int4) * 8, weights * 4 + weights / 2);
}

/// A weight that is not finite makes its group NaN and no other.
#[test]
fn weights_that_are_not_finite_propagate() {
    let Some(mut gpu) = cuda("quantised NaN") else { return };
    let (inputs, dtype) = (256, WeightType::F32);
    for (quantize, group) in [(Quantize::Int8, 128), (Quantize::Int4, 32)] {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut numbers = Random::new(85).normals(3 * inputs, 0.05);
            numbers[inputs + group + 5] = bad;
            let stored = bytes(dtype, &numbers);
            let matrix = gpu.matrix(&[HostMatrix::new(&stored, dtype, 3, inputs)], quantize).unwrap();
            for (index, weight) in all_weights_of(&mut gpu, &matrix).iter().enumerate() {
                assert_eq!(
                    weight.is_nan(),
                    index / group == inputs / group + 1,
                    "{quantize:?} {bad} {index}"
                );
            }
        }
    }
}

#[test]
fn a_share_that_cuts_a_group_of_four_bits_is_refused() {
    let Some(mut gpu) = cuda("quantised cuts") else { return };
    let (dtype, stored) = (WeightType::Bf16, vec![0; 2 * (64 + 40)]);
    let source = [HostMatrix { bytes: &stored, dtype, rows: 2, columns: 40, stride: 64 }];
    let refused = gpu.matrix(&source, Quantize::Int4).map(|_| ());
    assert!(
        matches!(&refused, Err(DeviceError::Unsupported(why)) if why.contains("40 of 64 inputs")),
        "{refused:?}"
    );
    assert!(gpu.matrix(&source, Quantize::Int8).is_ok());
    let none = gpu.matrix(&[], Quantize::Int8).map(|_| ());
    assert!(matches!(none, Err(DeviceError::Misuse(_))), "{none:?}");
}
