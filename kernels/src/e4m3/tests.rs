use super::{nearest, value};

#[test]
fn each_float_is_nearest_to_itself_and_ties_go_to_even() {
    for bits in (0..=255u8).filter(|bits| bits & 0x7f != 0x7f) {
        assert_eq!(nearest(value(bits)), bits);
    }
    for bits in 0..0x7eu8 {
        let between = (value(bits) + value(bits + 1)) / 2.0;
        assert_eq!(nearest(between), bits + (bits & 1), "{between}");
        assert_eq!(nearest(-between), 0x80 | (bits + (bits & 1)), "-{between}");
        assert_eq!(nearest(between.next_up()), bits + 1);
        assert_eq!(nearest(between.next_down()), bits);
    }
}

#[test]
fn numbers_beyond_the_largest_become_the_largest_and_nan_stays() {
    for large in [448.0, 448.1, 464.0, 480.0, 1e9, f32::MAX, f32::INFINITY] {
        assert_eq!([nearest(large), nearest(-large)], [0x7e, 0xfe], "{large}");
    }
    for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7fff_ffff), f32::from_bits(0xff80_0001)] {
        assert!(value(nearest(nan)).is_nan(), "{:#x}", nan.to_bits());
    }
    assert_eq!([nearest(1e-30), nearest(-0.0), nearest(f32::from_bits(1))], [0, 0x80, 0]);
}
