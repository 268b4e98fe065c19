use super::*;

#[test]
fn tiles_cover_all_rows_in_order() {
    for largest in [3, 6, 12, 14] {
        for rows in 0..200 {
            let start = rows % 5;
            let tiling = Tiling::of((start, start + rows), largest);
            let mut next = start;
            for index in 0..tiling.tiles {
                let (first, count) = tiling.tile(index);
                assert_eq!(first, next, "{rows} rows, tile {index}");
                assert_eq!(tiling.end(index), first);
                assert!(HEIGHTS.contains(&count) && count <= largest, "{rows} rows: tile of {count}");
                assert!(
                    count > 1 || rows == 1 || largest == 3 && rows == 4,
                    "{rows} rows: a tile of one row"
                );
                next += count;
            }
            assert_eq!((next, tiling.end(tiling.tiles)), (start + rows, start + rows));
        }
    }
}
