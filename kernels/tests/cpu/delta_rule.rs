//! Tests the gated delta rule against double precision. Also tests that chunks, other rows and threads change no bit.

use std::ops::Range;

use tutti_kernels::cpu::{CpuDevice, Isa, Planes, Tensor, Vector};
use tutti_kernels::{
    DeltaRule, DeltaShape, Dense, Device, DeviceError, GatedDelta, GatedNorm, Norm, PlanesShape, RowInputs,
    SlotCopy, SlotId, StepInputs,
};

use crate::support::{Random, assert_near, bits, devices, tensor};

const SLOTS: usize = 6;
const LAYERS: usize = 2;
const LAYER: usize = 1;
const EPS: f32 = 1e-6;

/// Shapes whose heads fill whole vectors and whole blocks of columns, and shapes that leave remainders.
const SHAPES: [DeltaShape; 6] = [
    DeltaShape { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 24, taps: 4 },
    DeltaShape { key_heads: 1, value_heads: 3, key_dim: 19, value_dim: 37, taps: 3 },
    DeltaShape { key_heads: 2, value_heads: 2, key_dim: 32, value_dim: 64, taps: 1 },
    DeltaShape { key_heads: 1, value_heads: 1, key_dim: 128, value_dim: 128, taps: 4 },
    DeltaShape { key_heads: 1, value_heads: 2, key_dim: 16, value_dim: 16, taps: 16 },
    // Heads that decodes compute in two wide blocks.
    DeltaShape { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 256, taps: 4 },
];

/// One layer: its weights, as the device takes them.
struct Layer {
    shape: DeltaShape,
    taps: Vec<f32>,
    rate: Vec<f32>,
    bias: Vec<f32>,
    norm: Vec<f32>,
}

impl Layer {
    fn random(shape: DeltaShape) -> Self {
        let mut random = Random::new(3);
        let heads = shape.value_heads;
        let rate = (0..heads).map(|head| -[0.003, 4.0, 0.3, 0.05][head % 4]).collect();
        Self {
            shape,
            taps: random.normals(shape.taps * shape.channels(), 0.6),
            rate,
            bias: random.normals(heads, 1.0),
            norm: random.normals(shape.value_dim, 1.0),
        }
    }

    fn planes(&self) -> PlanesShape {
        let DeltaShape { key_heads, value_heads, .. } = self.shape;
        let heads = [
            key_heads * self.shape.key_conv_bytes(),
            value_heads * self.shape.value_conv_bytes(),
            value_heads * self.shape.memory_bytes(),
        ];
        PlanesShape {
            slot_bytes: heads.map(|bytes| LAYERS * bytes).to_vec(),
            slots: SLOTS,
            ..PlanesShape::default()
        }
    }
}

/// A device with the weights and buffers of a layer.
struct Runner<'a> {
    device: CpuDevice,
    layer: &'a Layer,
    planes: Planes,
    taps: Vector,
    rate: Vector,
    bias: Vector,
    norm: Vector,
    inputs: Tensor,
    out: Tensor,
}

impl<'a> Runner<'a> {
    fn new(mut device: CpuDevice, layer: &'a Layer) -> Self {
        let mut vector = |values: &[f32]| device.vector(values).unwrap();
        let (taps, rate) = (vector(&layer.taps), vector(&layer.rate));
        let (bias, norm) = (vector(&layer.bias), vector(&layer.norm));
        let mut planes = device.planes(&layer.planes()).unwrap();
        // Slots start with NaN, so that the use of a state that was not set shows.
        let bytes: usize = layer.planes().slot_bytes.iter().sum();
        for slot in 1..SLOTS as u32 {
            let nan: Vec<u8> = f32::NAN.to_le_bytes().into_iter().cycle().take(bytes).collect();
            device.write_slot(&mut planes, SlotId(slot), &nan).unwrap();
        }
        let inputs = device.tensor(512, layer.shape.inputs()).unwrap();
        let out = device.tensor(512, layer.shape.values()).unwrap();
        Self { device, layer, planes, taps, rate, bias, norm, inputs, out }
    }

    /// Runs one step of rows, each with its slot and its tokens of `projected`, and returns the outputs of each row.
    fn step(&mut self, rows: &[(SlotId, Range<usize>, &[f32])], copies: &[SlotCopy]) -> Vec<Vec<f32>> {
        let width = self.layer.shape.projected();
        let (mut values, mut inputs) = (Vec::new(), Vec::new());
        for (slot, tokens, projected) in rows {
            inputs.push(RowInputs {
                first_token: values.len() / width,
                tokens: tokens.len(),
                start: tokens.start,
                slot: *slot,
                continues: false,
                block_table: &[],
            });
            values.extend_from_slice(&projected[tokens.start * width..tokens.end * width]);
        }
        let count = values.len() / width;
        let (token_ids, positions) = (vec![0; count], vec![0.0; count]);
        let step = StepInputs {
            token_ids: &token_ids,
            positions: [&positions[..]; 3],
            rows: &inputs,
            copies,
            logit_rows: &[],
            shape: None,
        };
        let Self { device, planes, .. } = self;
        device.begin_step(&step, planes).unwrap();
        let projected = tensor(device, width, &values);
        let shape = self.layer.shape;
        self.delta_rule(&projected, shape, (0, LAYER)).unwrap();
        let Self { device, .. } = self;
        let norm = Norm { weight: &self.norm, eps: EPS };
        let operands = GatedNorm { gate: &projected, column: shape.channels(), norm };
        device.gated_norm(operands, &mut self.out).unwrap();
        let out = self.out.values();
        let values = shape.values();
        let of = |row: &RowInputs<'_>| out[row.first_token * values..][..row.tokens * values].to_vec();
        inputs.iter().map(of).collect()
    }

    /// Applies the delta rule to the step's tokens, with the slot planes from `plane` on.
    fn delta_rule(
        &mut self,
        projected: &Tensor,
        shape: DeltaShape,
        (plane, layer): (usize, usize),
    ) -> Result<(), DeviceError> {
        let Self { device, planes, taps, rate, bias, inputs, out, .. } = self;
        device
            .delta_rule(GatedDelta { projected, shape, taps, rate, bias, inputs, planes, plane, layer }, out)
    }

    fn state(&mut self, slot: SlotId) -> Vec<u8> {
        let mut state = Vec::new();
        self.device.read_slot(&self.planes, slot, &mut state).unwrap();
        state
    }
}

fn zero(slot: SlotId) -> SlotCopy {
    SlotCopy { from: SlotId::NULL, to: slot }
}

/// Returns the layer's output for a request's tokens from the first one on, in double precision.
fn reference(layer: &Layer, projected: &[f32]) -> Vec<f64> {
    let shape = layer.shape;
    let DeltaShape { key_heads, value_heads, key_dim, value_dim, taps } = shape;
    let (width, channels) = (shape.projected(), shape.channels());
    let x = |token: usize, column: usize| f64::from(projected[token * width + column]);
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let convolved = |token: usize, channel: usize| {
        let reached = (0..taps).filter(|tap| token + tap + 1 >= taps);
        silu(
            reached
                .map(|tap| {
                    f64::from(layer.taps[tap * channels + channel]) * x(token + tap + 1 - taps, channel)
                })
                .sum(),
        )
    };
    let unit = |token: usize, first: usize| {
        let head: Vec<f64> = (first..first + key_dim).map(|channel| convolved(token, channel)).collect();
        let norm = (head.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
        head.into_iter().map(|x| x / norm).collect::<Vec<_>>()
    };
    let tokens = projected.len() / width;
    let mut out = vec![0.0; tokens * shape.values()];
    for head in 0..value_heads {
        let key_head = head / (value_heads / key_heads);
        let mut memory = vec![vec![0.0; value_dim]; key_dim];
        for token in 0..tokens {
            let q = unit(token, key_head * key_dim);
            let k = unit(token, (key_heads + key_head) * key_dim);
            let at = channels + shape.values() + head;
            let beta = 1.0 / (1.0 + (-x(token, at)).exp());
            let a = x(token, at + value_heads) + f64::from(layer.bias[head]);
            let decay = (f64::from(layer.rate[head]) * a.exp().ln_1p()).exp();
            let mut heads = vec![0.0; value_dim];
            for (j, out) in heads.iter_mut().enumerate() {
                let v = convolved(token, 2 * key_heads * key_dim + head * value_dim + j);
                memory.iter_mut().for_each(|row| row[j] *= decay);
                let known: f64 = memory.iter().zip(&k).map(|(row, k)| row[j] * k).sum();
                memory.iter_mut().zip(&k).for_each(|(row, k)| row[j] += k * (v - known) * beta);
                let sum: f64 = memory.iter().zip(&q).map(|(row, q)| row[j] * q).sum();
                *out = sum / (key_dim as f64).sqrt();
            }
            let square = heads.iter().map(|x| x * x).sum::<f64>() / value_dim as f64;
            for (j, x_j) in heads.iter().enumerate() {
                let z = x(token, channels + head * value_dim + j);
                let normal = x_j / (square + f64::from(EPS)).sqrt() * f64::from(layer.norm[j]);
                out[token * shape.values() + head * value_dim + j] = normal * silu(z);
            }
        }
    }
    out
}

fn prompt(layer: &Layer, tokens: usize, seed: u64) -> Vec<f32> {
    Random::new(seed).normals(tokens * layer.shape.projected(), 1.0)
}

#[test]
fn outputs_are_those_of_double_precision() {
    for shape in SHAPES {
        let layer = Layer::random(shape);
        for tokens in [1, 2, 3, 70] {
            let projected = prompt(&layer, tokens, 8);
            let want = reference(&layer, &projected);
            for (name, device) in devices("delta rule") {
                let mut runner = Runner::new(device, &layer);
                let got = runner.step(&[(SlotId(2), 0..tokens, &projected)], &[zero(SlotId(2))]);
                assert_near(&format!("{name} {shape:?} {tokens}"), &got[0], &want, 2e-5);
            }
        }
    }
}

/// A request has the same outputs and the same state in chunks of any size, beside rows of other requests, in any slot,
/// and with any number of threads.
#[test]
fn neither_chunks_nor_mates_nor_threads_change_a_bit() {
    const TOKENS: usize = 60;
    for shape in SHAPES {
        let layer = Layer::random(shape);
        let projected = [prompt(&layer, TOKENS, 1), prompt(&layer, TOKENS, 2), prompt(&layer, TOKENS, 9)];
        let mut random = Random::new(4);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            let mut alone = Runner::new(CpuDevice::new(1, isa).unwrap(), &layer);
            let whole: Vec<_> = (0..3)
                .map(|index| {
                    let slot = SlotId(index as u32 + 1);
                    let out = alone.step(&[(slot, 0..TOKENS, &projected[index])], &[zero(slot)]).remove(0);
                    (bits(&out), alone.state(slot))
                })
                .collect();
            for (threads, longest) in [(1, 1), (2, 2), (3, 7), (2, 40)] {
                let mut runner = Runner::new(CpuDevice::new(threads, isa).unwrap(), &layer);
                let mut done = [0; 3];
                let mut out = vec![Vec::new(); 3];
                while done.iter().any(|&done| done < TOKENS) {
                    // Some requests skip a step.
                    let rows: Vec<(usize, usize)> = (0..3)
                        .filter(|&index| done[index] < TOKENS)
                        .map(|index| (index, random.below(longest + 1).min(TOKENS - done[index])))
                        .filter(|(_, tokens)| *tokens > 0)
                        .collect();
                    let slot = |index: usize| SlotId(5 - index as u32);
                    let inputs: Vec<_> = rows
                        .iter()
                        .map(|&(index, tokens)| {
                            (slot(index), done[index]..done[index] + tokens, &projected[index][..])
                        })
                        .collect();
                    let begun = rows.iter().filter(|(index, _)| done[*index] == 0);
                    let copies: Vec<_> = begun.map(|(index, _)| zero(slot(*index))).collect();
                    for (row, (index, tokens)) in runner.step(&inputs, &copies).into_iter().zip(&rows) {
                        out[*index].extend(bits(&row));
                        done[*index] += tokens;
                    }
                }
                for (index, (want, state)) in whole.iter().enumerate() {
                    let what = format!("{isa}, {threads} threads, {shape:?}, chunks up to {longest}");
                    assert!(out[index] == *want, "{what}: other outputs");
                    assert!(runner.state(SlotId(5 - index as u32)) == *state, "{what}: another state");
                }
            }
        }
    }
}

/// A task computes a block of sixteen of the step's tokens, which may belong to several rows. A row that continues from
/// a state and begins shortly before the end of a block has the same results as alone.
#[test]
fn a_row_may_begin_anywhere_in_a_block() {
    const BEGUN: usize = 3;
    for shape in [SHAPES[0], SHAPES[4]] {
        let layer = Layer::random(shape);
        let (before, projected) = (prompt(&layer, 17, 1), prompt(&layer, BEGUN + 40, 2));
        let slot = SlotId(2);
        for tokens in [1, 2, 3, 4, 17, 40] {
            let mut alone = Runner::new(CpuDevice::new(1, Isa::detect()).unwrap(), &layer);
            alone.step(&[(slot, 0..BEGUN, &projected)], &[zero(slot)]);
            let want = alone.step(&[(slot, BEGUN..BEGUN + tokens, &projected)], &[]).remove(0);
            for first in 12..=17 {
                let mut runner = Runner::new(CpuDevice::new(2, Isa::detect()).unwrap(), &layer);
                runner.step(&[(slot, 0..BEGUN, &projected)], &[zero(slot)]);
                let rows =
                    [(SlotId(1), 0..first, &before[..]), (slot, BEGUN..BEGUN + tokens, &projected[..])];
                let got = runner.step(&rows, &[zero(SlotId(1))]).remove(1);
                assert!(bits(&got) == bits(&want), "{shape:?}: {tokens} tokens from token {first} on");
                assert!(runner.state(slot) == alone.state(slot), "{shape:?}: state after {tokens} tokens");
            }
        }
    }
}

/// Rows of padding have the null slot. Any number of them give zeros, and change neither a live slot nor another row.
#[test]
fn rows_of_padding_change_nothing() {
    let layer = Layer::random(SHAPES[0]);
    let (projected, padding) = (prompt(&layer, 9, 1), prompt(&layer, 5, 2));
    for (name, device) in devices("padding") {
        let mut runner = Runner::new(device, &layer);
        let alone = runner.step(&[(SlotId(1), 0..9, &projected)], &[zero(SlotId(1))]).remove(0);
        let others: Vec<_> = (2..SLOTS as u32).map(|slot| runner.state(SlotId(slot))).collect();
        let rows = [
            (SlotId::NULL, 0..5, &padding[..]),
            (SlotId(1), 0..9, &projected[..]),
            (SlotId::NULL, 0..1, &padding[..]),
        ];
        let out = runner.step(&rows, &[zero(SlotId(1))]);
        assert!(bits(&out[1]) == bits(&alone), "{name}");
        assert!(out[0].iter().chain(&out[2]).all(|x| *x == 0.0), "{name}");
        for (slot, state) in (2..SLOTS as u32).zip(&others) {
            assert!(runner.state(SlotId(slot)) == *state, "{name}: slot {slot}");
        }
    }
}

/// Each layer and slot has a state of its own. A layer's operation changes neither the other layer of the slot nor the
/// neighbouring slots.
#[test]
fn a_layer_writes_its_own_state_only() {
    let layer = Layer::random(SHAPES[1]);
    let projected = prompt(&layer, 7, 1);
    let sizes = layer.planes().slot_bytes;
    for (name, device) in devices("states") {
        let mut runner = Runner::new(device, &layer);
        let canary: Vec<u8> = (0..sizes.iter().sum::<usize>()).map(|i| (i % 120) as u8).collect();
        for slot in 1..SLOTS as u32 {
            runner.device.write_slot(&mut runner.planes, SlotId(slot), &canary).unwrap();
        }
        runner.step(&[(SlotId(3), 0..7, &projected)], &[]);
        for slot in (1..SLOTS as u32).filter(|slot| *slot != 3) {
            assert!(runner.state(SlotId(slot)) == canary, "{name}: slot {slot}");
        }
        let (state, mut at) = (runner.state(SlotId(3)), 0);
        for bytes in sizes.iter().copied() {
            let (first, second) = (at..at + bytes / LAYERS, at + bytes / LAYERS..at + bytes);
            assert!(state[first.clone()] == canary[first], "{name}: the other layer's state");
            assert!(state[second.clone()] != canary[second], "{name}: no state of its own");
            at += bytes;
        }
    }
}

#[test]
fn gates_are_those_of_double_precision() {
    for (name, mut device) in devices("gate") {
        let mut random = Random::new(5);
        let (x, gate) = (random.normals(3 * 19, 2.0), random.normals(3 * 19, 4.0));
        let want: Vec<f64> =
            x.iter().zip(&gate).map(|(&x, &gate)| f64::from(x) / (1.0 + (-f64::from(gate)).exp())).collect();
        let (mut x, gate) = (tensor(&mut device, 19, &x), tensor(&mut device, 19, &gate));
        device.sigmoid_gate(&gate, &mut x).unwrap();
        assert_near(&name, x.values(), &want, 1e-6);
        // One gate per row.
        let values = Random::new(6).normals(3 * 19, 2.0);
        let (mut x, gate) = (tensor(&mut device, 19, &values), tensor(&mut device, 1, &[0.5, -3.0, 2.0]));
        let sigmoid = |row: usize| 1.0 / (1.0 + (-[0.5f64, -3.0, 2.0][row]).exp());
        let want: Vec<f64> =
            values.iter().enumerate().map(|(i, &x)| f64::from(x) * sigmoid(i / 19)).collect();
        device.sigmoid_gate(&gate, &mut x).unwrap();
        assert_near(&name, x.values(), &want, 1e-6);
        for other in [tensor(&mut device, 19, &[0.0; 19]), tensor(&mut device, 5, &[0.0; 15])] {
            assert!(matches!(device.sigmoid_gate(&other, &mut x), Err(DeviceError::Misuse(_))), "{name}");
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let layer = Layer::random(SHAPES[0]);
    let mut runner = Runner::new(CpuDevice::new(1, Isa::detect()).unwrap(), &layer);
    let projected = prompt(&layer, 2, 1);
    runner.step(&[(SlotId(1), 0..2, &projected)], &[zero(SlotId(1))]);
    let shape = layer.shape;
    let projected = tensor(&mut runner.device, shape.projected(), &projected);
    let mut refused = |shape, plane, layer| runner.delta_rule(&projected, shape, (plane, layer));
    assert_eq!(refused(shape, 0, LAYER), Ok(()));
    for (shape, plane, layer) in [
        (shape, 0, LAYERS),
        (shape, 1, LAYER),
        (DeltaShape { key_heads: 3, ..shape }, 0, LAYER),
        (DeltaShape { value_dim: 48, ..shape }, 0, LAYER),
        (DeltaShape { taps: 0, ..shape }, 0, LAYER),
    ] {
        assert!(
            matches!(refused(shape, plane, layer), Err(DeviceError::Misuse(_))),
            "{shape:?} {plane} {layer}"
        );
    }
    for large in [DeltaShape { key_dim: 512, ..shape }, DeltaShape { taps: 17, ..shape }] {
        assert!(matches!(refused(large, 0, LAYER), Err(DeviceError::Unsupported(_))), "{large:?}");
    }
}
