use super::*;

#[test]
fn only_pages_behind_all_computed_positions_are_poisoned() {
    let pages: Vec<PageId> = (1..=4).map(PageId).collect();
    for (positions, expected) in [
        (0..1, 0..1),
        (0..16, 0..1),
        (0..17, 0..2),
        (16..17, 1..2),
        // The first page holds earlier positions of the request.
        (1..16, 0..0),
        (1..17, 1..2),
        (17..18, 0..0),
        (40..64, 3..4),
        // An encoder's row has no pages.
        (64..80, 0..0),
    ] {
        assert_eq!(unwritten(&positions, &pages, 16), &pages[expected], "{positions:?}");
    }
    assert!(unwritten(&(0..16), &[], 16).is_empty());
}

#[test]
fn a_slot_that_a_copy_reads_keeps_its_state() {
    let copy = |from, to| SlotCopy { from: SlotId(from), to: SlotId(to) };
    let found: Vec<_> = destinations(&[copy(1, 5), copy(0, 2), copy(3, 1)]).collect();
    assert_eq!(found, [SlotId(5), SlotId(2)]);
}

#[test]
fn poison_is_not_a_number_in_any_format() {
    assert!(f32::from_ne_bytes([BYTE; 4]).is_nan());
    // A float is NaN if all bits of its exponent are ones and its mantissa is not zero. The first line checks this for
    // bfloat16, the second for f16.
    let bits = u16::from_ne_bytes([BYTE; 2]);
    assert!(bits & 0x7f80 == 0x7f80 && bits & 0x007f != 0);
    assert!(bits & 0x7c00 == 0x7c00 && bits & 0x03ff != 0);
    assert!(tutti_kernels::e4m3::value(BYTE).is_nan());
}
