use super::*;

/// A block of Exif with one entry, in either order of bytes.
pub(crate) fn block(orientation: u16, is_little: bool) -> Vec<u8> {
    let mut block =
        if is_little { b"II*\0\x08\0\0\0\x01\0".to_vec() } else { b"MM\0*\0\0\0\x08\0\x01".to_vec() };
    let short = |value: u16| if is_little { value.to_le_bytes() } else { value.to_be_bytes() };
    let long = |value: u32| if is_little { value.to_le_bytes() } else { value.to_be_bytes() };
    block.extend(short(TAG));
    block.extend(short(SHORT));
    block.extend(long(1));
    block.extend(short(orientation));
    block.extend([0; 6]);
    block
}

#[test]
fn the_orientation_is_read_in_both_orders_of_bytes() {
    for value in 1..=8 {
        for is_little in [true, false] {
            let block = block(value.into(), is_little);
            assert_eq!(Orientation::of_exif(&block), Orientation(value));
            assert_eq!(Orientation::of_exif(&[b"Exif\0\0", &block[..]].concat()), Orientation(value));
        }
    }
}

#[test]
fn a_block_that_cannot_be_read_has_no_orientation() {
    let good = block(6, true);
    for end in 0..good.len() - 6 {
        assert_eq!(Orientation::of_exif(&good[..end]), Orientation(1), "{end} bytes");
    }
    for wrong in [0, 9, 0x106] {
        assert_eq!(Orientation::of_exif(&block(wrong, false)), Orientation(1));
    }
    let mut far = good;
    far[4..8].copy_from_slice(&[0xff; 4]);
    assert_eq!(Orientation::of_exif(&far), Orientation(1));
}

/// The pixels of a picture of two lines and three columns, as letters.
fn shown(orientation: u8) -> (Pixels, String) {
    let pixels: Vec<u8> = b"abcdef".iter().flat_map(|letter| [*letter; CHANNELS]).collect();
    let orientation = Orientation(orientation);
    let moved = orientation.apply(&pixels, [2, 3]);
    (orientation.size([2, 3]), moved.iter().step_by(CHANNELS).map(|letter| char::from(*letter)).collect())
}

#[test]
fn each_orientation_moves_the_pixels_as_exif_says() {
    assert_eq!(shown(1), ([2, 3], "abcdef".into()));
    assert_eq!(shown(2), ([2, 3], "cbafed".into()));
    assert_eq!(shown(3), ([2, 3], "fedcba".into()));
    assert_eq!(shown(4), ([2, 3], "defabc".into()));
    assert_eq!(shown(5), ([3, 2], "adbecf".into()));
    assert_eq!(shown(6), ([3, 2], "daebfc".into()));
    assert_eq!(shown(7), ([3, 2], "fcebda".into()));
    assert_eq!(shown(8), ([3, 2], "cfbead".into()));
}
