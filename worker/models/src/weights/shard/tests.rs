use super::*;

fn group_rank(rank: usize, size: usize) -> GroupRank {
    GroupRank { rank, world_size: size }
}

#[test]
fn shares_cover_everything_once_or_are_shared_alike() {
    let shares = |units, size| (0..size).map(|rank| share(units, group_rank(rank, size))).collect::<Vec<_>>();
    assert_eq!(shares(6, 2), [0..3, 3..6]);
    assert_eq!(shares(2, 4), [0..1, 0..1, 1..2, 1..2]);
    assert_eq!(shares(1, 1), [0..1; 1]);
}

#[test]
fn the_bytes_and_the_runs_of_a_shard_are_the_same_elements() {
    // Four rows of six elements of two bytes. Each element holds its own index.
    let bytes: Vec<u8> = (0..24u16).flat_map(u16::to_le_bytes).collect();
    let whole = HostMatrix::new(&bytes, WeightType::F16, 4, 6);
    for (cut, rank, expected) in [
        (Cut::Rows(4), 1, (12..24).collect::<Vec<u16>>()),
        (Cut::Columns(3), 0, vec![0, 1, 6, 7, 12, 13, 18, 19]),
        (Cut::Columns(6), 1, vec![3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23]),
        (Cut::Replicated, 1, (0..24).collect()),
        (Cut::Leader, 1, vec![]),
    ] {
        // Three ranks for three units, else two ranks.
        let range = cut.shard_range(4, 6, group_rank(rank, if cut == Cut::Columns(3) { 3 } else { 2 }));
        let found = range.slice(whole);
        let found: Vec<u16> = found.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
        assert_eq!(found, expected, "{cut:?}");
        let runs: Vec<u16> = range.runs(6).flatten().map(|element| element as u16).collect();
        assert_eq!(runs, if range.rows.is_empty() { vec![] } else { expected }, "{cut:?}");
        assert_eq!(range.elements(), found.len());
    }
}
