use super::*;

#[test]
fn rows_that_fit_one_tile_are_one() {
    let limits = TileLimits { several: 12, single: 16 };
    for (start, rows) in (0..40).map(|rows| (rows % 3, rows)) {
        let (tiling, several) = (limits.divide((start, start + rows)), Tiling::of((start, start + rows), 12));
        if (1..=16).contains(&rows) {
            assert_eq!((tiling.tiles, tiling.tile(0), tiling.end(0)), (1, (start, rows), start));
            assert_eq!(tiling.end(1), start + rows);
        } else {
            assert_eq!(tiling.tiles, several.tiles);
            assert!((0..several.tiles).all(|index| tiling.tile(index) == several.tile(index)));
        }
    }
}

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
