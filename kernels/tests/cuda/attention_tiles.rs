//! Tests attention on tensor cores against the CPU device: keys and values of 16 bits, heads of 32, 64 and 128
//! elements.

use tutti_kernels::{
    Attention, AttentionShape, Device, KvShape, KvType, PageId, PagedAttention, PlanesShape, WeightType,
};

use crate::attention::{Chunks, scales, store};
use crate::support::{Random, Share, begin, bits, compare, cuda, tensor, values};

/// Largest deviation from the CPU's numbers. The CPU does not round queries and weights to 16 bits.
const TOLERANCES: [(WeightType, f32); 2] = [(WeightType::F16, 1e-3), (WeightType::Bf16, 8e-3)];

/// The tolerance for keys and values in fp8, over which some CPUs round queries and weights, too.
const TOLERANCE_OF_FP8: f32 = 1.5e-2;

#[test]
fn tiles_of_ragged_batches_are_those_of_the_cpu() {
    let Some(mut gpu) = cuda("attention in tiles") else { return };
    let windows = |window| {
        let mut case = Chunks::new(4, 2, 32);
        case.shape.window = Some(window);
        case
    };
    let cases = [
        Chunks::new(4, 2, 32),
        Chunks::new(4, 1, 64),
        Chunks::new(2, 2, 128),
        // Tiles that end between the heads of a token, so that two tiles share a token.
        Chunks::new(5, 1, 32),
        Chunks::new(18, 1, 32),
        // Numbers of queries around the limits of narrow and wide tiles: 15, 16, 17, 63, 64, 65 and 80.
        Chunks { lengths: vec![15, 16, 17, 63, 64, 65, 80], chunks: vec![80], ..Chunks::new(1, 1, 32) },
        Chunks { page_tokens: 48, rotated: 16, norms: false, ..Chunks::new(4, 2, 32) },
        Chunks { page_tokens: 64, ..Chunks::new(2, 1, 64) },
        // Positions just before, at and after the ends of splits of 256 keys.
        Chunks { lengths: vec![255, 256, 257, 513], chunks: vec![250, 3, 1, 300], ..Chunks::new(2, 1, 32) },
        Chunks { lengths: vec![258], chunks: vec![200, 56, 1], ..Chunks::new(4, 1, 64) },
        Chunks { lengths: vec![258], chunks: vec![200, 56, 1], ..Chunks::new(2, 1, 128) },
        windows(1),
        windows(7),
        windows(31),
        windows(32),
        windows(33),
        Chunks { lengths: vec![600], chunks: vec![290, 5], ..windows(270) },
    ];
    for (dtype, tolerance) in TOLERANCES {
        for case in &cases {
            let case = Chunks { dtype: KvType::Full(dtype), ..case.clone() };
            compare(&mut gpu, &format!("{case:?}"), &case, tolerance);
            let case = Chunks { dtype: KvType::Fp8(dtype), scales: scales(), ..case };
            compare(&mut gpu, &format!("{case:?}"), &case, TOLERANCE_OF_FP8);
        }
    }
}

/// No bit of a request's results depends on its chunks, its neighbours, or the division of the work.
#[test]
fn chunks_and_neighbours_change_no_bit_of_tiles() {
    let Some(mut gpu) = cuda("chunks in tiles") else { return };
    let full = KvType::Full(WeightType::Bf16);
    let case = |head_dim, window, lengths| {
        let mut case = Chunks { dtype: full, lengths, chunks: vec![600], ..Chunks::new(4, 2, head_dim) };
        case.shape.window = window;
        case
    };
    let in_fp8 = |case| Chunks { dtype: KvType::Fp8(WeightType::Bf16), scales: scales(), ..case };
    let ragged = || vec![70, 17, 530];
    let cases = [
        case(32, None, ragged()),
        case(32, Some(40), ragged()),
        case(32, Some(300), ragged()),
        case(64, None, vec![20, 265]),
        case(128, None, vec![20, 265]),
        in_fp8(case(32, Some(300), ragged())),
        in_fp8(case(128, None, vec![20, 265])),
    ];
    for case in cases {
        let whole = case.results(&mut gpu);
        // Chunks of single tokens, which have narrow tiles, cross only the first end of a split.
        for chunks in [vec![1, 16, 100], vec![33], vec![250, 1, 1, 1, 1, 1, 1, 1, 1]] {
            for (length, want) in case.lengths.iter().zip(&whole) {
                let alone = Chunks { lengths: vec![*length], chunks: chunks.clone(), ..case.clone() };
                let got = alone.results(&mut gpu);
                assert_eq!(bits(&got[0]), bits(want), "{length} in {chunks:?} of {case:?}");
            }
        }
    }
}

/// The splits (ranges of keys) of a single request are computed in parallel. Among many requests, they are computed one
/// after another.
#[test]
fn splits_in_parallel_and_in_turn_give_the_same_bits() {
    let Some(mut gpu) = cuda("splits") else { return };
    // In both cases there are more thread blocks than fill a GPU: those of wide tiles in the first case, and of narrow
    // tiles in the second.
    for (kv_heads, lengths, chunks) in [(16, vec![320; 4], vec![320]), (64, vec![260; 6], vec![255, 1])] {
        let mut many = Chunks {
            dtype: KvType::Full(WeightType::F16),
            lengths,
            chunks,
            ..Chunks::new(kv_heads, kv_heads, 32)
        };
        // With a window, the first key lies inside a split of 256 keys.
        for window in [None, Some(40)] {
            many.shape.window = window;
            let alone = Chunks { lengths: many.lengths[..1].to_vec(), ..many.clone() };
            let alone = alone.results(&mut gpu);
            for of_many in many.results(&mut gpu) {
                assert_eq!(bits(&of_many), bits(&alone[0]), "{kv_heads} kv heads, window {window:?}");
            }
        }
    }
}

/// Padding rows have the null page, whose contents are undefined. Their output is zeros.
#[test]
fn padding_rows_of_tiles_are_zeros() {
    let Some(mut gpu) = cuda("padding of tiles") else { return };
    let (heads, head_dim) = (4, 64);
    let shape = AttentionShape { heads, kv_heads: 1, head_dim, scale: 0.1, window: None };
    let kv = KvShape {
        layers: 1,
        kv_heads: 1,
        head_dim,
        page_tokens: 16,
        pages: 20,
        dtype: KvType::Full(WeightType::Bf16),
    };
    let mut planes = gpu.planes(&PlanesShape { kv: Some(kv), ..PlanesShape::default() }).unwrap();
    gpu.write_pages(&mut planes, &[PageId(0)], &vec![0xff; kv.page_bytes()]).unwrap();
    // A decode, a padding decode, a padding chunk, a chunk, and a padding row whose position is in the second split of
    // 256 keys.
    let null = |tokens, start: usize| Share { tokens, start, pages: vec![PageId(0); 18], ..Share::default() };
    let live = |tokens| Share { tokens, pages: vec![PageId(1); 1], ..Share::default() };
    let (first, second) = (live(1), Share { pages: vec![PageId(2), PageId(3)], ..live(20) });
    let shares = [first, null(1, 0), null(6, 3), second, null(1, 280)];
    begin(&mut gpu, &mut planes, &shares, &[], &[], &[]).unwrap();
    let tokens: usize = shares.iter().map(|share| share.tokens).sum();
    let mut qkv = tensor(&mut gpu, 6 * head_dim, &Random::new(2).normals(tokens * 6 * head_dim, 1.0));
    store(&mut gpu, &mut qkv, shape, &mut planes);
    let mut out = gpu.tensor(tokens, heads * head_dim).unwrap();
    gpu.attention(Attention { qkv: &qkv, shape, planes: &planes, layer: 0 }, &mut out).unwrap();
    let out = values(&mut gpu, &out);
    let mut rows = out.chunks(heads * head_dim);
    for (share, is_padding) in shares.iter().zip([false, true, true, false, true]) {
        for row in rows.by_ref().take(share.tokens) {
            assert!(row.iter().all(|x| x.is_finite() && (*x == 0.0) == is_padding), "{share:?}: {row:?}");
        }
    }
}

/// The work lists of a shape are uploaded in its first step, and with the inputs of later steps. Both give the same
/// result.
#[test]
fn two_shapes_of_heads_in_one_step_have_lists_of_their_own() {
    let Some(mut gpu) = cuda("two shapes") else { return };
    let first = Chunks { dtype: KvType::Full(WeightType::Bf16), ..Chunks::new(4, 2, 32) };
    let second = Chunks { dtype: KvType::Full(WeightType::Bf16), ..Chunks::new(6, 2, 32) };
    let wanted = [&first, &second].map(|case| {
        let mut fresh = cuda("two shapes")?;
        Some(case.results(&mut fresh))
    });
    for _ in 0..2 {
        assert_eq!([&first, &second].map(|case| Some(case.results(&mut gpu))), wanted);
    }
}
