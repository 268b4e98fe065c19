//! Tests that a row of a matrix product has the same bits, whatever rows are computed with it. The answers of a request
//! do not depend on its neighbours only if this holds, and cuBLASLt does not promise it.

use tutti_kernels::cuda::CudaDevice;
use tutti_kernels::{Dense, Device, HostMatrix, Linear, Quantize, WeightType};

use crate::support::{Random, bits, bytes, cuda, tensor, values};

type Matrix = <CudaDevice as Device>::Matrix;

/// Outputs and inputs of the matrices of Qwen3-0.6B and Qwen3-8B: queries with keys and values, attention's output,
/// gate with up, down, and a part of the head of logits.
const SHAPES: [(usize, usize); 10] = [
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (10_240, 1024),
    (6144, 4096),
    (4096, 4096),
    (24_576, 4096),
    (4096, 12_288),
    (5120, 4096),
];
/// Shapes for an emulated GPU, which would take minutes for the others.
const SMALL: [(usize, usize); 2] = [(96, 64), (40, 132)];
const ROWS: [usize; 13] = [1, 2, 3, 7, 16, 17, 64, 65, 127, 128, 256, 512, 2048];

/// The bits of `x · Wᵀ`, for x in rows of the matrix's inputs.
fn product(gpu: &mut CudaDevice, weight: &Matrix, x: &[f32], (outputs, inputs): (usize, usize)) -> Vec<u32> {
    let input = tensor(gpu, inputs, x);
    let mut out = gpu.tensor(x.len() / inputs, outputs).unwrap();
    gpu.linear(Linear { x: &input, norm: None, weight, bias: None }, &mut out).unwrap();
    bits(&values(gpu, &out))
}

/// Number of random elements that a matrix repeats. It shares no factor with a matrix's width, so the rows differ.
const PATTERN: usize = (1 << 20) + 7;

/// A matrix of random elements between -1 and 1.
fn weight(gpu: &mut CudaDevice, dtype: WeightType, (outputs, inputs): (usize, usize)) -> Matrix {
    let count = outputs * inputs;
    let pattern = bytes(dtype, &uniform(7, PATTERN.min(count)));
    let mut elements = pattern.repeat(count.div_ceil(PATTERN));
    elements.truncate(count * dtype.bytes());
    gpu.matrix(&[HostMatrix::new(&elements, dtype, outputs, inputs)], Quantize::None).unwrap()
}

fn uniform(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.below(1 << 16) as f32 / 32_768.0 - 1.0).collect()
}

#[test]
fn a_row_of_a_product_has_its_bits_beside_any_other_rows() {
    let Some(mut gpu) = cuda("bits of rows") else { return };
    let emulated = gpu.describe().contains("emulated");
    let (shapes, most) = if emulated { (&SMALL[..], 128) } else { (&SHAPES[..], 2048) };
    let mut differ = Vec::new();
    for dtype in [WeightType::Bf16, WeightType::F16, WeightType::F32] {
        for &shape in shapes {
            let (outputs, inputs) = shape;
            let weight = weight(&mut gpu, dtype, shape);
            let x = uniform(inputs as u64, most * inputs);
            for rows in ROWS.into_iter().filter(|&rows| rows <= most) {
                let all = product(&mut gpu, &weight, &x[..rows * inputs], shape);
                for row in [0, rows / 2, rows - 1] {
                    let alone = product(&mut gpu, &weight, &x[row * inputs..(row + 1) * inputs], shape);
                    if all[row * outputs..(row + 1) * outputs] != alone[..] {
                        differ.push(format!("{dtype:?} {outputs} x {inputs}: row {row} of {rows}"));
                    }
                }
            }
        }
    }
    assert!(differ.is_empty(), "rows have other bits alone: {differ:#?}");
}
