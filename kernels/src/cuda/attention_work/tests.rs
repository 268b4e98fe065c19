use super::{ALL_SPLITS, AttentionWork, Item, NARROW, WIDE, WorkShape};

/// Builds the work lists of `rows`, each (tokens, first position).
fn work(shape: WorkShape, rows: &[(u32, u32)]) -> AttentionWork {
    let (mut words, mut tokens) = (Vec::new(), 0);
    for &(count, start) in rows {
        words.extend([tokens, start, 0, 0]);
        tokens += count;
    }
    let mut work = AttentionWork::new(shape);
    work.build(&words, tokens as usize);
    work
}

fn items(work: &AttentionWork) -> impl Iterator<Item = &Item> {
    work.narrow.iter().chain(&work.wide)
}

#[test]
fn each_query_and_split_is_in_one_item() {
    let rows = [(1, 0), (1, 255), (1, 256), (7, 250), (8, 0), (9, 1000), (40, 3), (300, 100)];
    for (group, parts) in [(1, 0), (1, 1 << 20), (2, 700), (5, 1 << 20), (20, 5000)] {
        let work = work(WorkShape { group, kv_heads: 2, parts }, &rows);
        assert!(work.narrow.iter().all(|item| item.queries <= NARROW));
        assert!(work.wide.iter().all(|item| (NARROW + 1..=WIDE).contains(&item.queries)));
        for (row, &(tokens, start)) in (0..).zip(&rows) {
            for query in 0..tokens * group as u32 {
                let of = |item: &&Item| {
                    item.row == row && (item.first..item.first + item.queries).contains(&query)
                };
                let mut splits: Vec<u32> = items(&work).filter(of).map(|item| item.split).collect();
                splits.sort_unstable();
                let last = (start + query / group as u32) / 256;
                match work.merges.iter().find(of) {
                    None => assert_eq!(splits, [ALL_SPLITS], "row {row}, query {query}"),
                    // The tile's last query may see more splits (ranges of keys) than this query.
                    Some(_) => assert!(
                        splits.len() as u32 > last && splits.iter().zip(0..).all(|(a, b)| *a == b),
                        "row {row}, query {query}: {splits:?}"
                    ),
                }
            }
        }
    }
}

#[test]
fn partial_results_share_no_index_and_stay_within_their_room() {
    for parts in [0, 64, 1000, 1 << 20] {
        let rows: Vec<(u32, u32)> = (0..9).map(|i| (1 + i * 11 % 40, 300 * i)).collect();
        let work = work(WorkShape { group: 3, kv_heads: 4, parts }, &rows);
        let mut indexes: Vec<u32> = items(&work)
            .filter(|item| item.split != ALL_SPLITS)
            .flat_map(|item| item.part..item.part + item.queries)
            .collect();
        indexes.sort_unstable();
        assert!(indexes.iter().copied().eq(0..work.parts as u32), "{parts}");
        assert!(work.parts <= parts && (work.parts > 0) == (parts > 0), "{} of {parts}", work.parts);
        assert_eq!(work.words(), {
            let mut words = Vec::new();
            work.write(&mut words);
            words.len()
        });
    }
}

#[test]
fn splits_run_in_parallel_where_whole_tiles_would_not_fill_the_gpu() {
    let shape = WorkShape { group: 2, kv_heads: 8, parts: 1 << 20 };
    assert_eq!(work(shape, &[(1, 4000)]).narrow.len(), 16);
    // 64 rows and 8 kv heads are 512 blocks, which fill the GPU.
    let many = work(shape, &[(1, 4000); 64]);
    assert_eq!((many.narrow.len(), many.merges.len()), (64, 0));
    // One long row among 64 short ones is divided.
    let mut rows = vec![(1, 500); 64];
    rows.push((1, 100_000));
    let mixed = work(shape, &rows);
    assert_eq!((mixed.merges.len(), mixed.merges[0].row), (1, 64));
    // The tiles of a long prompt fill the GPU, so no tile is divided.
    assert!(work(shape, &[(2048, 0)]).merges.is_empty());
}
