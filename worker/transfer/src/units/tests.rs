use crate::{PlaneLayout, PlaneStorage, Section};

use super::*;

fn layout(slot_bytes: &[usize]) -> UnitLayout {
    let plane = |name: &str, storage, unit_bytes| PlaneLayout {
        name: name.into(),
        storage,
        sections: vec![Section { units: 2, unit_bytes }],
        format: "test".into(),
    };
    let mut planes = vec![plane("kv", PlaneStorage::Pages { ratio: 1 }, 8)];
    planes.extend(
        slot_bytes
            .iter()
            .enumerate()
            .map(|(index, bytes)| plane(&format!("state{index}"), PlaneStorage::Slot, *bytes)),
    );
    UnitLayout::of_pages(&PageLayout { page_tokens: 16, planes }, GroupRank::ALONE)
}

#[test]
fn a_slot_is_one_unit_behind_the_pages() {
    let without = layout(&[]);
    assert_eq!((without.counts(3), without.bytes(3), without.kind_of(1)), (vec![3], 48, None));
    let with = layout(&[5, 7]);
    assert_eq!((with.counts(3), with.bytes(3)), (vec![3, 1], 48 + 24));
    assert_eq!((with.kind_of(0), with.kind_of(1)), (Some(UnitKind::Pages), Some(UnitKind::Slot)));
    assert_eq!(with.kind_of(2), None);
    assert_eq!((with.offset_of(UnitKind::Pages, 2, 3), with.offset_of(UnitKind::Slot, 0, 3)), (32, 48));
    assert_eq!((with.largest_unit(), with.bytes_of(UnitKind::Slot)), (24, 24));
}

#[test]
fn a_plane_that_is_missing_or_has_another_size_is_named() {
    let difference = |ours: &[usize], theirs: &[usize]| layout(ours).difference(&layout(theirs).planes);
    assert_eq!(difference(&[5, 7], &[5, 7]), None);
    assert_eq!(difference(&[5, 7], &[5]).unwrap(), "the sender lacks plane \"state1\"");
    assert_eq!(difference(&[], &[5]).unwrap(), "there is no plane \"state0\" here");
    let size = "plane \"state0\" has units of 12 bytes at the sender, of 10 here";
    assert_eq!(difference(&[5], &[6]).unwrap(), size);
}

#[test]
fn embeddings_of_other_widths_have_other_layouts() {
    let (one, other) = (UnitLayout::of_embeddings(8), UnitLayout::of_embeddings(16));
    assert_ne!(one.id, other.id);
    assert_eq!((one.counts(3), one.bytes(3), one.kind_of(1)), (vec![3], 96, None));
}
