use super::*;
use crate::cpu::memory::format::{Format, STEP};
use crate::cpu::memory::kv::VALUE_PANEL;
use crate::cpu::simd::isa::{Isa, testable};
use crate::cpu::simd::{from_bf16, to_bf16};
use crate::cpu::testing::{Random, no_planes};
use crate::{KvShape, KvType, PageId, RowInputs, SlotId, StepInputs, WeightType};

/// Computes attention in double precision over a bfloat16 pool. `rows` holds (start, tokens) of each row. All rows
/// share one table of pages.
fn in_double_precision(
    qkv: &[f32],
    shape: AttentionShape,
    kv: &KvPool,
    table: &[PageId],
    rows: &[(usize, usize)],
) -> Vec<f64> {
    let AttentionShape { heads, kv_heads, head_dim, scale, .. } = shape;
    let (layout, sight) = (Layout::new(&kv.shape, 0), Sight { window: shape.window });
    let KvData::Full(Stored::Bf16(data)) = &kv.data else { unreachable!() };
    let key = |head, position, d| {
        let panel = layout.key_panel(table, head, position);
        f64::from(from_bf16(data[panel + d / 2 * STEP + Bf16::index_in_step(d % 2, position % LANES)]))
    };
    let value = |head, position, d| {
        let panel = layout.value_panels(table, head, position) + d / LANES * VALUE_PANEL;
        let step = panel + position % LANES / 2 * STEP;
        f64::from(from_bf16(data[step + Bf16::index_in_step(position % 2, d % LANES)]))
    };
    let positions = rows.iter().flat_map(|&(start, tokens)| start..start + tokens);
    let mut out = Vec::new();
    for (position, qkv) in positions.zip(qkv.chunks((heads + 2 * kv_heads) * head_dim)) {
        for (head, q) in qkv.chunks(head_dim).take(heads).enumerate() {
            let head = head / (heads / kv_heads);
            let keys = sight.first(position)..position + 1;
            let score = |at| (0..head_dim).map(|d| f64::from(q[d]) * key(head, at, d)).sum::<f64>();
            let scores: Vec<f64> = keys.clone().map(|at| score(at) * f64::from(scale)).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let total: f64 = weights.iter().sum();
            out.extend((0..head_dim).map(|d| {
                let of_key = keys.clone().zip(&weights).map(|(at, weight)| weight * value(head, at, d));
                of_key.sum::<f64>() / total
            }));
        }
    }
    out
}

/// Compares attention by bfloat16 dot products with double precision on every instruction path. Paths without the
/// dot-product instruction emulate it. Only unit tests compile the emulation.
#[test]
fn dots_come_near_double_precision_and_have_the_same_bits_with_and_without_the_instruction() {
    const PAGES: u32 = 60;
    let mut random = Random::new(31);
    for (heads, kv_heads, head_dim, window) in
        [(4, 2, 32, None), (6, 1, 16, Some(37)), (3, 3, 128, None), (2, 1, 48, Some(200))]
    {
        let shape = AttentionShape { heads, kv_heads, head_dim, scale: 0.2, window };
        let (page_tokens, dtype) = (16, KvType::Full(WeightType::Bf16));
        let pages = PAGES as usize + 1;
        let kv = KvShape { layers: 1, kv_heads, head_dim, page_tokens, pages, dtype };
        let mut kv = KvPool::zeroed(kv, &[]).unwrap();
        let elements = kv.data.bytes().len() / 2;
        let values = random.normals(elements, 1.0);
        for (to, x) in kv.data.bytes_mut().as_chunks_mut::<2>().0.iter_mut().zip(values) {
            *to = to_bf16(x).to_le_bytes();
        }
        let KvData::Full(Stored::Bf16(data)) = &kv.data else { unreachable!() };
        let table: Vec<PageId> = (1..=PAGES).rev().map(PageId).collect();
        // A prefill chunk, two decodes (the second over two ranges), and a row of three tokens.
        let rows = [(130, 61), (5, 1), (900, 1), (600, 3)];
        let (mut inputs, mut tokens) = (Vec::new(), 0);
        for (start, count) in rows {
            inputs.push(RowInputs {
                first_token: tokens,
                tokens: count,
                start,
                slot: SlotId::NULL,
                continues: false,
                block_table: &table,
            });
            tokens += count;
        }
        let (token_ids, positions) = (vec![0; tokens], vec![0.0; tokens]);
        let mut step = Step::default();
        let inputs = StepInputs {
            token_ids: &token_ids,
            positions: [&positions[..]; 3],
            rows: &inputs,
            copies: &[],
            logit_rows: &[],
            shape: None,
        };
        step.begin(&inputs, &no_planes()).unwrap();
        let qkv = random.normals(tokens * (heads + 2 * kv_heads) * head_dim, 1.0);
        let exact = in_double_precision(&qkv, shape, &kv, &table, &rows);
        let run = |isa| {
            let path = Path::new(isa).unwrap();
            let (mut pool, mut scratch) = (ThreadPool::new(2).unwrap(), Scratch::default());
            let mut out = vec![f32::NAN; tokens * heads * head_dim];
            let operands = Attention { qkv: &qkv, shape, kv: &kv, layer: 0, out: &mut out };
            attend::<Dots>(path, &mut pool, &step, &mut scratch, operands, Pages::Full(data)).unwrap();
            out
        };
        let mut fused = None;
        for isa in testable("attention in dot products") {
            let got = run(isa);
            assert_eq!(got.len(), exact.len());
            let off = exact.iter().zip(&got).map(|(exact, got)| (exact - f64::from(*got)).abs());
            let difference = off.fold(0.0, f64::max);
            // The comparison also fails for a NaN.
            assert!(
                difference < 0.05 && !got.iter().any(|x| x.is_nan()),
                "{isa} {shape:?}: off by {difference}"
            );
            // The portable path rounds products and sums separately.
            if isa != Isa::Portable {
                let bits: Vec<u32> = got.iter().map(|x| x.to_bits()).collect();
                assert!(fused.get_or_insert_with(|| bits.clone()) == &bits, "{isa} {shape:?}: other bits");
            }
        }
    }
}
