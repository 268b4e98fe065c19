//! Tests mixtures of experts against matrix products of one expert at a time.

use tutti_kernels::cpu::{CpuDevice, Isa, Tensor, Vector, Weights};
use tutti_kernels::{
    Dense, Device, DeviceError, ExpertBuffers, ExpertChoice, Experts, GateUp, HostMatrix, Linear, MixExperts,
    Quantize, Routing, Score, WeightType,
};

use crate::support::{Random, Share, assert_near, begin, bits, bytes, devices, tensor};

const STORED: [(WeightType, Quantize); 4] = [
    (WeightType::F32, Quantize::None),
    (WeightType::Bf16, Quantize::None),
    (WeightType::Bf16, Quantize::Int8),
    (WeightType::Bf16, Quantize::Int4),
];
const WIDTH: usize = 130;
const INTERMEDIATE: usize = 40;
const EXPERTS: usize = 7;
const ROWS: usize = 64;

/// The experts of one layer on a device, with buffers for [`ROWS`] rows.
struct Layer {
    gate_up: Vec<Weights>,
    down: Vec<Weights>,
    buffers: ExpertBuffers<Tensor>,
}

impl Layer {
    /// Makes random experts. All weights of the experts in `poisoned` are NaN.
    fn new(device: &mut CpuDevice, (dtype, quantize): (WeightType, Quantize), poisoned: &[usize]) -> Self {
        let mut random = Random::new(5);
        let mut values = |expert: usize, count: usize| match poisoned.contains(&expert) {
            true => bytes(dtype, &vec![f32::NAN; count]),
            false => bytes(dtype, &random.normals(count, 0.2)),
        };
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for expert in 0..EXPERTS {
            let [gate, up, back] = [(); 3].map(|()| values(expert, WIDTH * INTERMEDIATE));
            let part = |bytes| HostMatrix::new(bytes, dtype, INTERMEDIATE, WIDTH);
            gate_up.push(device.gate_up_matrix([part(&gate), part(&up)], quantize).unwrap());
            down.push(
                device.matrix(&[HostMatrix::new(&back, dtype, WIDTH, INTERMEDIATE)], quantize).unwrap(),
            );
        }
        let mut buffer = |width| device.tensor(ROWS, width).unwrap();
        let buffers =
            ExpertBuffers { inputs: buffer(WIDTH), activated: buffer(INTERMEDIATE), outputs: buffer(WIDTH) };
        Self { gate_up, down, buffers }
    }

    /// Mixes the experts `first..end`.
    fn mix(
        &mut self,
        device: &mut CpuDevice,
        (x, logits): (&[f32], &[f32]),
        routing: Routing,
        part: (usize, usize),
    ) -> Vec<f32> {
        let rows = x.len() / WIDTH;
        self.mix_padded(device, (x, logits), rows, routing, part)
    }

    /// Does the same as [`mix`](Self::mix), but all rows after the first `valid_rows` are padding.
    fn mix_padded(
        &mut self,
        device: &mut CpuDevice,
        (x, logits): (&[f32], &[f32]),
        valid_rows: usize,
        routing: Routing,
        (first, end): (usize, usize),
    ) -> Vec<f32> {
        let (x, logits) = (tensor(device, WIDTH, x), tensor(device, EXPERTS, logits));
        let (gate_up, down) = (&self.gate_up[first..end], &self.down[first..end]);
        let (buffers, layer) = (&mut self.buffers, 3);
        let mut out = device.tensor(ROWS, WIDTH).unwrap();
        let choice = ExpertChoice::Largest { bias: None };
        let mix = MixExperts {
            x: &x,
            valid_rows,
            logits: &logits,
            routing,
            first,
            gate_up,
            down,
            choice,
            limit: None,
            buffers,
            layer,
        };
        device.mix_experts(mix, &mut out).unwrap();
        out.values().to_vec()
    }

    /// Mixes the experts of one row in double precision, from the products of single experts.
    fn reference(&self, device: &mut CpuDevice, x: &[f32], logits: &[f32], routing: Routing) -> Vec<f64> {
        let power: Vec<f64> = logits.iter().map(|&logit| f64::from(logit).exp()).collect();
        let mut order: Vec<usize> = (0..EXPERTS).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        order.truncate(routing.top_k);
        let whole: f64 = match routing.renormalise {
            true => order.iter().map(|&expert| power[expert]).sum(),
            false => power.iter().sum(),
        };
        let x = tensor(device, WIDTH, x);
        let mut sum = vec![0.0; WIDTH];
        for expert in order {
            let mut activated = device.tensor(1, INTERMEDIATE).unwrap();
            let mut out = device.tensor(1, WIDTH).unwrap();
            let weight = &self.gate_up[expert];
            device.gate_up(GateUp { x: &x, norm: None, weight, limit: None }, &mut activated).unwrap();
            device.linear(Linear::plain(&activated, &self.down[expert]), &mut out).unwrap();
            let weight = power[expert] / whole;
            sum.iter_mut().zip(out.values()).for_each(|(sum, &y)| *sum += weight * f64::from(y));
        }
        sum
    }
}

fn inputs() -> (Vec<f32>, Vec<f32>) {
    let mut random = Random::new(9);
    (random.normals(ROWS * WIDTH, 1.0), random.normals(ROWS * EXPERTS, 2.0))
}

#[test]
fn a_row_is_the_weighted_sum_of_its_experts_in_any_batch() {
    let (x, logits) = inputs();
    let row = |row: usize| (&x[row * WIDTH..][..WIDTH], &logits[row * EXPERTS..][..EXPERTS]);
    for (name, mut device) in devices("experts") {
        for stored in STORED {
            let mut layer = Layer::new(&mut device, stored, &[]);
            for routing in [
                Routing { renormalise: true, ..Routing::softmax(2) },
                Routing::softmax(3),
                Routing::softmax(EXPERTS),
            ] {
                let what = format!("{name} {stored:?} {routing:?}");
                let (mut alone, mut want) = (Vec::new(), Vec::new());
                for (x, logits) in (0..ROWS).map(row) {
                    alone.extend(layer.mix(&mut device, (x, logits), routing, (0, EXPERTS)));
                    want.extend(layer.reference(&mut device, x, logits, routing));
                }
                assert_near(&what, &alone, &want, 1e-6);
                for (first, rows) in [(0, ROWS), (3, 2), (17, 5), (30, 33)] {
                    let x = &x[first * WIDTH..][..rows * WIDTH];
                    let logits = &logits[first * EXPERTS..][..rows * EXPERTS];
                    let batch = layer.mix(&mut device, (x, logits), routing, (0, EXPERTS));
                    assert!(
                        bits(&batch) == bits(&alone[first * WIDTH..][..rows * WIDTH]),
                        "{what}: {rows} rows"
                    );
                }
            }
        }
    }
}

/// Experts of different types run in separate operations. A row still adds its experts in order.
#[test]
fn a_layer_may_hold_experts_of_several_types() {
    let (x, logits) = inputs();
    let routing = Routing { renormalise: true, ..Routing::softmax(EXPERTS) };
    let mut device = CpuDevice::new(2, Isa::detect()).unwrap();
    let mut layer = Layer::new(&mut device, STORED[0], &[]);
    let mut other = Layer::new(&mut device, STORED[2], &[]);
    for expert in [0, 3, 4] {
        std::mem::swap(&mut layer.gate_up[expert], &mut other.gate_up[expert]);
        std::mem::swap(&mut layer.down[expert], &mut other.down[expert]);
    }
    let mixed = layer.mix(&mut device, (&x, &logits), routing, (0, EXPERTS));
    let rows = x.chunks(WIDTH).zip(logits.chunks(EXPERTS));
    let want: Vec<_> =
        rows.flat_map(|(x, logits)| layer.reference(&mut device, x, logits, routing)).collect();
    assert_near("several types", &mixed, &want, 1e-6);
}

/// The weights of unused experts are NaN, which would spread to every row that reads them.
#[test]
fn experts_without_rows_are_not_read_and_a_rank_reads_only_its_own() {
    let (x, mut logits) = inputs();
    for row in logits.chunks_mut(EXPERTS) {
        (row[2], row[6]) = (-1e9, -2e9);
    }
    let routing = Routing { renormalise: true, ..Routing::softmax(3) };
    let stored = STORED[0];
    let mut device = CpuDevice::new(2, Isa::detect()).unwrap();
    let sound = Layer::new(&mut device, stored, &[]).mix(&mut device, (&x, &logits), routing, (0, EXPERTS));
    // The weights of the other experts differ from those in `sound`, because poisoned experts draw no random numbers.
    let mut layer = Layer::new(&mut device, stored, &[2, 6]);
    let mixed = layer.mix(&mut device, (&x, &logits), routing, (0, EXPERTS));
    assert!(mixed.iter().chain(&sound).all(|x| x.is_finite()));
    let parts = [(0, 4), (4, EXPERTS)].map(|part| layer.mix(&mut device, (&x, &logits), routing, part));
    let sum: Vec<f32> = parts[0].iter().zip(&parts[1]).map(|(a, b)| a + b).collect();
    let mixed: Vec<f64> = mixed.into_iter().map(f64::from).collect();
    assert_near("two ranks", &sum, &mixed, 1e-6);
    // Only the row that chooses a poisoned expert is NaN.
    logits[2] = 1e9;
    let mixed = layer.mix(&mut device, (&x, &logits), routing, (0, EXPERTS));
    for (row, values) in mixed.chunks(WIDTH).enumerate() {
        assert_eq!(values.iter().all(|x| x.is_nan()), row == 0, "{row}");
        assert_eq!(values.iter().any(|x| x.is_nan()), row == 0, "{row}");
    }
}

#[test]
fn tokens_are_counted_by_layer_and_expert() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let mut layer = Layer::new(&mut device, STORED[0], &[]);
    let x = vec![1.0; 2 * WIDTH];
    let logits = [[0.0, 9.0, 8.0, 0.0, 0.0, 0.0, 0.0], [9.0, 0.0, 8.0, 0.0, 0.0, 0.0, 0.0]].concat();
    let routing = Routing { renormalise: true, ..Routing::softmax(2) };
    // A rank that holds few experts counts the tokens of all experts.
    layer.mix(&mut device, (&x, &logits), routing, (0, 1));
    layer.mix(&mut device, (&x, &logits), routing, (0, EXPERTS));
    let mut tokens = vec![7];
    device.expert_tokens(3, &mut tokens).unwrap();
    assert_eq!(tokens, [2, 2, 4, 0, 0, 0, 0]);
    device.expert_tokens(2, &mut tokens).unwrap();
    assert_eq!(tokens, [0u64; 0]);
}

/// The logits of padding rows favour an expert whose weights are NaN.
#[test]
fn padding_chooses_no_expert_and_is_not_counted() {
    let (mut x, mut logits) = inputs();
    for (index, row) in logits.chunks_mut(EXPERTS).enumerate() {
        row[2] = if index < ROWS / 2 { -1e9 } else { 1e9 };
    }
    let (valid, routing) = (ROWS / 2, Routing { renormalise: true, ..Routing::softmax(3) });
    let mut device = CpuDevice::new(2, Isa::detect()).unwrap();
    let mut layer = Layer::new(&mut device, STORED[0], &[2]);
    let alone = (&x[..valid * WIDTH], &logits[..valid * EXPERTS]);
    let alone = layer.mix(&mut device, alone, routing, (0, EXPERTS));
    let (mut before, mut after) = (Vec::new(), Vec::new());
    device.expert_tokens(3, &mut before).unwrap();
    x[valid * WIDTH..].fill(f32::NAN);
    let padded = layer.mix_padded(&mut device, (&x, &logits), valid, routing, (0, EXPERTS));
    device.expert_tokens(3, &mut after).unwrap();
    assert!(bits(&padded[..valid * WIDTH]) == bits(&alone));
    assert!(padded[valid * WIDTH..].iter().all(|x| *x == 0.0));
    before.iter_mut().for_each(|count| *count *= 2);
    assert_eq!(after, before, "the same tokens once more");
}

/// A table that names the experts with the largest scores gives the same bits as their choice by score.
#[test]
fn a_table_chooses_experts_by_the_token_s_id() {
    let (x, logits) = inputs();
    let mut device = CpuDevice::new(2, Isa::detect()).unwrap();
    let mut layer = Layer::new(&mut device, STORED[0], &[]);
    let routing =
        Routing { score: Score::SqrtSoftplus, renormalise: true, scale: 1.5, ..Routing::softmax(2) };
    let ids: Vec<u32> = (0..ROWS as u32).collect();
    begin(&mut device, &[Share { tokens: ROWS, ..Share::default() }], &ids, &[]);
    let largest = |row: &[f32]| {
        let mut order: Vec<usize> = (0..EXPERTS).collect();
        order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
        [order[0] as f32, order[1] as f32]
    };
    let table: Vec<f32> = logits.chunks(EXPERTS).flat_map(largest).collect();
    let table = device.vector(&table).unwrap();
    let mut mix = |device: &mut CpuDevice, rows: usize, choice: ExpertChoice<'_, Vector>| {
        let x = tensor(device, WIDTH, &x[..rows * WIDTH]);
        let logits = tensor(device, EXPERTS, &logits[..rows * EXPERTS]);
        let mut out = device.tensor(ROWS, WIDTH).unwrap();
        let Layer { gate_up, down, buffers } = &mut layer;
        let (valid_rows, limit, first, layer) = (rows, None, 0, 3);
        let (x, logits) = (&x, &logits);
        let mix = MixExperts {
            x,
            valid_rows,
            logits,
            routing,
            choice,
            limit,
            first,
            gate_up,
            down,
            buffers,
            layer,
        };
        device.mix_experts(mix, &mut out).map(|()| out.values().to_vec())
    };
    let by_token = mix(&mut device, ROWS, ExpertChoice::ByToken(&table)).unwrap();
    let by_score = mix(&mut device, ROWS, ExpertChoice::Largest { bias: None }).unwrap();
    assert!(bits(&by_token) == bits(&by_score));
    let refused = mix(&mut device, 3, ExpertChoice::ByToken(&table)).unwrap_err().to_string();
    assert!(refused.contains("experts by token for 3 of 3 rows, of 64 tokens"), "{refused}");
}

#[test]
fn operands_of_experts_that_do_not_fit_are_refused() {
    let mut device = CpuDevice::new(1, Isa::detect()).unwrap();
    let Layer { gate_up, down, mut buffers } = Layer::new(&mut device, STORED[0], &[]);
    let x = tensor(&mut device, WIDTH, &[1.0; 2 * WIDTH]);
    let logits = [2, 3].map(|rows| tensor(&mut device, EXPERTS, &vec![1.0; rows * EXPERTS]));
    let mut out = device.tensor(2, WIDTH).unwrap();
    let mut refuses = |logits, top_k, first, gate_up: &[Weights], down: &[Weights], why: &str| {
        let routing = Routing { renormalise: true, ..Routing::softmax(top_k) };
        let (valid_rows, buffers) = (if top_k == 1 { 3 } else { 2 }, &mut buffers);
        let choice = ExpertChoice::Largest { bias: None };
        let mix = MixExperts {
            x: &x,
            valid_rows,
            logits,
            routing,
            first,
            gate_up,
            down,
            choice,
            limit: None,
            buffers,
            layer: 0,
        };
        match device.mix_experts(mix, &mut out) {
            Err(DeviceError::Misuse(text)) => assert!(text.contains(why), "{text}"),
            other => panic!("{other:?}"),
        }
    };
    refuses(&logits[1], 2, 0, &gate_up, &down, "3 rows of router logits for 2");
    refuses(&logits[0], 0, 0, &gate_up, &down, "0 of 7 experts");
    refuses(&logits[0], 8, 0, &gate_up, &down, "8 of 7 experts");
    refuses(&logits[0], 2, 1, &gate_up, &down, "from 1 on, of 7");
    refuses(&logits[0], 2, 0, &gate_up[1..], &down, "[6, 7] experts");
    refuses(&logits[0], 7, 0, &down, &gate_up, "plain matrix");
    refuses(&logits[0], 1, 0, &gate_up, &down, "3 valid rows of 2");
}
