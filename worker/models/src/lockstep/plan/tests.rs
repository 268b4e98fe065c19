use super::*;

fn pages(ids: impl IntoIterator<Item = u32>) -> Vec<PageId> {
    ids.into_iter().map(PageId).collect()
}

fn row(first_token: usize, tokens: usize, start: usize, slot: u32, block_table: &[PageId]) -> RowInputs<'_> {
    RowInputs { first_token, tokens, start, slot: SlotId(slot), continues: false, block_table }
}

fn inputs<'a>(positions: &'a [f32], rows: &'a [RowInputs<'a>]) -> StepInputs<'a> {
    StepInputs {
        token_ids: &[5, 6, 7][..positions.len()],
        positions: [positions; 3],
        rows,
        copies: &[],
        logit_rows: &[],
        shape: None,
    }
}

/// The tables of the leader and of a follower of a group whose planes have 8 pages and 4 slots.
struct Ends {
    leader: Tables,
    follower: Tables,
    plan: pb::ForwardPlan,
}

impl Ends {
    fn new() -> Self {
        let tables = || Tables::new(8, 4).unwrap();
        Self { leader: tables(), follower: tables(), plan: pb::ForwardPlan::default() }
    }

    /// Encodes and decodes a forward pass. Returns the number of pages in the message.
    fn send(&mut self, inputs: &StepInputs<'_>, embeddings: &[EmbeddedRows<'_>]) -> usize {
        encode(inputs, embeddings, &mut self.leader, &mut self.plan).unwrap();
        decode(&self.plan, &mut self.follower, |arrived, embedded| {
            assert_eq!((arrived, embedded), (inputs, embeddings));
        })
        .unwrap();
        self.plan.pages.len()
    }
}

#[test]
fn a_forward_survives_the_journey() {
    let (one, two) = (pages([7]), pages([3, 5]));
    let mut rows = [row(0, 1, 0, 0, &one), row(1, 2, 16, 2, &two)];
    rows[1].continues = true;
    let inputs = StepInputs {
        token_ids: &[5, 6, 7],
        positions: [&[0.0, 16.0, 17.0], &[0.0, 16.0, 16.0], &[0.0, 16.0, 20.0]],
        rows: &rows,
        copies: &[
            SlotCopy { from: SlotId(1), to: SlotId(3) },
            SlotCopy { from: SlotId::NULL, to: SlotId(2) },
        ],
        logit_rows: &[0, 2],
        shape: Some(StepShape { tokens: 8, logit_rows: 4 }),
    };
    let embeddings = [EmbeddedRows { first_token: 1, width: 2, values: &[0.5, -2.0] }];
    let mut ends = Ends::new();
    assert_eq!(ends.send(&inputs, &embeddings), 3);
    // The follower already knows the pages of the second row. The message holds only the page of the row without a
    // slot.
    assert_eq!(ends.send(&inputs, &embeddings), 1);
    assert_eq!(ends.plan.positions.len(), 9);
}

#[test]
fn positions_that_are_the_same_on_all_axes_are_sent_once() {
    let (table, mut ends) = (pages([1]), Ends::new());
    ends.send(&inputs(&[4.0, 5.0], &[row(0, 2, 4, 1, &table)]), &[]);
    assert_eq!(ends.plan.positions, [4.0, 5.0]);
}

#[test]
fn only_the_pages_that_a_table_gains_are_sent() {
    let mut ends = Ends::new();
    for (table, sent) in [
        (pages([1, 2, 3]), 3),
        (pages([1, 2, 3]), 0),
        (pages([1, 2, 3, 4]), 1),
        // Another request gets the slot. It shares the first two pages.
        (pages([1, 2, 6]), 1),
        (pages([7]), 1),
        (pages([7, 2, 6, 4]), 3),
        // The table becomes shorter, and then longer.
        (pages([7, 2]), 0),
        (pages([7, 2, 6]), 1),
    ] {
        assert_eq!(ends.send(&inputs(&[0.0], &[row(0, 1, 0, 3, &table)]), &[]), sent, "{table:?}");
    }
}

#[test]
fn inputs_that_cannot_be_sent_are_refused_and_change_no_table() {
    let (table, long, mut ends) = (pages([1, 2]), pages(1..10), Ends::new());
    ends.send(&inputs(&[0.0], &[row(0, 1, 0, 1, &table)]), &[]);
    let other = pages([3]);
    let good = row(0, 1, 0, 1, &other);
    let copies = [SlotCopy { from: SlotId(1), to: SlotId(4) }];
    for (bad, why) in [
        (inputs(&[0.0, 1.0], &[good, row(1, 1, 0, 1, &table)]), "two rows have slot 1"),
        (inputs(&[0.0, 1.0], &[good, row(1, 1, 0, 4, &table)]), "slot 4, but there are 4"),
        (inputs(&[0.0, 1.0], &[good, row(1, 1, 0, 2, &long)]), "9 pages, but a plane has 8"),
        (inputs(&[0.0, 1.0], &[good, row(2, 1, 0, 2, &table)]), "begins at token 2"),
        (inputs(&[0.0, 1.0], &[good]), "rows cover 1 of 2 tokens"),
        (StepInputs { positions: [&[0.0]; 3], ..inputs(&[0.0, 1.0], &[good]) }, "1 positions for 2 tokens"),
        (StepInputs { copies: &copies, ..inputs(&[0.0], &[good]) }, "slot 4, but there are 4"),
    ] {
        let refused = encode(&bad, &[], &mut ends.leader, &mut ends.plan).unwrap_err();
        assert!(refused.contains(why), "{refused}");
    }
    assert_eq!(ends.send(&inputs(&[0.0], &[row(0, 1, 0, 1, &table)]), &[]), 0, "the tables are as they were");
}

#[test]
fn a_message_that_no_leader_sends_is_refused() {
    let sound = || {
        let (one, two, mut ends) = (pages([1]), pages([2, 3]), Ends::new());
        ends.send(&inputs(&[0.0, 1.0, 2.0], &[row(0, 1, 0, 1, &one), row(1, 2, 0, 2, &two)]), &[]);
        ends.plan
    };
    let refused = |change: &dyn Fn(&mut pb::ForwardPlan)| {
        let (mut plan, mut tables) = (sound(), Tables::new(8, 4).unwrap());
        change(&mut plan);
        decode(&plan, &mut tables, |_, _| ()).unwrap_err()
    };
    type Change = dyn Fn(&mut pb::ForwardPlan);
    let cases: [(&str, &Change); 17] = [
        ("1 starts for 2 rows", &|plan| plan.row_starts.truncate(1)),
        ("3 slots for 2 rows", &|plan| plan.row_slots.push(0)),
        ("0 kept pages for 2 rows", &|plan| plan.row_pages_kept.clear()),
        ("1 pages for 2 rows", &|plan| plan.row_pages.truncate(1)),
        ("row 1 has 2 new pages, but 1 are left", &|plan| plan.pages.truncate(2)),
        ("1 pages of no row", &|plan| plan.pages.push(4)),
        ("row 0 has 4294967295 new pages", &|plan| plan.row_pages[0] = u32::MAX),
        ("4294967296 pages, but a plane has 8", &|plan| plan.row_pages_kept[0] = u32::MAX),
        ("slot 1 keeps 1 pages of 0", &|plan| plan.row_pages_kept[0] = 1),
        ("a row without a slot keeps pages", &|plan| {
            plan.row_slots[0] = 0;
            plan.row_pages_kept[0] = 1;
        }),
        ("slot 4294967295, but there are 4", &|plan| plan.row_slots[0] = u32::MAX),
        ("two rows have slot 2", &|plan| plan.row_slots[0] = 2),
        ("rows cover 4294967297 of 3 tokens", &|plan| plan.row_tokens[0] = u32::MAX),
        ("rows cover 3 of 2 tokens", &|plan| plan.token_ids.truncate(2)),
        ("4 positions for 3 tokens", &|plan| plan.positions.push(0.0)),
        ("row 2 continues", &|plan| plan.continued_rows.push(2)),
        ("slot 9, but there are 4", &|plan| plan.copies.push(pb::SlotCopy { from: 0, to: 9 })),
    ];
    for (why, change) in cases {
        let refused = refused(change);
        assert!(refused.contains(why), "{refused}, wanted {why}");
    }
    assert!(Tables::new(8, usize::MAX).unwrap_err().contains("at most"));
}
