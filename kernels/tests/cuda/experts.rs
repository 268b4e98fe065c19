//! Tests mixtures of experts against the CPU device: routing, and the matrix products of each expert's rows.

mod codes;
mod counts;

use tutti_kernels::cuda::CudaDevice;
use tutti_kernels::{
    ExpertBuffers, ExpertChoice, HostMatrix, MixExperts, PlanesShape, Quantize, Routing, WeightType,
};

use crate::support::{
    Case, Families, Random, Share, begin, bits, bytes, compare, cuda, matrix, results, tensor, values,
};

/// Largest deviation from the CPU's numbers. The CPU does not round activations to 16 bits.
const TYPES: [(WeightType, f32); 3] =
    [(WeightType::F32, 1e-5), (WeightType::F16, 2e-3), (WeightType::Bf16, 1e-2)];
/// Index of the layer in all cases.
const LAYER: usize = 3;

/// Kinds of a router's logits.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Logits {
    Random,
    /// Integers below 3, many of which are equal.
    Ties,
    /// Random logits, and in each row a large one for this expert.
    AllOn(usize),
    /// Random logits, and minus infinity for the experts of odd index.
    EvenOnly,
}

/// A mixture of one layer's experts over some rows.
#[derive(Clone, Debug)]
struct Mixture {
    dtype: WeightType,
    rows: usize,
    valid_rows: usize,
    width: usize,
    intermediate: usize,
    experts: usize,
    routing: Routing,
    logits: Logits,
    /// The rank holds experts `held.0 .. held.1`.
    held: (usize, usize),
    /// Experts whose weights are NaN.
    poisoned: Vec<usize>,
}

impl Mixture {
    fn new(rows: usize, [width, intermediate]: [usize; 2], experts: usize, top_k: usize) -> Self {
        Self {
            dtype: WeightType::F32,
            rows,
            valid_rows: rows,
            width,
            intermediate,
            experts,
            routing: Routing { renormalise: true, ..Routing::softmax(top_k) },
            logits: Logits::Random,
            held: (0, experts),
            poisoned: Vec::new(),
        }
    }

    fn inputs(&self) -> (Vec<f32>, Vec<f32>) {
        let mut random = Random::new((self.width * self.experts) as u64);
        let x = random.normals(self.rows * self.width, 1.0);
        let mut logits = random.normals(self.rows * self.experts, 2.0);
        for row in logits.chunks_mut(self.experts) {
            match self.logits {
                Logits::Random => {}
                Logits::Ties => row.iter_mut().for_each(|logit| *logit = random.below(3) as f32 - 1.0),
                Logits::AllOn(expert) => row[expert] = 60.0,
                Logits::EvenOnly => row.iter_mut().skip(1).step_by(2).for_each(|x| *x = f32::NEG_INFINITY),
            }
        }
        (x, logits)
    }

    /// Returns the matrices of the experts that the rank holds.
    fn weights<D: Families>(&self, device: &mut D) -> (Vec<D::Matrix>, Vec<D::Matrix>) {
        let Self { dtype, width, intermediate, .. } = *self;
        let (mut gate_ups, mut downs) = (Vec::new(), Vec::new());
        for expert in self.held.0..self.held.1 {
            let mut random = Random::new(1000 + expert as u64);
            let mut weights = || match self.poisoned.contains(&expert) {
                true => vec![f32::NAN; width * intermediate],
                false => random.normals(width * intermediate, 0.2),
            };
            let [gate, up] = [(); 2].map(|()| bytes(dtype, &weights()));
            let pair = [&gate, &up].map(|bytes| HostMatrix::new(bytes, dtype, intermediate, width));
            gate_ups.push(device.gate_up_matrix(pair, Quantize::None).unwrap());
            downs.push(matrix(device, dtype, width, &weights()));
        }
        (gate_ups, downs)
    }

    /// Mixes rows in a step that has no other rows.
    fn mix<D: Families>(
        &self,
        device: &mut D,
        (gate_up, down): (&[D::Matrix], &[D::Matrix]),
        (x, logits): (&[f32], &[f32]),
    ) -> Vec<f32> {
        let rows = x.len() / self.width;
        let mut planes = device.planes(&PlanesShape::default()).unwrap();
        begin(device, &mut planes, &[Share { tokens: rows, ..Share::default() }], &[], &[], &[]).unwrap();
        let (mut buffers, mut out) = buffers(device, rows, [self.width, self.intermediate]);
        let (x, logits) = (tensor(device, self.width, x), tensor(device, self.experts, logits));
        let (routing, first, valid_rows) = (self.routing, self.held.0, self.valid_rows.min(rows));
        let (logits, buffers, layer) = (&logits, &mut buffers, LAYER);
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
            layer,
        };
        device.mix_experts(mix, &mut out).unwrap();
        results(device).unwrap();
        values(device, &out)
    }

    fn results<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let ((gate_up, down), (x, logits)) = (self.weights(device), self.inputs());
        self.mix(device, (&gate_up, &down), (&x, &logits))
    }
}

/// Buffers for the experts of up to `rows` rows, and their output.
fn buffers<D: Families>(
    device: &mut D,
    rows: usize,
    [width, intermediate]: [usize; 2],
) -> (ExpertBuffers<D::Tensor>, D::Tensor) {
    let [inputs, activated, outputs, out] =
        [width, intermediate, width, width].map(|width| device.tensor(rows, width).unwrap());
    (ExpertBuffers { inputs, activated, outputs }, out)
}

/// The layer's counts of tokens.
fn counts<D: Families>(device: &mut D) -> Vec<u64> {
    let mut counts = vec![7];
    device.expert_tokens(LAYER, &mut counts).unwrap();
    counts
}

impl Case for Mixture {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        self.results(device)
    }
}

/// Asserts that a GPU gives the CPU's sums up to `tolerance`, and that it counts the tokens of each expert.
#[track_caller]
fn check(gpu: &mut CudaDevice, case: &Mixture, tolerance: f32) {
    let before = counts(gpu);
    // If the number of experts differs, the counts start at zero again.
    let mut wanted = if before.len() == case.experts { before } else { vec![0; case.experts] };
    compare(gpu, &format!("{case:?}"), case, tolerance);
    for logits in case.inputs().1.chunks(case.experts).take(case.valid_rows) {
        let mut order: Vec<usize> = (0..case.experts).collect();
        order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap());
        order[..case.routing.top_k].iter().for_each(|&expert| wanted[expert] += 1);
    }
    assert_eq!(counts(gpu), wanted, "{case:?}");
}

#[test]
fn mixtures_on_plain_cores_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("experts") else { return };
    let all_on = |expert, rows, sizes| Mixture {
        logits: Logits::AllOn(expert),
        ..Mixture::new(rows, sizes, 4, if rows > 40 { 2 } else { 1 })
    };
    let without_sum =
        |case: Mixture| Mixture { routing: Routing { renormalise: false, ..case.routing }, ..case };
    let cases = [
        Mixture::new(1, [1, 1], 1, 1),
        Mixture::new(3, [15, 31], 5, 2),
        Mixture::new(40, [16, 32], 7, 3),
        Mixture::new(40, [18, 34], 7, 3),
        without_sum(Mixture::new(40, [17, 33], 7, 3)),
        without_sum(Mixture::new(9, [65, 64], 8, 8)),
        Mixture::new(9, [64, 65], 33, 5),
        // All rows choose the first or the last expert. The numbers of rows are around multiples of a tile's height.
        all_on(0, 31, [20, 12]),
        all_on(3, 32, [20, 12]),
        all_on(3, 33, [20, 12]),
        all_on(1, 65, [20, 12]),
        Mixture { logits: Logits::Ties, ..Mixture::new(30, [20, 12], 40, 6) },
        Mixture { logits: Logits::EvenOnly, ..Mixture::new(10, [20, 12], 6, 5) },
        Mixture { held: (2, 5), ..Mixture::new(30, [20, 12], 8, 3) },
        Mixture { held: (5, 8), valid_rows: 17, ..Mixture::new(30, [20, 12], 8, 3) },
        Mixture { held: (8, 8), ..Mixture::new(4, [20, 12], 8, 3) },
        Mixture { valid_rows: 0, ..Mixture::new(4, [20, 12], 8, 3) },
        // More experts than a warp has threads, and more pairs of row and expert than a thread block has threads.
        Mixture { held: (30, 70), ..Mixture::new(70, [8, 4], 75, 9) },
    ];
    for (dtype, tolerance) in TYPES {
        for case in &cases {
            // For 16-bit weights, these widths also need the kernels without tensor cores, because 8 does not divide
            // them.
            check(&mut gpu, &Mixture { dtype, ..case.clone() }, tolerance);
        }
    }
}

#[test]
fn mixtures_on_tensor_cores_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("experts in tiles") else { return };
    let all_on = |expert, rows, sizes, experts| Mixture {
        logits: Logits::AllOn(expert),
        ..Mixture::new(rows, sizes, experts, 1)
    };
    let cases = [
        // Few pairs per expert, which gives narrow tiles.
        Mixture::new(1, [8, 8], 4, 2),
        Mixture::new(5, [24, 32], 4, 3),
        Mixture::new(20, [32, 40], 7, 3),
        Mixture::new(20, [64, 72], 40, 6),
        Mixture::new(9, [136, 24], 8, 8),
        // The number of steps along the inputs is the number of copies in flight, or one less or one more.
        Mixture::new(3, [160, 192], 4, 2),
        Mixture::new(3, [192, 224], 4, 2),
        all_on(4, 15, [40, 24], 5),
        all_on(0, 16, [40, 24], 5),
        all_on(2, 17, [40, 24], 5),
        // Many pairs per expert, which gives wide tiles.
        Mixture::new(60, [8, 8], 4, 2),
        Mixture::new(60, [64, 64], 5, 3),
        Mixture::new(90, [72, 136], 5, 3),
        Mixture::new(60, [128, 72], 4, 4),
        all_on(2, 63, [104, 24], 3),
        all_on(1, 64, [104, 24], 3),
        all_on(0, 65, [104, 24], 3),
        all_on(0, 130, [24, 24], 3),
        Mixture { logits: Logits::Ties, ..Mixture::new(60, [24, 16], 5, 3) },
        Mixture { held: (2, 4), valid_rows: 50, ..Mixture::new(60, [24, 16], 5, 3) },
    ];
    for (dtype, tolerance) in &TYPES[1..] {
        for case in &cases {
            check(&mut gpu, &Mixture { dtype: *dtype, ..case.clone() }, *tolerance);
        }
    }
}

/// No bit of a row's results depends on its neighbours, on the size of tiles, or on the chunks of a large step.
#[test]
fn neighbours_and_chunks_change_no_bit_of_a_mixture() {
    let Some(mut gpu) = cuda("experts in batches") else { return };
    let Some(few) = cuda("experts in chunks") else { return };
    let sizes = [40, 24];
    // The memory has room for the outputs of 7 rows.
    let mut few = few.with_expert_memory(7 * 3 * sizes[0] * 4 + 5);
    for (dtype, _) in TYPES {
        for logits in [Logits::Random, Logits::AllOn(1)] {
            let case = Mixture { dtype, logits, ..Mixture::new(70, sizes, 4, 3) };
            let (x, logits) = case.inputs();
            let (gate_up, down) = case.weights(&mut gpu);
            let mut rows = |from: usize, to: usize| {
                let part = (&x[from * case.width..to * case.width], &logits[from * 4..to * 4]);
                case.mix(&mut gpu, (&gate_up, &down), part)
            };
            let whole = rows(0, 70);
            for (from, to) in [(0, 1), (69, 70), (3, 5), (5, 26), (10, 70)] {
                let want = &whole[from * case.width..to * case.width];
                assert_eq!(bits(&rows(from, to)), bits(want), "rows {from}..{to} of {case:?}");
            }
            assert_eq!(bits(&case.results(&mut few)), bits(&whole), "chunks of {case:?}");
            let before = counts(&mut few);
            assert_eq!(bits(&case.results(&mut few)), bits(&whole), "chunks again, of {case:?}");
            let counted: u64 = counts(&mut few).iter().sum::<u64>() - before.iter().sum::<u64>();
            assert_eq!(counted, 70 * 3, "{case:?}");
        }
    }
}

/// The weights of experts without rows are NaN, so that reading them would show in the results.
#[test]
fn experts_without_rows_are_not_read() {
    let Some(mut gpu) = cuda("experts without rows") else { return };
    for (dtype, _) in TYPES {
        for rows in [5, 40] {
            let poisoned = vec![1, 3, 5];
            let case =
                Mixture { dtype, logits: Logits::EvenOnly, poisoned, ..Mixture::new(rows, [24, 16], 6, 3) };
            assert!(case.results(&mut gpu).iter().all(|x| x.is_finite()), "{case:?}");
            let case = Mixture { logits: Logits::Random, ..case };
            assert!(case.results(&mut gpu).iter().any(|x| x.is_nan()), "{case:?}");
        }
    }
}

#[test]
fn a_row_without_finite_weights_is_nan_and_no_other() {
    let Some(mut gpu) = cuda("logits that are not finite") else { return };
    for (dtype, _) in TYPES {
        let case = Mixture { dtype, ..Mixture::new(12, [24, 16], 6, 2) };
        let ((gate_up, down), (x, logits)) = (case.weights(&mut gpu), case.inputs());
        let sound = case.mix(&mut gpu, (&gate_up, &down), (&x, &logits));
        for renormalise in [true, false] {
            let case = Mixture { routing: Routing { renormalise, ..case.routing }, ..case.clone() };
            let mut logits = logits.clone();
            logits[3 * 6] = f32::NAN;
            logits[4 * 6 + 5] = f32::INFINITY;
            logits[7 * 6..8 * 6].fill(f32::NAN);
            logits[9 * 6..10 * 6].fill(f32::NEG_INFINITY);
            logits[11 * 6 + 2] = -f32::NAN;
            let mixed = case.mix(&mut gpu, (&gate_up, &down), (&x, &logits));
            for (row, (got, want)) in mixed.chunks(24).zip(sound.chunks(24)).enumerate() {
                let is_nan = [3, 4, 7, 9, 11].contains(&row);
                assert!(got.iter().all(|x| x.is_nan() == is_nan), "{renormalise}, row {row}: {got:?}");
                assert!(is_nan || !renormalise || bits(got) == bits(want), "row {row}");
            }
        }
    }
}

/// Padding rows are NaN. If they chose experts, they would choose one whose weights are NaN.
#[test]
fn padding_chooses_no_expert_and_is_not_counted() {
    let Some(mut gpu) = cuda("padding of experts") else { return };
    for (dtype, _) in TYPES {
        for valid_rows in [0, 1, 9, 40] {
            let case = Mixture { dtype, valid_rows, poisoned: vec![2], ..Mixture::new(50, [24, 16], 4, 2) };
            let ((gate_up, down), (mut x, mut logits)) = (case.weights(&mut gpu), case.inputs());
            let (of_valid, of_logits) = (valid_rows * case.width, valid_rows * case.experts);
            logits[..of_logits].chunks_mut(4).for_each(|row| row[2] = -1e9);
            logits[of_logits..].chunks_mut(4).for_each(|row| row[2] = 1e9);
            x[of_valid..].fill(f32::NAN);
            let before = counts(&mut gpu);
            let padded = case.mix(&mut gpu, (&gate_up, &down), (&x, &logits));
            assert!(padded[of_valid..].iter().all(|x| x.to_bits() == 0), "{case:?}");
            let after = counts(&mut gpu);
            assert_eq!(after[2], before.get(2).copied().unwrap_or(0), "{case:?}");
            let counted = after.iter().sum::<u64>() - before.iter().sum::<u64>();
            assert_eq!(counted, 2 * valid_rows as u64, "{case:?}");
            if valid_rows > 0 {
                let alone = (&x[..of_valid], &logits[..of_logits]);
                let alone = case.mix(&mut gpu, (&gate_up, &down), alone);
                assert_eq!(bits(&padded[..of_valid]), bits(&alone), "{case:?}");
            }
        }
    }
}

/// Experts of two types have separate launches. A row still adds its experts in order.
struct Mixed;

impl Case for Mixed {
    fn run<D: Families>(&self, device: &mut D) -> Vec<f32> {
        let case = Mixture::new(20, [24, 16], 5, 4);
        let (mut gate_up, mut down) = case.weights(device);
        let (others, downs) = Mixture { dtype: WeightType::Bf16, ..case.clone() }.weights(device);
        for (expert, (other, back)) in others.into_iter().zip(downs).enumerate() {
            if [0, 2, 3].contains(&expert) {
                (gate_up[expert], down[expert]) = (other, back);
            }
        }
        let (x, logits) = case.inputs();
        case.mix(device, (&gate_up, &down), (&x, &logits))
    }
}

#[test]
fn a_layer_may_hold_experts_of_two_types() {
    let Some(mut gpu) = cuda("experts of two types") else { return };
    compare(&mut gpu, "two types", &Mixed, 1e-2);
}
