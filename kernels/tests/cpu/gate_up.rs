//! Tests the gated product of gate and up against two matrix products and the activation.

use tutti_kernels::cpu::{CpuDevice, Tensor, Vector};
use tutti_kernels::{
    Dense, Device, DeviceError, Embed, GateUp, HostMatrix, Linear, Norm, Quantize, WeightType,
};

use crate::support::{Random, assert_near, bits, bytes, devices, tensor};

const STORED: [(WeightType, Quantize); 5] = [
    (WeightType::F32, Quantize::None),
    (WeightType::F16, Quantize::None),
    (WeightType::Bf16, Quantize::None),
    (WeightType::Bf16, Quantize::Int8),
    (WeightType::Bf16, Quantize::Int4),
];

const EPS: f32 = 1e-6;

/// Computes the norm of `x` as a separate operation.
fn normalised(device: &mut CpuDevice, x: &Tensor, norm: &Vector) -> Tensor {
    let mut out = device.tensor(x.live(), x.width()).unwrap();
    device.rms_norm(x, Norm { weight: norm, eps: EPS }, &mut out).unwrap();
    out
}

/// Gate and up as one paired matrix.
struct Pair {
    dtype: WeightType,
    rows: usize,
    columns: usize,
    gate: Vec<u8>,
    up: Vec<u8>,
}

impl Pair {
    fn new(dtype: WeightType, rows: usize, gate: &[f32], up: &[f32]) -> Self {
        Self { dtype, rows, columns: gate.len() / rows, gate: bytes(dtype, gate), up: bytes(dtype, up) }
    }

    fn parts(&self) -> [HostMatrix<'_>; 2] {
        let Self { dtype, rows, columns, .. } = *self;
        [&self.gate, &self.up].map(|bytes| HostMatrix::new(bytes, dtype, rows, columns))
    }

    /// Reference: two products and the activation, in double precision.
    fn reference(&self, device: &mut CpuDevice, x: &[f32], norm: &Vector, quantize: Quantize) -> Vec<f64> {
        let x = tensor(device, self.columns, x);
        let x = normalised(device, &x, norm);
        let [gate, up] = self.parts().map(|part| {
            let weight = device.matrix(&[part], quantize).unwrap();
            let mut out = device.tensor(x.live(), self.rows).unwrap();
            device.linear(Linear::plain(&x, &weight), &mut out).unwrap();
            out.values().to_vec()
        });
        let silu = |gate: f32| f64::from(gate) / (1.0 + (-f64::from(gate)).exp());
        gate.into_iter().zip(up).map(|(gate, up)| silu(gate) * f64::from(up)).collect()
    }
}

#[test]
fn it_is_the_activation_of_two_products_in_any_batch() {
    for (name, mut device) in devices("gate and up") {
        let mut random = Random::new(31);
        for (dtype, quantize) in STORED {
            for (inputs, gates) in [(33, 5), (130, 16), (700, 150)] {
                let [gate, up] = [(); 2].map(|()| random.normals(gates * inputs, 0.2));
                let pair = Pair::new(dtype, gates, &gate, &up);
                let x = random.normals(70 * inputs, 1.0);
                let norm = device.vector(&random.normals(inputs, 1.0)).unwrap();
                let want = pair.reference(&mut device, &x, &norm, quantize);
                let weight = device.gate_up_matrix(pair.parts(), quantize).unwrap();
                let mut out = device.tensor(70, gates).unwrap();
                let mut alone = Vec::new();
                for row in x.chunks(inputs) {
                    let row = tensor(&mut device, inputs, row);
                    device
                        .gate_up(
                            GateUp {
                                x: &row,
                                norm: Some(Norm { weight: &norm, eps: EPS }),
                                weight: &weight,
                                limit: None,
                            },
                            &mut out,
                        )
                        .unwrap();
                    alone.extend_from_slice(out.values());
                }
                let what = format!("{name} {dtype:?} {quantize:?} {inputs}x{gates}");
                assert_near(&what, &alone, &want, 1e-6);
                for rows in (1..=17).chain([26, 48, 70]) {
                    let first = random.below(70 - rows + 1);
                    let batch = tensor(&mut device, inputs, &x[first * inputs..(first + rows) * inputs]);
                    device
                        .gate_up(
                            GateUp {
                                x: &batch,
                                norm: Some(Norm { weight: &norm, eps: EPS }),
                                weight: &weight,
                                limit: None,
                            },
                            &mut out,
                        )
                        .unwrap();
                    let want = &alone[first * gates..(first + rows) * gates];
                    assert!(bits(out.values()) == bits(want), "{what}: {rows} rows");
                }
            }
        }
    }
}

/// For large magnitudes the sigmoid is 0 or 1.
#[test]
fn gates_open_and_close_all_the_way() {
    for (name, mut device) in devices("gates") {
        let pair = Pair::new(WeightType::F32, 3, &[-200.0, 200.0, 0.0], &[2.0, 3.0, 4.0]);
        let weight = device.gate_up_matrix(pair.parts(), Quantize::None).unwrap();
        let x = tensor(&mut device, 1, &[1.0]);
        let mut out = device.tensor(1, 3).unwrap();
        let norm = device.vector(&[1.0]).unwrap();
        device
            .gate_up(
                GateUp { x: &x, norm: Some(Norm { weight: &norm, eps: 0.0 }), weight: &weight, limit: None },
                &mut out,
            )
            .unwrap();
        assert_eq!(out.values(), [0.0, 600.0, 0.0], "{name}");
    }
}

/// The gate has an upper bound alone, and up has both.
#[test]
fn a_limit_bounds_gate_and_up_before_the_activation() {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let (gates, ups) = ([-200.0, 200.0, 1.0, 1.0, 2.0], [2.0, 0.5, 30.0, -30.0, -1.0]);
    let want = [0.0, silu(1.5) * 0.5, silu(1.0) * 1.5, silu(1.0) * -1.5, -silu(1.5)];
    for (name, mut device) in devices("limits") {
        for (dtype, quantize) in STORED {
            let pair = Pair::new(dtype, 5, &gates, &ups);
            let weight = device.gate_up_matrix(pair.parts(), quantize).unwrap();
            let x = tensor(&mut device, 1, &[1.0; 20]);
            let mut out = device.tensor(20, 5).unwrap();
            device
                .gate_up(GateUp { x: &x, norm: None, weight: &weight, limit: Some(1.5) }, &mut out)
                .unwrap();
            let all: Vec<f64> = want.iter().copied().cycle().take(100).collect();
            assert_near(&format!("{name} {dtype:?} {quantize:?}"), out.values(), &all, 2e-2);
            let mut free = device.tensor(20, 5).unwrap();
            device.gate_up(GateUp { x: &x, norm: None, weight: &weight, limit: None }, &mut free).unwrap();
            let bound = GateUp { x: &x, norm: None, weight: &weight, limit: Some(1e30) };
            device.gate_up(bound, &mut out).unwrap();
            assert!(bits(out.values()) == bits(free.values()), "{name} {dtype:?} {quantize:?}");
            let x = tensor(&mut device, 1, &[f32::NAN]);
            device
                .gate_up(GateUp { x: &x, norm: None, weight: &weight, limit: Some(1.5) }, &mut out)
                .unwrap();
            assert!(out.values().iter().all(|y| y.is_nan()), "{name} {dtype:?} {quantize:?}");
        }
    }
}

#[test]
fn a_pair_is_no_plain_matrix_nor_the_other_way_round() {
    for (name, mut device) in devices("pairs") {
        let pair = Pair::new(WeightType::F32, 4, &[1.0; 8], &[1.0; 8]);
        let [gate, up] = pair.parts();
        let x = tensor(&mut device, 2, &[1.0; 2]);
        let mut out = [4, 8, 2].map(|width| device.tensor(1, width).unwrap());
        let norm = device.vector(&[1.0; 2]).unwrap();
        let misused = |result| assert!(matches!(result, Err(DeviceError::Misuse(_))), "{name}");
        for quantize in [Quantize::None, Quantize::Int8, Quantize::Int4] {
            let plain = device.matrix(&[gate, up], quantize).unwrap();
            let weight = device.gate_up_matrix([gate, up], quantize).unwrap();
            misused(device.gate_up(
                GateUp { x: &x, norm: Some(Norm { weight: &norm, eps: EPS }), weight: &plain, limit: None },
                &mut out[0],
            ));
            misused(device.linear(Linear::plain(&x, &weight), &mut out[1]));
            misused(device.embed(Embed { table: &weight, shard: None }, &mut out[2]));
            let shorter = HostMatrix { rows: 2, bytes: &up.bytes[..16], ..up };
            misused(device.gate_up_matrix([gate, shorter], quantize).map(|_| ()));
        }
    }
}
