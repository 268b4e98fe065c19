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

/// Returns the elements of a rank's windows. In the tensor, each 16-bit element holds its own index.
fn elements(dims: Dims, cut: Cut, group_rank: GroupRank) -> Vec<u16> {
    let count = dims.matrices * dims.matrix_elements();
    let bytes: Vec<u8> = (0..count as u16).flat_map(u16::to_le_bytes).collect();
    let range = cut.shard_range(dims, group_rank);
    let rows = |window: Window| {
        let view = window.view(&bytes, WeightType::F16);
        let row =
            |row| view.row(row).as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect::<Vec<_>>();
        (0..view.rows).flat_map(row).collect::<Vec<_>>()
    };
    let found: Vec<u16> = range.all_windows().flat_map(rows).collect();
    assert_eq!(range.elements(), found.len());
    assert_eq!(range.all_windows().map(|window| window.elements()).sum::<usize>(), found.len());
    found
}

const MATRIX: Dims = Dims { matrices: 1, rows: 4, columns: 6, parts: 1, transposed: false };

#[test]
fn a_matrix_is_cut_by_rows_or_columns() {
    for (cut, rank, expected) in [
        (Cut::Rows(4), 1, (12..24).collect::<Vec<u16>>()),
        (Cut::Columns(3), 0, vec![0, 1, 6, 7, 12, 13, 18, 19]),
        (Cut::Columns(6), 1, vec![3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23]),
        (Cut::Replicated, 1, (0..24).collect()),
        (Cut::Leader, 1, vec![]),
    ] {
        // A cut into three units is divided among three ranks, any other cut among two.
        let group_rank = group_rank(rank, if cut == Cut::Columns(3) { 3 } else { 2 });
        assert_eq!(elements(MATRIX, cut, group_rank), expected, "{cut:?}");
    }
}

#[test]
fn sections_and_parts_of_heads_are_cut_by_their_units() {
    // q and k have two heads of one row each. v has two heads of two rows each.
    let matrix = Dims { rows: 8, columns: 1, ..MATRIX };
    let (of_keys, of_values) = (Section { rows: 2, units: 2 }, Section { rows: 4, units: 2 });
    let qkv = Cut::Sections([of_keys, of_keys, of_values]);
    assert_eq!(elements(matrix, qkv, group_rank(0, 1)), (0..8).collect::<Vec<u16>>());
    assert_eq!(elements(matrix, qkv, group_rank(0, 2)), [0, 2, 4, 5]);
    assert_eq!(elements(matrix, qkv, group_rank(1, 2)), [1, 3, 6, 7]);
    // v has four heads. q and k have one head, which all ranks hold.
    let shared = Section { rows: 2, units: 1 };
    let qkv = Cut::Sections([shared, shared, Section { rows: 4, units: 4 }]);
    assert_eq!(elements(matrix, qkv, group_rank(2, 4)), [0, 1, 2, 3, 6]);
    // Two heads. Each head has two rows of queries and two rows of gates.
    let half = |part| Cut::PartOfRows { units: 2, parts: 2, part };
    assert_eq!(elements(matrix, half(0), group_rank(0, 1)), [0, 1, 4, 5]);
    assert_eq!(elements(matrix, half(1), group_rank(0, 1)), [2, 3, 6, 7]);
    assert_eq!(elements(matrix, half(1), group_rank(1, 2)), [6, 7]);
}

#[test]
fn experts_are_divided_whole_or_each_by_its_intermediate_width() {
    // Two experts. Each has gate and up, of two rows and three columns each: 12 elements per expert.
    let gate_up = Dims { matrices: 2, rows: 4, columns: 3, parts: 2, transposed: false };
    let of = |cut, rank| elements(gate_up, cut, group_rank(rank, 2));
    assert_eq!(of(Cut::Matrices, 1), (12..24).collect::<Vec<u16>>());
    // Rank 1 holds the second row of gate and the second row of up, of both experts.
    assert_eq!(of(Cut::Rows(2), 1), [3, 4, 5, 9, 10, 11, 15, 16, 17, 21, 22, 23]);
    // Down has three outputs and two inputs. Rank 1 holds the second input of both experts.
    let down = Dims { matrices: 2, rows: 3, columns: 2, parts: 1, transposed: false };
    assert_eq!(elements(down, Cut::Columns(2), group_rank(1, 2)), [1, 3, 5, 7, 9, 11]);
    // Four ranks and two experts: neighbouring ranks hold the same expert.
    assert_eq!(elements(down, Cut::Matrices, group_rank(1, 4)), (0..6).collect::<Vec<u16>>());
}

#[test]
fn a_transposed_matrix_is_cut_by_its_outputs_where_they_are_stored() {
    // Stored as two rows (inputs) of four columns (outputs).
    let dims = Dims { matrices: 2, rows: 4, columns: 2, parts: 1, transposed: true };
    let of = |cut, rank| elements(dims, cut, group_rank(rank, 2));
    assert_eq!(of(Cut::Rows(4), 1), [2, 3, 6, 7, 10, 11, 14, 15]);
    assert_eq!(of(Cut::Columns(2), 1), [4, 5, 6, 7, 12, 13, 14, 15]);
}
