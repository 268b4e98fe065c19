use tutti_kernels::Nomination;

use super::*;

fn tiles(
    rows: impl IntoIterator<Item = usize>,
    likeliest: &[usize],
    capacity: usize,
) -> Vec<(Range<usize>, bool)> {
    let (rows, likeliest) = (rows.into_iter().collect(), likeliest.to_vec());
    let wanted = WantedRows { rows, likeliest, ..WantedRows::default() };
    let mut tiles = Vec::new();
    divide(&wanted, capacity, true, &mut tiles);
    // Every wanted row is in one tile.
    let covered = |row: &usize| tiles.iter().filter(|tile| tile.rows.contains(row)).count();
    assert!(wanted.rows.iter().all(|row| covered(row) == 1));
    tiles.into_iter().map(|tile| (tile.rows, tile.likeliest)).collect()
}

#[test]
fn rows_that_fit_are_one_tile() {
    let all: Vec<usize> = (0..100).collect();
    assert_eq!(tiles(0..100, &all, 110), [(0..100, true)]);
    assert_eq!(tiles(0..100, &[], 110), [(0..100, false)]);
    assert_eq!(tiles(0..100, &all, 64), [(0..64, true), (64..100, true)]);
    assert_eq!(tiles(0..100, &[], 16).len(), 7);
    assert_eq!(tiles([], &[], 110), []);
}

#[test]
fn a_row_that_needs_its_logits_affects_its_block_only() {
    let but = |row: usize| (0..100).filter(|other| *other != row).collect::<Vec<_>>();
    assert_eq!(tiles(0..100, &but(40), 110), [(0..32, true), (32..64, false), (64..100, true)]);
    assert_eq!(tiles(0..100, &but(0), 110), [(0..32, false), (32..100, true)]);
}

#[test]
fn rows_without_a_request_are_never_sampled() {
    // Row 5 has no request. A tile of likeliest tokens over rows 0 to 9 would also sample row 5.
    let rows: Vec<usize> = (0..10).filter(|row| *row != 5).collect();
    assert_eq!(tiles(rows.clone(), &rows, 110), [(0..10, false)]);
    let rows: Vec<usize> = (0..32).chain(50..60).collect();
    assert_eq!(tiles(rows.clone(), &rows, 110), [(0..32, true), (50..60, true)]);
    // Rows far apart are not in the same tile.
    assert_eq!(tiles([3, 900], &[], 110), [(3..4, false), (900..901, false)]);
}

#[test]
fn without_candidates_all_rows_are_whole() {
    let wanted = WantedRows { rows: vec![0, 1], likeliest: vec![0, 1], ..WantedRows::default() };
    let mut tiles = Vec::new();
    divide(&wanted, 110, false, &mut tiles);
    assert_eq!(tiles, [Tile { rows: 0..2, likeliest: false }]);
}

#[test]
fn only_rows_without_a_nomination_are_gathered_whole() {
    let nomination = Nomination { count: 40, temperature: 0.5, adjustments: None };
    let nominated = vec![(3, nomination.clone()), (40, nomination.clone())];
    let wanted = WantedRows { rows: vec![2, 3, 5, 6, 40], likeliest: vec![5], nominated };
    let by = gathered_by(&wanted, &(2..32), true);
    assert_eq!(by.whole, [0, 4]);
    assert_eq!(by.nominated, [(1, &nomination), (3, &Nomination::LIKELIEST)]);
    let by = gathered_by(&wanted, &(32..41), true);
    assert_eq!((by.whole, by.nominated), (vec![], vec![(8, &nomination)]));
    let by = gathered_by(&wanted, &(2..32), false);
    assert_eq!((by.whole, by.nominated), (vec![0, 1, 3, 4], vec![]));
}
