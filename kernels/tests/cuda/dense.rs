//! Tests norms, matrix products, sigmoid gates, embedding, copies of rows and recurrences against the CPU device.

use tutti_kernels::{
    DecayedSum, DeviceError, Embed, GateUp, HostMatrix, Linear, Norm, PlanesShape, Quantize, SlotCopy,
    SlotId, VocabularyShard, WeightType,
};

use crate::support::{Case, Families, Random, Share, begin, bytes, compare, cuda, matrix, tensor, values};

const TYPES: [(WeightType, f32); 3] =
    [(WeightType::F32, 1e-5), (WeightType::F16, 2e-3), (WeightType::Bf16, 1e-2)];

struct Norms(usize);

impl Case for Norms {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let mut random = Random::new(self.0 as u64);
        let x = tensor(device, self.0, &random.normals(30 * self.0, 3.0));
        let weight = device.vector(&random.normals(self.0, 1.0)).unwrap();
        let mut out = device.tensor(31, self.0).unwrap();
        device.rms_norm(&x, Norm { weight: &weight, eps: 1e-6 }, &mut out).unwrap();
        values(device, &out)
    }
}

#[test]
fn norms_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("norms") else { return };
    for width in [1, 16, 19, 255, 256, 257, 1024] {
        compare(&mut gpu, &format!("width {width}"), &Norms(width), 2e-6);
    }
}

/// A matrix product and its variants.
#[derive(Clone, Copy, Debug)]
struct Products {
    dtype: WeightType,
    rows: usize,
    outputs: usize,
    inputs: usize,
    norm: bool,
    bias: bool,
}

impl Case for Products {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let Self { dtype, rows, outputs, inputs, norm, bias } = *self;
        let mut random = Random::new((rows * outputs + inputs) as u64);
        let x = tensor(device, inputs, &random.normals(rows * inputs, 1.0));
        let weight = matrix(device, dtype, outputs, &random.normals(outputs * inputs, 1.0));
        let norms = device.vector(&random.normals(inputs, 1.0)).unwrap();
        let biases = device.vector(&random.normals(outputs, 3.0)).unwrap();
        let linear = || Linear {
            x: &x,
            norm: norm.then_some(Norm { weight: &norms, eps: 1e-6 }),
            weight: &weight,
            bias: bias.then_some(&biases),
        };
        let mut set = device.tensor(rows, outputs).unwrap();
        device.linear(linear(), &mut set).unwrap();
        let mut added = tensor(device, outputs, &random.normals(rows * outputs, 5.0));
        device.linear_add(linear(), &mut added).unwrap();
        let mut all = values(device, &set);
        all.extend(values(device, &added));
        let gate_up = random.normals(2 * outputs * inputs, 0.5);
        let (gate, up) = gate_up.split_at(outputs * inputs);
        let (gate, up) = (bytes(dtype, gate), bytes(dtype, up));
        let sources = [&gate, &up].map(|bytes| HostMatrix::new(bytes, dtype, outputs, inputs));
        let pair = device.gate_up_matrix(sources, Quantize::None).unwrap();
        let norm = norm.then_some(Norm { weight: &norms, eps: 1e-6 });
        device.gate_up(GateUp { x: &x, norm, weight: &pair, limit: None }, &mut set).unwrap();
        all.extend(values(device, &set));
        // The next product reads the result in the weights' type. It must not read a result that has changed since.
        let down = matrix(device, dtype, inputs, &random.normals(inputs * outputs, 1.0));
        let (mut out, largest_so_far) = (device.tensor(rows, inputs).unwrap(), largest(&all));
        for changed in [None, Some(random.normals(rows * outputs, 1.0))] {
            changed.iter().for_each(|changed| device.upload(changed, &mut set).unwrap());
            device.linear(Linear { x: &set, norm: None, weight: &down, bias: None }, &mut out).unwrap();
            // The tolerance is relative to the largest of all values. So these values are scaled to be as large as the
            // largest before them.
            let computed = values(device, &out);
            let scale = largest_so_far / largest(&computed);
            all.extend(computed.iter().map(|x| x * scale));
        }
        all
    }
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(1e-30, |largest, x| largest.max(x.abs()))
}

#[test]
fn products_with_norm_bias_gate_and_residual_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("products") else { return };
    for (dtype, tolerance) in TYPES {
        for (rows, outputs, inputs) in [(1, 1, 4), (1, 96, 64), (7, 17, 36), (33, 64, 96), (65, 40, 132)] {
            for (norm, bias) in [(false, false), (true, false), (true, true)] {
                let case = Products { dtype, rows, outputs, inputs, norm, bias };
                compare(&mut gpu, &format!("{case:?}"), &case, tolerance);
            }
        }
    }
}

/// Sigmoid gates, one per element and one per row.
struct Gates(usize);

impl Case for Gates {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let (rows, width, mut random) = (5, self.0, Random::new(7));
        let mut x = tensor(device, width, &random.normals(rows * width, 2.0));
        for gates in [width, 1] {
            let gate = tensor(device, gates, &random.normals(rows * gates, 4.0));
            device.sigmoid_gate(&gate, &mut x).unwrap();
        }
        let all = values(device, &x);
        for other in [tensor(device, width, &vec![0.0; width]), tensor(device, 3, &[0.0; 15])] {
            let refused = device.sigmoid_gate(&other, &mut x);
            assert!(matches!(refused, Err(DeviceError::Misuse(_))), "{refused:?}");
        }
        all
    }
}

#[test]
fn sigmoid_gates_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("gates") else { return };
    for width in [2, 64, 257] {
        compare(&mut gpu, &format!("width {width}"), &Gates(width), 1e-6);
    }
}

/// Embedding of a step's rows from a whole table and from a shard, and the rows that its logits need.
struct Rows(WeightType);

impl Case for Rows {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let (vocabulary, width) = (50, 20);
        let table = bytes(self.0, &Random::new(3).normals(vocabulary * width, 1.0));
        let rows = |first: usize, end: usize| {
            let bytes = &table[first * width * self.0.bytes()..end * width * self.0.bytes()];
            [HostMatrix::new(bytes, self.0, end - first, width)]
        };
        let whole = device.table_matrix(&rows(0, vocabulary), Quantize::None).unwrap();
        let tied = device.tied_matrix(&rows(0, vocabulary), Quantize::None).unwrap();
        let shard = device.table_matrix(&rows(10, 30), Quantize::None).unwrap();
        // The ids include both ends of the table and of the shard, and their neighbours.
        let ids: Vec<u32> = [9, 10, 29, 30, 0, 49].into_iter().chain((0..31).map(|i| i * 7 % 50)).collect();
        let mut planes = device.planes(&PlanesShape::default()).unwrap();
        let shares = [Share { tokens: 30, ..Share::default() }, Share { tokens: 7, ..Share::default() }];
        begin(device, &mut planes, &shares, &ids, &[0, 3, 4, 29, 36], &[]).unwrap();
        let mut out = device.tensor(40, width).unwrap();
        let mut all = Vec::new();
        let shards =
            [(&shard, Some(VocabularyShard { first: 10, vocabulary })), (&tied, None), (&whole, None)];
        for (table, shard) in shards {
            device.embed(Embed { table, shard }, &mut out).unwrap();
            all.extend(values(device, &out));
        }
        device.overwrite_rows(&mut out, 3, &vec![0.25; 2 * width]).unwrap();
        device.keep_logit_rows(&mut out).unwrap();
        let mut tile = device.tensor(3, width).unwrap();
        for rows in [0..2, 2..5] {
            device.copy_rows(&out, rows, &mut tile).unwrap();
            all.extend(values(device, &tile));
        }
        assert!(matches!(device.copy_rows(&out, 3..6, &mut tile), Err(DeviceError::Misuse(_))));
        let mut sum = tensor(device, width, &vec![1.0; 3 * width]);
        device.all_reduce_add(&mut tile, &mut sum).unwrap();
        all.extend(values(device, &sum));
        all
    }
}

#[test]
fn embeddings_and_kept_rows_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("rows") else { return };
    for (dtype, _) in TYPES {
        compare(&mut gpu, &format!("{dtype:?}"), &Rows(dtype), 0.0);
    }
}

/// Decayed sums over two steps, with slot copies between them.
struct Sums;

impl Case for Sums {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let (width, layers) = (130, 2);
        let shape =
            PlanesShape { slot_bytes: vec![8, layers * width * 4], slots: 5, ..PlanesShape::default() };
        let mut planes = device.planes(&shape).unwrap();
        let mut random = Random::new(9);
        let decay = device.vector(&random.normals(width, 0.5)).unwrap();
        let mut all = Vec::new();
        let zero = [1, 2].map(|to| SlotCopy { from: SlotId::NULL, to: SlotId(to) });
        let moved =
            [SlotCopy { from: SlotId(1), to: SlotId(3) }, SlotCopy { from: SlotId(2), to: SlotId(1) }];
        for (copies, slots) in [(&zero, [1, 2]), (&moved, [3, 1])] {
            let shares = [(5, slots[0]), (1, slots[1])];
            let shares = shares.map(|(tokens, slot)| Share { tokens, slot, ..Share::default() });
            begin(device, &mut planes, &shares, &[], &[], copies).unwrap();
            let x = tensor(device, width, &random.normals(6 * width, 1.0));
            let mut out = device.tensor(6, width).unwrap();
            for layer in 0..layers {
                let sum = DecayedSum { x: &x, decay: &decay, planes: &mut planes, plane: 1, layer };
                device.decayed_sum(sum, &mut out).unwrap();
                all.extend(values(device, &out));
            }
        }
        let (mut state, mut again) = (Vec::new(), Vec::new());
        device.read_slot(&planes, SlotId(3), &mut state).unwrap();
        device.write_slot(&mut planes, SlotId(4), &state).unwrap();
        device.read_slot(&planes, SlotId(4), &mut again).unwrap();
        assert_eq!(state, again);
        let refused = device.write_slot(&mut planes, SlotId(4), &state[1..]);
        assert!(matches!(refused, Err(DeviceError::Misuse(_))));
        all.extend(state[8..].as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        all
    }
}

#[test]
fn recurrences_and_slot_copies_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("recurrence") else { return };
    compare(&mut gpu, "decayed sum", &Sums, 1e-6);
}
