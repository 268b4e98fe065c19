use super::*;

/// Returns the layout of a model with two paged planes and two slot planes. The second paged plane has one entry per 4
/// tokens.
fn layout(units: usize) -> PageLayout {
    let section = |units, unit_bytes| Section { units, unit_bytes };
    let pages = |ratio| PlaneStorage::Pages { ratio };
    let plane = |name: &str, storage, sections: &[Section]| PlaneLayout {
        name: name.into(),
        storage,
        sections: sections.to_vec(),
        format: "test".into(),
    };
    PageLayout {
        page_tokens: 16,
        planes: vec![
            plane("kv", pages(1), &[section(units, 2), section(2 * units, 3)]),
            plane("state", PlaneStorage::Slot, &[section(units, 5), section(1, 7)]),
            plane("compressed", pages(4), &[section(1, 3)]),
            plane("window", PlaneStorage::Slot, &[section(units, 1)]),
        ],
    }
}

#[test]
fn the_bytes_of_a_page_and_of_a_slot_are_sums_over_their_planes() {
    let layout = layout(4);
    assert_eq!(layout.page_bytes(), 4 * 2 + 8 * 3 + 3);
    assert_eq!(layout.slot_bytes(), 4 * 5 + 7 + 4);
    let group_rank = GroupRank { rank: 1, world_size: 2 };
    assert_eq!(layout.share_bytes(UnitKind::Pages, group_rank), 2 * 2 + 4 * 3 + 3);
    assert_eq!(layout.share_bytes(UnitKind::Slot, group_rank), 2 * 5 + 7 + 2);
    assert_eq!((PageLayout::default().page_bytes(), PageLayout::default().slot_bytes()), (0, 0));
}

#[test]
fn what_is_cut_for_any_number_of_ranks_is_whole_when_joined() {
    for (units, ranks) in [(4, 1), (4, 2), (4, 4), (2, 4), (1, 4)] {
        let layout = layout(units);
        for part in [UnitKind::Pages, UnitKind::Slot] {
            let whole: Vec<u8> = (0..3 * layout.bytes(part)).map(|byte| byte as u8).collect();
            let mut shares = Vec::new();
            for rank in 0..ranks {
                let (group_rank, before) = (GroupRank { rank, world_size: ranks }, shares.len());
                layout.cut(part, &whole, group_rank, &mut shares);
                assert_eq!(shares.len() - before, 3 * layout.share_bytes(part, group_rank));
            }
            let mut joined = vec![99];
            layout.join(part, &shares, ranks, &mut joined);
            assert_eq!(joined[1..], whole, "{units} units, {ranks} ranks, {part:?}");
        }
    }
}

#[test]
fn a_rank_holds_the_units_of_its_heads() {
    let layout = layout(2);
    let whole: Vec<u8> = (0..layout.slot_bytes() as u8).collect();
    let mut share = Vec::new();
    layout.cut(UnitKind::Slot, &whole, GroupRank { rank: 1, world_size: 2 }, &mut share);
    // The second of two units of 5 bytes, the only unit of 7 bytes, and the second of two units of 1 byte.
    assert_eq!(share, [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18]);
}

#[test]
fn layouts_that_differ_in_anything_have_other_ids() {
    let one = layout(4);
    let with = |change: fn(&mut PageLayout)| {
        let mut other = one.clone();
        change(&mut other);
        other
    };
    for other in [
        with(|other| other.page_tokens = 8),
        with(|other| other.planes[0].name = "kw".into()),
        with(|other| other.planes[0].format = "other".into()),
        with(|other| other.planes[0].sections[0].units = 2),
        with(|other| other.planes[0].sections[1].unit_bytes = 4),
        with(|other| other.planes[2].storage = PlaneStorage::Pages { ratio: 16 }),
        with(|other| other.planes[2].storage = PlaneStorage::Slot),
        with(|other| other.planes.swap(1, 3)),
        with(|other| drop(other.planes.pop())),
        with(|other| {
            let section = other.planes[0].sections.remove(0);
            other.planes[3].sections.push(section);
        }),
    ] {
        assert_ne!(one.id(), other.id(), "{other:?}");
    }
    assert_eq!(one.id(), one.clone().id());
}

#[test]
fn the_id_of_a_layout_is_the_same_in_every_build() {
    assert_eq!(PageLayout::default().id(), 0x88201fb960ff6465);
}
