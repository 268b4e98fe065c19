use super::*;
use crate::cpu::quant::block_float::BlockFloatPanels;
use crate::cpu::simd::isa::testable;
use crate::cpu::testing::Random;
use crate::{HostMatrix, WeightType};

/// Packs rows of bfloat16, and reads all of them back.
fn looked_up(path: Path, pool: &mut ThreadPool, rows: usize, weights: &[u16]) -> (Vec<u16>, usize) {
    let (inputs, bytes) =
        (weights.len() / rows, weights.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>());
    let matrices = [HostMatrix::new(&bytes, WeightType::Bf16, rows, inputs)];
    let source = FusedMatrices::new(&matrices, false).unwrap();
    let panels = BlockFloatPanels::pack(pool, source).unwrap();
    let corrections = Corrections::pack(path, pool, source).unwrap();
    let mut found = Vec::new();
    for row in 0..rows {
        let mut out = vec![0.0; inputs];
        panels.read_row(row, &mut out);
        corrections.apply(row, &mut out);
        found.extend(out.iter().map(|x: &f32| (x.to_bits() >> 16) as u16));
        assert!(out.iter().all(|x| x.to_bits().is_multiple_of(1 << 16)), "row {row} has other bits");
    }
    (found, corrections.bytes())
}

#[test]
fn panels_with_their_corrections_have_the_bits_of_the_checkpoint() {
    let mut random = Random::new(91);
    for isa in testable("corrections") {
        let path = Path::new(isa).unwrap();
        for threads in [1, 2] {
            let mut pool = ThreadPool::new(threads).unwrap();
            for (rows, inputs) in [(1, 1), (16, 64), (37, 300), (33, 1024)] {
                // All bit patterns are equally likely, including NaN and infinities.
                let any: Vec<u16> = (0..rows * inputs).map(|_| random.below(1 << 16) as u16).collect();
                assert!(looked_up(path, &mut pool, rows, &any).0 == any, "{isa} {rows}x{inputs}");
                let normal: Vec<u16> = random
                    .normals(rows * inputs, 0.02)
                    .into_iter()
                    .map(|x| half::bf16::from_f32(x).to_bits())
                    .collect();
                assert!(looked_up(path, &mut pool, rows, &normal).0 == normal, "{isa} {rows}x{inputs}");
            }
        }
    }
}

#[test]
fn zeros_of_both_signs_denormals_and_numbers_that_are_not_finite_keep_their_bits() {
    let path = Path::new(testable("special weights")[0]).unwrap();
    let mut pool = ThreadPool::new(1).unwrap();
    let special = [0x0000, 0x8000, 0x0001, 0x8001, 0x7f80, 0xff80, 0x7fc0, 0xffff, 0x7f81, 0x3f80, 0x7f7f];
    // Each special number fills a block of its own. Then all of them share one block.
    let alone: Vec<u16> = special.iter().flat_map(|&w| [w; 64]).collect();
    assert_eq!(looked_up(path, &mut pool, 1, &alone).0, alone);
    assert_eq!(looked_up(path, &mut pool, 1, &special).0, special);
}

/// For comparison, a second copy in bfloat16 takes two bytes per weight.
#[test]
fn corrections_of_normal_weights_take_a_quarter_of_a_byte_each() {
    let path = Path::new(testable("size of corrections")[0]).unwrap();
    let mut pool = ThreadPool::new(2).unwrap();
    let (rows, inputs) = (256, 1024);
    let normal = Random::new(92).normals(rows * inputs, 0.02);
    let weights: Vec<u16> = normal.into_iter().map(|x| half::bf16::from_f32(x).to_bits()).collect();
    let per_weight = looked_up(path, &mut pool, rows, &weights).1 as f64 / (rows * inputs) as f64;
    assert!((0.24..0.28).contains(&per_weight), "{per_weight} bytes per weight");
}
