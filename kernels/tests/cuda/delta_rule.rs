//! Tests that the gated delta rule gives the CPU's results up to a tolerance, and that chunks and neighbours change no
//! bit.

use std::ops::Range;

use tutti_kernels::cuda::CudaDevice;
use tutti_kernels::{
    DeltaRule, DeltaShape, Device, DeviceError, GatedDelta, GatedNorm, Norm, PlanesShape, RowInputs,
    SlotCopy, SlotId, StepInputs, StepShape,
};

use crate::support::{Families, Random, assert_near, cpus, cuda, tensor, values};

const SLOTS: usize = 7;
const LAYERS: usize = 2;
const LAYER: usize = 1;
const EPS: f32 = 1e-6;
/// Rows of each tensor, with room for padding.
const CAPACITY: usize = 160;

/// The heads of the golden models.
const GOLDEN: DeltaShape = DeltaShape { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 24, taps: 4 };
/// Small heads: the golden models' heads, heads whose sizes are no multiples of any tile, and heads with one tap (and
/// thus no convolution state) or 16 taps.
const SMALL: [DeltaShape; 4] = [
    GOLDEN,
    DeltaShape { key_heads: 1, value_heads: 3, key_dim: 19, value_dim: 37, taps: 3 },
    DeltaShape { key_heads: 2, value_heads: 2, key_dim: 33, value_dim: 64, taps: 1 },
    DeltaShape { key_heads: 1, value_heads: 2, key_dim: 8, value_dim: 8, taps: 16 },
];
/// The heads of released models, and heads of the largest supported size.
const LARGE: [DeltaShape; 2] = [
    DeltaShape { key_heads: 1, value_heads: 2, key_dim: 128, value_dim: 128, taps: 4 },
    DeltaShape { key_heads: 1, value_heads: 1, key_dim: 256, value_dim: 40, taps: 2 },
];

/// A row of a step: its slot, its tokens, and the projections of its request.
type Row<'a> = (u32, Range<usize>, &'a [f32]);

/// A device, and the weights and buffers of one layer.
struct Runner<'a, D: Families> {
    device: &'a mut D,
    shape: DeltaShape,
    planes: D::Planes,
    taps: D::Vector,
    rate: D::Vector,
    bias: D::Vector,
    norm: D::Vector,
    inputs: D::Tensor,
    out: D::Tensor,
}

/// Results of one row's tokens: inputs of the delta rule, outputs, and their gated norm.
#[derive(Clone, Debug, Default, PartialEq)]
struct Outputs([Vec<f32>; 3]);

impl Outputs {
    fn extend(&mut self, more: Self) {
        self.0.iter_mut().zip(more.0).for_each(|(own, more)| own.extend(more));
    }

    fn bits(&self) -> Vec<u32> {
        self.0.iter().flatten().map(|x| x.to_bits()).collect()
    }
}

impl<'a, D: Families> Runner<'a, D> {
    fn new(device: &'a mut D, shape: DeltaShape) -> Self {
        let (mut random, heads) = (Random::new(3), shape.value_heads);
        let rates: Vec<f32> = (0..heads).map(|head| -[0.003, 4.0, 0.3, 0.05][head % 4]).collect();
        let taps = device.vector(&random.normals(shape.taps * shape.channels(), 0.6)).unwrap();
        let rate = device.vector(&rates).unwrap();
        let bias = device.vector(&random.normals(heads, 1.0)).unwrap();
        let norm = device.vector(&random.normals(shape.value_dim, 1.0)).unwrap();
        let bytes = slot_bytes(&shape);
        let planes = PlanesShape { slot_bytes: bytes.to_vec(), slots: SLOTS, ..PlanesShape::default() };
        let mut planes = device.planes(&planes).unwrap();
        // Slots start with NaN, so that the use of a state that was not set shows.
        let rubbish: Vec<u8> = f32::NAN.to_le_bytes().into_iter().cycle().take(bytes.iter().sum()).collect();
        for slot in 1..SLOTS as u32 {
            device.write_slot(&mut planes, SlotId(slot), &rubbish).unwrap();
        }
        let inputs = device.tensor(CAPACITY, shape.inputs()).unwrap();
        let out = device.tensor(CAPACITY, shape.values()).unwrap();
        Self { device, shape, planes, taps, rate, bias, norm, inputs, out }
    }

    /// Runs a step, with padding up to `padded` tokens, and returns the results of each row.
    fn step(&mut self, rows: &[Row<'_>], copies: &[SlotCopy], padded: Option<usize>) -> Vec<Outputs> {
        let Self { device, shape, planes, .. } = self;
        let (shape, width) = (*shape, shape.projected());
        let (mut projected, mut inputs) = (Vec::new(), Vec::new());
        for (slot, tokens, of_request) in rows {
            inputs.push(RowInputs {
                first_token: projected.len() / width,
                tokens: tokens.len(),
                start: tokens.start,
                slot: SlotId(*slot),
                continues: false,
                block_table: &[],
            });
            projected.extend_from_slice(&of_request[tokens.start * width..tokens.end * width]);
        }
        let tokens = projected.len() / width;
        let positions = vec![0.0; tokens];
        let step = StepInputs {
            token_ids: &vec![0; tokens],
            positions: [&positions; 3],
            rows: &inputs,
            copies,
            logit_rows: &[],
            shape: padded.map(|tokens| StepShape { tokens, logit_rows: 0 }),
        };
        device.begin_step(&step, planes).unwrap();
        projected.resize(step.padded_tokens() * width, f32::NAN);
        let projected = tensor(*device, width, &projected);
        self.delta_rule(&projected, shape, (0, LAYER)).unwrap();
        let Self { device, .. } = self;
        let plain = values(*device, &self.out);
        let norm = Norm { weight: &self.norm, eps: EPS };
        let gated = GatedNorm { gate: &projected, column: shape.channels(), norm };
        device.gated_norm(gated, &mut self.out).unwrap();
        let all = [values(*device, &self.inputs), plain, values(*device, &self.out)];
        device.end_step().unwrap();
        let widths = [shape.inputs(), shape.values(), shape.values()];
        let of = |row: &RowInputs<'_>| {
            let part = |i: usize| {
                let width = widths[i];
                all[i][row.first_token * width..][..row.tokens * width].to_vec()
            };
            Outputs([part(0), part(1), part(2)])
        };
        inputs.iter().map(of).collect()
    }

    /// Applies the delta rule to the step's tokens, with the slot planes from `plane` on.
    fn delta_rule(
        &mut self,
        projected: &D::Tensor,
        shape: DeltaShape,
        (plane, layer): (usize, usize),
    ) -> Result<(), DeviceError> {
        let Self { device, planes, taps, rate, bias, inputs, out, .. } = self;
        device
            .delta_rule(GatedDelta { projected, shape, taps, rate, bias, inputs, planes, plane, layer }, out)
    }

    /// The state of a slot, in f32.
    fn state(&mut self, slot: u32) -> Vec<f32> {
        let mut state = Vec::new();
        self.device.read_slot(&self.planes, SlotId(slot), &mut state).unwrap();
        state.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    fn state_bits(&mut self, slot: u32) -> Vec<u32> {
        self.state(slot).into_iter().map(f32::to_bits).collect()
    }
}

/// Bytes of a slot in each plane.
fn slot_bytes(shape: &DeltaShape) -> [usize; 3] {
    let heads = [
        shape.key_heads * shape.key_conv_bytes(),
        shape.value_heads * shape.value_conv_bytes(),
        shape.value_heads * shape.memory_bytes(),
    ];
    heads.map(|bytes| LAYERS * bytes)
}

fn zero(slot: u32) -> SlotCopy {
    SlotCopy { from: SlotId::NULL, to: SlotId(slot) }
}

/// Returns the projections of a request. Some tokens have an `a` whose exponential is infinite.
fn prompt(shape: &DeltaShape, tokens: usize, seed: u64) -> Vec<f32> {
    let mut projected = Random::new(seed).normals(tokens * shape.projected(), 1.0);
    for token in projected.chunks_exact_mut(shape.projected()).step_by(7) {
        token[shape.projected() - shape.value_heads..].fill(100.0);
    }
    projected
}

/// Names of the results of [`steps`].
const RESULTS: [&str; 6] =
    ["inputs", "outputs", "gated norms", "inputs of q and k", "inputs of v", "memories"];

/// Runs ragged steps with copies of slots between them. Returns the results of all rows, and then the states of all
/// slots, plane by plane.
fn steps<D: Families>(device: &mut D, shape: DeltaShape) -> [Vec<f32>; 6] {
    let mut runner = Runner::new(device, shape);
    let requests: Vec<_> = (0..4).map(|seed| prompt(&shape, 64, seed)).collect();
    let request = |index: usize| &requests[index][..];
    let moved = |from, to| SlotCopy { from: SlotId(from), to: SlotId(to) };
    type Step<'a> = (Vec<Row<'a>>, Vec<SlotCopy>);
    let steps: [Step<'_>; 3] = [
        (
            vec![
                (1, 0..1, request(0)),
                (2, 0..2, request(1)),
                (0, 0..12, request(3)),
                // The chunk begins at the last token of a block of the convolutions.
                (3, 0..23, request(2)),
                (4, 0..3, request(3)),
            ],
            [1, 2, 3, 4].map(zero).to_vec(),
        ),
        // Decodes, one of them in the former slot of another request and one in a new slot, and a row shorter than the
        // convolution.
        (
            vec![(5, 1..2, request(0)), (2, 2..4, request(1)), (1, 23..24, request(2))],
            vec![moved(1, 5), moved(3, 1)],
        ),
        // Two rows continue from copies of the same state.
        (vec![(6, 24..54, request(2)), (1, 24..33, request(2)), (2, 4..5, request(1))], vec![moved(1, 6)]),
    ];
    let mut all = [(); 6].map(|()| Vec::new());
    for (rows, copies) in &steps {
        for ((slot, ..), Outputs(outputs)) in rows.iter().zip(runner.step(rows, copies, None)) {
            for (index, values) in outputs.into_iter().enumerate() {
                // The inputs of a row without a slot are undefined.
                if *slot != 0 || index > 0 {
                    all[index].extend(values);
                }
            }
        }
    }
    for slot in [1, 2, 3, 4, 5, 6] {
        let mut state = &runner.state(slot)[..];
        for (values, bytes) in all[3..].iter_mut().zip(slot_bytes(&shape)) {
            let (own, rest) = state.split_at(bytes / 4);
            values.extend(own);
            state = rest;
        }
    }
    all
}

fn check_steps(gpu: &mut CudaDevice, shape: DeltaShape) {
    let got = steps(gpu, shape);
    for (isa, mut cpu) in cpus() {
        let want = steps(&mut cpu, shape);
        for (name, (got, want)) in RESULTS.iter().zip(got.iter().zip(&want)) {
            assert_near(&format!("{name} of {shape:?} on {isa}"), got, want, 1e-5);
        }
    }
}

#[test]
fn delta_rules_of_small_heads_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("delta rules") else { return };
    for shape in SMALL {
        check_steps(&mut gpu, shape);
    }
}

#[test]
fn delta_rules_of_large_heads_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("delta rules of large heads") else { return };
    for shape in LARGE {
        check_steps(&mut gpu, shape);
    }
}

/// Returns results and state of a request that runs alone in one step.
fn alone(gpu: &mut CudaDevice, shape: DeltaShape, projected: &[f32]) -> (Vec<u32>, Vec<u32>) {
    let mut runner = Runner::new(gpu, shape);
    let tokens = projected.len() / shape.projected();
    let outputs = runner.step(&[(3, 0..tokens, projected)], &[zero(3)], None).remove(0);
    (outputs.bits(), runner.state_bits(3))
}

#[test]
fn neither_chunks_nor_neighbours_change_a_bit_of_a_delta_rule() {
    const TOKENS: usize = 37;
    let Some(mut gpu) = cuda("chunks of a delta rule") else { return };
    for shape in [SMALL[0], SMALL[1], SMALL[3], LARGE[0]] {
        let requests = [1, 2, 9].map(|seed| prompt(&shape, TOKENS, seed));
        let want = requests.each_ref().map(|projected| alone(&mut gpu, shape, projected));
        let mut random = Random::new(4);
        for longest in [1, 3, 20] {
            let mut runner = Runner::new(&mut gpu, shape);
            let (mut done, mut got) = ([0; 3], [(); 3].map(|()| Outputs::default()));
            while done.iter().any(|&done| done < TOKENS) {
                // A request may have no tokens in a step.
                let chunks =
                    done.map(|done| (1 + random.below(longest)).min(TOKENS - done) * random.below(2));
                let picked: Vec<_> = (0..3).filter(|&index| chunks[index] > 0).collect();
                let slot = |index: usize| 6 - index as u32;
                let row = |&index: &usize| {
                    (slot(index), done[index]..done[index] + chunks[index], &requests[index][..])
                };
                let rows: Vec<_> = picked.iter().map(row).collect();
                let begun = picked.iter().filter(|&&index| done[index] == 0);
                let copies: Vec<_> = begun.map(|&index| zero(slot(index))).collect();
                for (&index, outputs) in picked.iter().zip(runner.step(&rows, &copies, None)) {
                    got[index].extend(outputs);
                    done[index] += chunks[index];
                }
            }
            for (index, (outputs, state)) in want.iter().enumerate() {
                assert!(got[index].bits() == *outputs, "{shape:?}: chunks up to {longest} change results");
                let slot = 6 - index as u32;
                assert!(
                    runner.state_bits(slot) == *state,
                    "{shape:?}: chunks up to {longest} change a state"
                );
            }
        }
    }
}

/// Rows without a slot have results of zero. Neither these rows nor padding change other rows, slots or layers.
#[test]
fn padding_of_a_delta_rule_changes_nothing() {
    let Some(mut gpu) = cuda("padding of a delta rule") else { return };
    for shape in [SMALL[0], SMALL[2]] {
        let (projected, padding) = (prompt(&shape, 19, 1), prompt(&shape, 18, 2));
        let (want, want_state) = alone(&mut gpu, shape, &projected);
        let mut runner = Runner::new(&mut gpu, shape);
        let bytes = slot_bytes(&shape);
        let others = [1, 2, 4, 5, 6].map(|slot| (slot, runner.state_bits(slot)));
        let rows = [(0, 0..18, &padding[..]), (3, 0..19, &projected[..]), (0, 0..1, &padding[..])];
        let got = runner.step(&rows, &[zero(3)], Some(150));
        assert!(got[1].bits() == want, "{shape:?}");
        assert!([&got[0], &got[2]].iter().all(|row| row.0.iter().flatten().all(|x| *x == 0.0)), "{shape:?}");
        for (slot, state) in others {
            assert!(runner.state_bits(slot) == state, "{shape:?}: slot {slot}");
        }
        let state = runner.state_bits(3);
        assert!(state == want_state, "{shape:?}: another state");
        let mut first = 0;
        for plane in bytes.map(|bytes| bytes / 4) {
            let (other, own) = state[first..first + plane].split_at(plane / LAYERS);
            assert!(other.iter().all(|x| *x == 0), "{shape:?}: the state of the other layer");
            assert!(own.is_empty() || own.iter().any(|x| *x != 0), "{shape:?}: no state");
            first += plane;
        }
    }
}

#[test]
fn heads_that_do_not_fit_are_refused() {
    let Some(mut gpu) = cuda("heads of a delta rule") else { return };
    let shape = GOLDEN;
    let projected = prompt(&shape, 2, 1);
    let mut runner = Runner::new(&mut gpu, shape);
    runner.step(&[(1, 0..2, &projected)], &[zero(1)], None);
    let projected = tensor(runner.device, shape.projected(), &projected);
    let rows = [RowInputs {
        first_token: 0,
        tokens: 2,
        start: 0,
        slot: SlotId(1),
        continues: false,
        block_table: &[],
    }];
    let positions = [&[0.0, 1.0][..]; 3];
    let step =
        StepInputs { token_ids: &[0; 2], positions, rows: &rows, copies: &[], logit_rows: &[], shape: None };
    runner.device.begin_step(&step, &mut runner.planes).unwrap();
    let mut refused = |shape, plane, layer| runner.delta_rule(&projected, shape, (plane, layer));
    assert_eq!(refused(shape, 0, LAYER), Ok(()));
    for (shape, plane, layer) in [
        (shape, 0, LAYERS),
        (shape, 1, LAYER),
        (DeltaShape { key_heads: 3, ..shape }, 0, LAYER),
        (DeltaShape { value_dim: 48, ..shape }, 0, LAYER),
        (DeltaShape { taps: 0, ..shape }, 0, LAYER),
    ] {
        let got = refused(shape, plane, layer);
        assert!(matches!(got, Err(DeviceError::Misuse(_))), "{shape:?} {plane} {layer}: {got:?}");
    }
    let large = refused(DeltaShape { key_dim: 257, ..shape }, 0, LAYER);
    assert!(matches!(large, Err(DeviceError::Unsupported(_))), "{large:?}");
    let Runner { device, inputs, mut out, norm, .. } = runner;
    let norm = || Norm { weight: &norm, eps: EPS };
    let rows = device.tensor(2, 2 * shape.values()).unwrap();
    for (gate, column) in [(&rows, 0), (&inputs, shape.inputs())] {
        let gated = GatedNorm { gate, column, norm: norm() };
        let got = device.gated_norm(gated, &mut out);
        assert!(matches!(got, Err(DeviceError::Misuse(_))), "gates from {column} on: {got:?}");
    }
}
