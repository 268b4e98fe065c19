use super::*;

/// The memory of steps is final after a step of one row, because pages get the rest.
#[test]
fn sums_of_splits_of_fewer_rows_have_room() {
    for (outputs, inputs) in [(8, 1096), (72, 203), (72, 1096), (600, 4096), (4096, 12_288), (40_000, 1024)] {
        for enough in [None, Some(0), Some(1), Some(2), Some(9), Some(700)] {
            for capacity in [1, 15, 16, 17, 64, 65, 200, 513, 2048] {
                let bytes = |rows: usize| match Blocks::of(rows, [outputs, inputs], enough).splits {
                    1 => 0,
                    splits => splits * rows * outputs * size_of::<f32>(),
                };
                let most = (1..=capacity).map(bytes).max().unwrap();
                let room = most_part_bytes(capacity, [outputs, inputs], enough);
                assert_eq!(room, most, "{outputs} x {inputs}, {enough:?}, {capacity} rows");
            }
        }
    }
}
