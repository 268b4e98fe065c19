use super::*;

fn layout(units: usize) -> PageLayout {
    PageLayout { sections: 3, units, unit_bytes: 2, page_tokens: 16, format: "test".into() }
}

#[test]
fn what_is_cut_for_any_number_of_ranks_is_whole_when_joined() {
    for (units, ranks) in [(4, 1), (4, 2), (4, 4), (2, 4), (1, 4)] {
        let layout = layout(units);
        let pages: Vec<u8> = (0..2 * layout.page_bytes() as u8).collect();
        let share = |rank| {
            let units = layout.units_of(GroupRank { rank, world_size: ranks });
            layout.cut(&pages, units).flatten().copied().collect::<Vec<u8>>()
        };
        let shares: Vec<u8> = (0..ranks).flat_map(share).collect();
        let mut joined = vec![99];
        layout.join(&shares, ranks, &mut joined);
        assert_eq!(joined[1..], pages, "{units} units, {ranks} ranks");
    }
}

#[test]
fn layouts_that_differ_in_anything_have_other_ids() {
    let one = layout(4);
    for other in [
        PageLayout { sections: 2, ..one.clone() },
        PageLayout { units: 2, ..one.clone() },
        PageLayout { unit_bytes: 4, ..one.clone() },
        PageLayout { page_tokens: 8, ..one.clone() },
        PageLayout { format: "other".into(), ..one.clone() },
    ] {
        assert_ne!(one.id(), other.id());
    }
    assert_eq!(one.id(), one.clone().id());
}
