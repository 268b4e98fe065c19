//! Tests hyper-connections against double precision. Also tests that other rows and threads change no bit.

use tutti_kernels::cpu::{CpuDevice, Isa, Tensor};
use tutti_kernels::{Device, DeviceError, HyperConnections, HyperShape, StreamProjection};

use crate::support::{Random, assert_near, bits, devices, tensor};

const ROWS: usize = 5;

/// Shapes whose streams fill whole vectors, and shapes that leave remainders, of outputs, too.
fn shapes() -> Vec<HyperShape> {
    let shape =
        |streams, width, iterations| HyperShape { streams, width, norm_eps: 1e-6, eps: 1e-5, iterations };
    vec![
        shape(4, 32, 20),
        shape(4, 19, 1),
        shape(2, 16, 3),
        shape(3, 5, 20),
        shape(8, 24, 2),
        shape(1, 7, 20),
    ]
}

/// Weights and operands of all operations.
struct Numbers {
    streams: Vec<f32>,
    /// A row of `width` elements per row of streams.
    x: Vec<f32>,
    weight: Vec<f32>,
    scale: Vec<f32>,
    base: Vec<f32>,
}

impl Numbers {
    fn new(shape: HyperShape) -> Self {
        let mut random = Random::new(5);
        let elements = shape.stream_elements();
        Self {
            streams: random.normals(ROWS * elements, 1.5),
            x: random.normals(ROWS * shape.width, 1.0),
            weight: random.normals(shape.mix_elements() * elements, 0.2),
            scale: vec![0.7, 1.3, 2.1],
            base: random.normals(shape.mix_elements(), 0.5),
        }
    }
}

/// The results of all operations: mixes, collapsed, combined, head and spread.
#[derive(Debug, PartialEq)]
struct Results<T>([Vec<T>; 5]);

/// Computes all operations on rows `first .. first + rows`.
fn run(device: &mut CpuDevice, shape: HyperShape, first: usize, rows: usize) -> Results<f32> {
    let Numbers { streams, x, weight, scale, base } = Numbers::new(shape);
    let (elements, width) = (shape.stream_elements(), shape.width);
    let of = |all: &[f32], width: usize| all[first * width..(first + rows) * width].to_vec();
    let x = tensor(device, width, &of(&x, width));
    let mut streams = tensor(device, elements, &of(&streams, elements));
    let [weight, scale, base] = [&weight, &scale, &base].map(|values| device.vector(values).unwrap());
    let mut of_width = |width: usize| device.tensor(rows, width).unwrap();
    let mut mixes: Tensor = of_width(shape.mix_elements());
    let (mut collapsed, mut head, mut spread) = (of_width(width), of_width(width), of_width(elements));
    let projection = StreamProjection { weight: &weight, scale: &scale, base: &base };
    device.mix_streams(&streams, projection, shape, &mut mixes).unwrap();
    device.collapse_streams(&streams, &mixes, shape, &mut collapsed).unwrap();
    // The head's weight is that of the first outputs.
    let numbers = Numbers::new(shape);
    let weight = device.vector(&numbers.weight[..shape.streams * elements]).unwrap();
    let (scale, base) =
        (device.vector(&[0.9]).unwrap(), device.vector(&numbers.base[..shape.streams]).unwrap());
    let projection = StreamProjection { weight: &weight, scale: &scale, base: &base };
    device.head_streams(&streams, projection, shape, &mut head).unwrap();
    device.spread(&x, shape, &mut spread).unwrap();
    device.combine_streams(&x, &mixes, shape, &mut streams).unwrap();
    Results([&mixes, &collapsed, &streams, &head, &spread].map(|tensor| tensor.values().to_vec()))
}

fn reference(shape: HyperShape) -> Results<f64> {
    let Numbers { streams, x, weight, scale, base } = Numbers::new(shape);
    let HyperShape { streams: count, width, norm_eps, eps, iterations } = shape;
    let (elements, outputs) = (shape.stream_elements(), shape.mix_elements());
    let (norm_eps, eps) = (f64::from(norm_eps), f64::from(eps));
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let mut results: [Vec<f64>; 5] = Default::default();
    for row in 0..ROWS {
        let s: Vec<f64> = streams[row * elements..][..elements].iter().map(|&x| x.into()).collect();
        let y: Vec<f64> = x[row * width..][..width].iter().map(|&x| x.into()).collect();
        let square = s.iter().map(|x| x * x).sum::<f64>() / elements as f64;
        let m = |output: usize| {
            let weight = &weight[output * elements..][..elements];
            weight.iter().zip(&s).map(|(&w, x)| f64::from(w) * x).sum::<f64>() / (square + norm_eps).sqrt()
        };
        let x = |output: usize, part: usize| m(output) * f64::from(scale[part]) + f64::from(base[output]);
        let pre: Vec<f64> = (0..count).map(|i| sigmoid(x(i, 0)) + eps).collect();
        let post: Vec<f64> = (0..count).map(|i| 2.0 * sigmoid(x(count + i, 1))).collect();
        let mut comb: Vec<Vec<f64>> = (0..count)
            .map(|j| {
                let powers: Vec<f64> = (0..count).map(|k| x(2 * count + j * count + k, 2).exp()).collect();
                let sum: f64 = powers.iter().sum();
                powers.into_iter().map(|power| power / sum + eps).collect()
            })
            .collect();
        let columns = |comb: &mut Vec<Vec<f64>>| {
            for k in 0..count {
                let sum = comb.iter().map(|row| row[k]).sum::<f64>() + eps;
                comb.iter_mut().for_each(|row| row[k] /= sum);
            }
        };
        columns(&mut comb);
        for _ in 1..iterations {
            for row in &mut comb {
                let sum = row.iter().sum::<f64>() + eps;
                row.iter_mut().for_each(|x| *x /= sum);
            }
            columns(&mut comb);
        }
        assert_eq!(outputs, 2 * count + count * count);
        let head: Vec<f64> =
            (0..count).map(|i| sigmoid(m(i) * f64::from(0.9f32) + f64::from(base[i])) + eps).collect();
        let sum = |weights: &[f64], d: usize| (0..count).map(|i| weights[i] * s[i * width + d]).sum::<f64>();
        results[0].extend(pre.iter().chain(&post).chain(comb.iter().flatten()));
        results[1].extend((0..width).map(|d| sum(&pre, d)));
        for k in 0..count {
            let column: Vec<f64> = comb.iter().map(|row| row[k]).collect();
            results[2].extend((0..width).map(|d| post[k] * y[d] + sum(&column, d)));
        }
        results[3].extend((0..width).map(|d| sum(&head, d)));
        (0..count).for_each(|_| results[4].extend(&y));
    }
    Results(results)
}

#[test]
fn results_are_those_of_double_precision() {
    for shape in shapes() {
        let want = reference(shape);
        for (name, mut device) in devices("hyper-connections") {
            let got = run(&mut device, shape, 0, ROWS);
            for (index, (got, want)) in got.0.iter().zip(&want.0).enumerate() {
                assert_near(&format!("{name} {shape:?} result {index}"), got, want, 3e-6);
            }
        }
    }
}

#[test]
fn neither_rows_nor_threads_change_a_bit() {
    for shape in shapes() {
        for isa in Isa::supported() {
            let whole = run(&mut CpuDevice::new(3, isa).unwrap(), shape, 0, ROWS);
            let mut alone = CpuDevice::new(1, isa).unwrap();
            for row in 0..ROWS {
                let own = run(&mut alone, shape, row, 1);
                for (index, (own, whole)) in own.0.iter().zip(&whole.0).enumerate() {
                    let width = own.len();
                    let what = format!("{isa} {shape:?} result {index}, row {row}");
                    assert!(bits(own) == bits(&whole[row * width..][..width]), "{what}");
                }
            }
        }
    }
}

/// The rows and columns of a combination add up to nearly 1.
#[test]
fn combinations_are_nearly_doubly_stochastic() {
    let shape = HyperShape { streams: 4, width: 16, norm_eps: 1e-6, eps: 1e-6, iterations: 20 };
    for (name, mut device) in devices("combinations") {
        let streams = tensor(&mut device, 64, &Random::new(3).normals(64, 1.0));
        let weight = device.vector(&Random::new(4).normals(24 * 64, 0.2)).unwrap();
        let (scale, base) = (device.vector(&[1.0; 3]).unwrap(), device.vector(&[0.0; 24]).unwrap());
        let mut mixes = device.tensor(1, 24).unwrap();
        let projection = StreamProjection { weight: &weight, scale: &scale, base: &base };
        device.mix_streams(&streams, projection, shape, &mut mixes).unwrap();
        let combination = &mixes.values()[8..];
        for i in 0..4 {
            let row: f32 = combination[4 * i..][..4].iter().sum();
            let column: f32 = combination[i..].iter().step_by(4).sum();
            assert!((row - 1.0).abs() < 1e-3 && (column - 1.0).abs() < 1e-4, "{name}: {row} and {column}");
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let shape = HyperShape { streams: 2, width: 3, norm_eps: 1e-6, eps: 1e-6, iterations: 2 };
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let mut streams = tensor(&mut device, 6, &[1.0; 12]);
    let (y, short) = (tensor(&mut device, 3, &[1.0; 6]), tensor(&mut device, 3, &[1.0; 3]));
    let mut mixes = device.tensor(2, 8).unwrap();
    let vectors = [8 * 6, 3, 8, 1].map(|len| device.vector(&vec![0.5; len]).unwrap());
    let [weight, scale, base, one] = &vectors;
    let good = || StreamProjection { weight, scale, base };
    device.mix_streams(&streams, good(), shape, &mut mixes).unwrap();
    let misuse = |result| assert!(matches!(result, Err(DeviceError::Misuse(_))), "{result:?}");
    misuse(device.mix_streams(&streams, StreamProjection { scale: one, ..good() }, shape, &mut mixes));
    misuse(device.mix_streams(&streams, StreamProjection { base: one, ..good() }, shape, &mut mixes));
    misuse(device.mix_streams(&streams, StreamProjection { weight: one, ..good() }, shape, &mut mixes));
    misuse(device.mix_streams(&y, good(), shape, &mut mixes));
    misuse(device.combine_streams(&short, &mixes, shape, &mut streams));
    misuse(device.spread(&y, HyperShape { iterations: 0, ..shape }, &mut streams));
    let many = HyperShape { streams: 9, ..shape };
    assert!(matches!(device.spread(&y, many, &mut streams), Err(DeviceError::Unsupported(_))));
}
