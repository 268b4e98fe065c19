//! Tests experts whose weights are codes.

use tutti_kernels::cpu::{CpuDevice, Isa};
use tutti_kernels::{HostMatrix, Quantize, QuantizedType, ScaleType, WeightType};

use super::{Logits, Mixture};
use crate::codes::{Source, TYPES};
use crate::support::{Families, Random, assert_near, bits, bytes, cuda};

/// Scales and offsets of the experts' matrices.
type Kind = (ScaleType, bool);

/// Returns gate, up and down of each expert. Down has other codes than gate and up.
fn sources(case: &Mixture, element: QuantizedType, kind: Kind) -> Vec<[Source; 3]> {
    let Mixture { width, intermediate, .. } = *case;
    let of_expert = |expert: usize| {
        let mut random = Random::new(2000 + expert as u64);
        let mut source =
            |element, rows, columns| Source::random(&mut random, element, (rows, columns), (1, 32), kind);
        let other = if element == QuantizedType::Int4 { QuantizedType::Int8 } else { element };
        let [gate, up] = [(); 2].map(|()| source(element, intermediate, width));
        [gate, up, source(other, width, intermediate)]
    };
    (case.held.0..case.held.1).map(of_expert).collect()
}

/// Returns gate with up and down of each expert, as codes.
fn weights<D: Families>(
    device: &mut D,
    case: &Mixture,
    element: QuantizedType,
    kind: Kind,
) -> (Vec<D::Matrix>, Vec<D::Matrix>) {
    let (mut gate_ups, mut downs) = (Vec::new(), Vec::new());
    for [gate, up, down] in sources(case, element, kind) {
        gate_ups.push(device.quantized_gate_up([gate.view(), up.view()]).unwrap());
        downs.push(device.quantized_matrix(&[down.view()]).unwrap());
    }
    (gate_ups, downs)
}

/// Returns the same weights in bf16.
fn stored_weights<D: Families>(
    device: &mut D,
    case: &Mixture,
    element: QuantizedType,
    kind: Kind,
) -> (Vec<D::Matrix>, Vec<D::Matrix>) {
    let (mut gate_ups, mut downs) = (Vec::new(), Vec::new());
    for [gate, up, down] in sources(case, element, kind) {
        let of = |source: &Source| {
            let count = source.rows * source.columns;
            let value = |i: usize| source.weight(i / source.columns, i % source.columns) as f32;
            bytes(WeightType::Bf16, &(0..count).map(value).collect::<Vec<_>>())
        };
        let all = [of(&gate), of(&up), of(&down)];
        let host =
            |index: usize, of: &Source| HostMatrix::new(&all[index], WeightType::Bf16, of.rows, of.columns);
        gate_ups.push(device.gate_up_matrix([host(0, &gate), host(1, &up)], Quantize::None).unwrap());
        downs.push(device.matrix(&[host(2, &down)], Quantize::None).unwrap());
    }
    (gate_ups, downs)
}

#[test]
fn mixtures_of_codes_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("experts of codes") else { return };
    let isa = Isa::supported().last().unwrap();
    let mut cpu = CpuDevice::new(1, isa).unwrap().with_quantised_activations(false);
    let all_on = |expert, rows, sizes, experts| Mixture {
        logits: Logits::AllOn(expert),
        ..Mixture::new(rows, sizes, experts, 1)
    };
    let cases = [
        Mixture::new(1, [32, 48], 4, 2),
        Mixture::new(20, [64, 72], 40, 6),
        Mixture::new(5, [33, 47], 4, 3),
        Mixture::new(3, [600, 80], 3, 2),
        all_on(0, 17, [40, 600], 2),
        Mixture::new(90, [72, 136], 5, 3),
        all_on(0, 65, [104, 24], 3),
        Mixture { held: (2, 4), valid_rows: 50, ..Mixture::new(60, [40, 16], 5, 3) },
        Mixture { held: (8, 8), ..Mixture::new(4, [20, 12], 8, 3) },
    ];
    for element in TYPES {
        for kind in [(ScaleType::F32, false), (ScaleType::F16, true)] {
            for case in &cases {
                let (x, logits) = case.inputs();
                let (gate_up, down) = weights(&mut gpu, case, element, kind);
                let got = case.mix(&mut gpu, (&gate_up, &down), (&x, &logits));
                let what = format!("{element:?} {kind:?} {case:?}");
                let (gate_up, down) = stored_weights(&mut gpu, case, element, kind);
                let want = case.mix(&mut gpu, (&gate_up, &down), (&x, &logits));
                assert_near(&format!("{what}, weights in bf16"), &got, &want, 4e-3);
                let (gate_up, down) = weights(&mut cpu, case, element, kind);
                let want = case.mix(&mut cpu, (&gate_up, &down), (&x, &logits));
                assert_near(&what, &got, &want, 3e-2);
            }
        }
    }
}

/// Down projections may be unquantised where gate and up are codes: a checkpoint quantises only matrices whose inputs
/// are whole groups.
#[test]
fn gates_of_codes_and_outputs_of_a_type_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("experts of codes and types") else { return };
    let isa = Isa::supported().last().unwrap();
    let mut cpu = CpuDevice::new(1, isa).unwrap().with_quantised_activations(false);
    for dtype in [WeightType::F32, WeightType::F16, WeightType::Bf16] {
        for rows in [5, 90] {
            let case = Mixture { dtype, ..Mixture::new(rows, [64, 40], 5, 3) };
            let (x, logits) = case.inputs();
            let (gate_up, _) = weights(&mut gpu, &case, QuantizedType::Int8, (ScaleType::F32, false));
            let (_, down) = case.weights(&mut gpu);
            let got = case.mix(&mut gpu, (&gate_up, &down), (&x, &logits));
            let (gate_up, _) = weights(&mut cpu, &case, QuantizedType::Int8, (ScaleType::F32, false));
            let (_, down) = case.weights(&mut cpu);
            let want = case.mix(&mut cpu, (&gate_up, &down), (&x, &logits));
            assert_near(&format!("{dtype:?} {case:?}"), &got, &want, 2e-2);
        }
    }
}

#[test]
fn neighbours_and_chunks_change_no_bit_of_a_mixture_of_codes() {
    let Some(mut gpu) = cuda("experts of codes in batches") else { return };
    let Some(few) = cuda("experts of codes in chunks") else { return };
    let sizes = [40, 528];
    // The memory has room for the outputs of 7 rows.
    let mut few = few.with_expert_memory(7 * 3 * sizes[0] * 4 + 5);
    for element in TYPES {
        let case = Mixture { logits: Logits::AllOn(1), ..Mixture::new(70, sizes, 4, 3) };
        let (x, logits) = case.inputs();
        let (gate_up, down) = weights(&mut gpu, &case, element, (ScaleType::F16, true));
        let mut rows = |from: usize, to: usize| {
            let part = (&x[from * case.width..to * case.width], &logits[from * 4..to * 4]);
            case.mix(&mut gpu, (&gate_up, &down), part)
        };
        let whole = rows(0, 70);
        for (from, to) in [(0, 1), (69, 70), (3, 5), (5, 26), (10, 70)] {
            let want = &whole[from * case.width..to * case.width];
            assert_eq!(bits(&rows(from, to)), bits(want), "{element:?}: rows {from}..{to}");
        }
        let (gate_up, down) = weights(&mut few, &case, element, (ScaleType::F16, true));
        let chunked = case.mix(&mut few, (&gate_up, &down), (&x, &logits));
        assert_eq!(bits(&chunked), bits(&whole), "{element:?}: chunks");
    }
}
