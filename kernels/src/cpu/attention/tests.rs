use super::*;
use crate::cpu::simd::isa::{Isa, testable};
use crate::cpu::simd::to_bf16;
use crate::cpu::testing::{Random, no_planes};
use crate::{KvShape, PageId, RowInputs, SlotId, StepInputs, WeightType};

/// The arithmetic of one run of attention.
#[derive(Clone, Copy)]
enum Arithmetic {
    F32,
    Dots,
}

/// Checks everything around the dot-product instruction without the instruction: every path multiplies pairs, by other
/// means if necessary, and gives a result close to attention in f32.
#[test]
fn dots_come_near_f32_and_have_the_same_bits_with_and_without_the_instruction() {
    const PAGES: u32 = 60;
    let mut random = Random::new(31);
    for (heads, kv_heads, head_dim, window) in
        [(4, 2, 32, None), (6, 1, 16, Some(37)), (3, 3, 128, None), (2, 1, 48, Some(200))]
    {
        let shape = AttentionShape { heads, kv_heads, head_dim, scale: 0.2, window };
        let (page_tokens, dtype) = (16, WeightType::Bf16);
        let pages = PAGES as usize + 1;
        let mut kv =
            KvPool::zeroed(KvShape { layers: 1, kv_heads, head_dim, page_tokens, pages, dtype }).unwrap();
        let elements = kv.data.bytes().len() / 2;
        let values = random.normals(elements, 1.0);
        for (to, x) in kv.data.bytes_mut().as_chunks_mut::<2>().0.iter_mut().zip(values) {
            *to = to_bf16(x).to_le_bytes();
        }
        let Stored::Bf16(data) = &kv.data else { unreachable!() };
        let table: Vec<PageId> = (1..=PAGES).rev().map(PageId).collect();
        // A chunk, two decodes (one over two ranges), and a few tokens.
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
        let run = |isa, arithmetic: Arithmetic| {
            let path = Path::new(isa).unwrap();
            let (mut pool, mut scratch) = (ThreadPool::new(2).unwrap(), Scratch::default());
            let mut out = vec![f32::NAN; tokens * heads * head_dim];
            let operands = Attention { qkv: &qkv, shape, kv: &kv, layer: 0, out: &mut out };
            let attend = match arithmetic {
                Arithmetic::F32 => attend::<Widened<Bf16>>,
                Arithmetic::Dots => attend::<Dots>,
            };
            attend(path, &mut pool, &step, &mut scratch, operands, data).unwrap();
            out
        };
        let mut fused = None;
        for isa in testable("attention in dot products") {
            let (exact, got) = (run(isa, Arithmetic::F32), run(isa, Arithmetic::Dots));
            let difference = exact.iter().zip(&got).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
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
