use std::sync::atomic::Ordering;

use super::*;
use crate::cpu::testing::no_planes;
use crate::{PageId, RowInputs, SlotId, StepInputs};

/// The plan for rows of (start, tokens).
fn plan(rows: &[(usize, usize)], shape: AttentionShape, threads: usize) -> Plan {
    let mut first_token = 0;
    let mut inputs = Vec::new();
    for &(start, tokens) in rows {
        inputs.push(RowInputs {
            first_token,
            tokens,
            start,
            slot: SlotId::NULL,
            continues: false,
            block_table: &[PageId::NULL],
        });
        first_token += tokens;
    }
    let (token_ids, positions) = (vec![0; first_token], vec![0.0; first_token]);
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
    let mut plan = Plan::default();
    // The plan is made twice, because it must not depend on the previous plan.
    plan.make(&step, &shape, threads, usize::MAX);
    plan.make(&step, &shape, threads, usize::MAX);
    plan
}

fn shape(kv_heads: usize, window: Option<usize>) -> AttentionShape {
    AttentionShape { heads: 2 * kv_heads, kv_heads, head_dim: 128, scale: 1.0, window }
}

#[test]
fn a_long_decode_is_cut_where_threads_would_wait_for_it() {
    // Counts each head of a split piece, since a piece may have several heads.
    let splits = |plan: &Plan| {
        let split = plan.pieces.iter().filter(|piece| piece.split.is_some());
        split.map(|piece| piece.kv_heads).sum::<usize>()
    };
    assert_eq!(splits(&plan(&[(4095, 1)], shape(2, None), 4)), 2 * 8);
    assert_eq!(splits(&plan(&[(4095, 1)], shape(2, None), 1)), 0, "one thread");
    assert_eq!(splits(&plan(&[(511, 1)], shape(2, None), 4)), 0, "one range");
    assert_eq!(splits(&plan(&[(4095, 1)], shape(2, Some(300)), 4)), 0, "a window within a range");
    assert_eq!(splits(&plan(&[(4095, 1)], shape(2, Some(600)), 4)), 2 * 2, "a window over two ranges");
    assert_eq!(splits(&plan(&[(4095, 1); 64], shape(2, None), 4)), 0, "many decodes");
    // A long decode among short ones is split, and so are the last tokens of a prefill.
    assert_eq!(splits(&plan(&[(40, 1), (9000, 1), (40, 1)], shape(2, None), 2)), 2 * 18);
    assert_eq!(splits(&plan(&[(2000, 9)], shape(1, None), 2)), 4);
}

#[test]
fn decodes_take_heads_together_as_far_as_threads_stay_busy() {
    let pieces = |rows: &[(usize, usize)], kv_heads: usize, threads| -> Vec<usize> {
        plan(rows, shape(kv_heads, None), threads).pieces.iter().map(|piece| piece.kv_heads).collect()
    };
    assert_eq!(pieces(&[(511, 1); 16], 8, 2), [8; 16]);
    assert_eq!(pieces(&[(511, 1); 4], 8, 2), [8; 4]);
    assert_eq!(pieces(&[(511, 1)], 8, 2), [2; 4]);
    assert_eq!(pieces(&[(511, 1)], 8, 64), [1; 8]);
    assert_eq!(pieces(&[(600, 1)], 8, 4), [2; 8], "four times two heads, over two ranges each");
    assert_eq!(pieces(&[(511, 1)], 3, 1), [1; 3]);
    assert_eq!(pieces(&[(511, 1); 2], 40, 1), [24, 16, 24, 16], "as many queries as a tile has at most");
    assert_eq!(pieces(&[(0, 24)], 8, 2), [1; 8], "a tile of a prefill");
}

#[test]
fn every_token_and_key_has_one_piece_and_results_do_not_overlap() {
    let rows = [(0, 1), (0, 100), (5000, 3), (700, 60), (100_000, 1), (511, 2)];
    for (kv_heads, window, threads) in [(1, None, 1), (1, None, 16), (8, None, 3), (2, Some(600), 64)] {
        let shape = shape(kv_heads, window);
        let sight = Sight { window };
        let plan = plan(&rows, shape, threads);
        let mut seen = vec![0; rows.iter().map(|row| row.1).sum::<usize>() * kv_heads];
        let mut first_tokens = vec![0];
        rows.iter().for_each(|row| first_tokens.push(first_tokens[first_tokens.len() - 1] + row.1));
        let mut ends = Vec::new();
        for (index, split_tile) in plan.split_tiles.iter().enumerate() {
            let of: Vec<_> = plan
                .pieces
                .iter()
                .filter_map(|piece| {
                    piece.split.filter(|split| split.tile == index).map(|split| (piece, split.range))
                })
                .collect();
            let Piece { tile, kv_heads, .. } = *of[0].0;
            let start = rows[tile.row].0 + tile.first;
            let ranges = sight.first(start) / RANGE..(start + tile.tokens - 1) / RANGE + 1;
            assert!(of.iter().map(|of| of.1).eq(ranges.clone()), "each range once, in order");
            assert_eq!(split_tile.left.load(Ordering::Relaxed), ranges.len());
            let floats = ranges.len() * Partial::floats(kv_heads * 2 * tile.tokens, shape.head_dim);
            ends.push((split_tile.partials, split_tile.partials + floats));
        }
        ends.sort_unstable();
        assert!(ends.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ends:?}");
        assert!(ends.last().is_none_or(|last| last.1 <= MOST_PARTIALS));
        let mut counted = std::collections::HashSet::new();
        for piece in &plan.pieces {
            if piece.split.is_none_or(|split| counted.insert(split.tile)) {
                let first = first_tokens[piece.tile.row] + piece.tile.first;
                for token in first..first + piece.tile.tokens {
                    let heads = token * kv_heads + piece.kv_head;
                    seen[heads..heads + piece.kv_heads].iter_mut().for_each(|seen| *seen += 1);
                }
            }
        }
        assert!(seen.iter().all(|&seen| seen == 1), "{kv_heads} kv heads, {threads} threads");
    }
}
