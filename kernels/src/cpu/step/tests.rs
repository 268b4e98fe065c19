use super::*;
use crate::cpu::testing::no_planes;
use crate::{RowInputs, SlotCopy, SlotId};

fn check(rows: &[RowInputs<'_>], tokens: usize) -> Result<(), DeviceError> {
    let (mut step, ids, zeros) = (Step::default(), vec![0; tokens], vec![0.0; tokens]);
    let inputs = StepInputs {
        token_ids: &ids,
        positions: [&zeros[..]; 3],
        rows,
        copies: &[],
        logit_rows: &[],
        shape: None,
    };
    step.begin(&inputs, &no_planes())?;
    step.check_pages(16, 8)
}

#[test]
fn rows_that_break_the_contract_are_refused() {
    let table = |pages: &'static [u32]| -> Vec<PageId> { pages.iter().map(|&page| PageId(page)).collect() };
    let (one, two, outside, null) = (table(&[1]), table(&[2, 3]), table(&[9]), table(&[0, 0]));
    let row = |first_token, tokens, start, block_table| RowInputs {
        first_token,
        tokens,
        start,
        slot: SlotId::NULL,
        continues: false,
        block_table,
    };
    check(&[row(0, 4, 0, &one), row(4, 20, 0, &two)], 24).unwrap();
    // Two rows may read one page, which is a shared prefix, but may not write to it.
    let (left, right) = (table(&[1, 2]), table(&[1, 3]));
    check(&[row(0, 1, 16, &left), row(1, 1, 16, &right)], 2).unwrap();
    check(&[row(0, 4, 0, &null), row(4, 4, 0, &null)], 8).unwrap();
    let continues = RowInputs { continues: true, ..row(0, 1, 0, &one) };
    assert!(matches!(check(&[continues], 1), Err(DeviceError::Misuse(_))));
    for (what, rows, tokens) in [
        ("gap", vec![row(0, 4, 0, &one[..]), row(5, 1, 0, &two)], 6),
        ("empty row", vec![row(0, 0, 0, &one)], 0),
        ("uncovered", vec![row(0, 4, 0, &one)], 5),
        ("short table", vec![row(0, 4, 13, &one)], 4),
        ("page outside", vec![row(0, 4, 0, &outside)], 4),
        ("shared write", vec![row(0, 4, 0, &one), row(4, 4, 0, &one)], 8),
    ] {
        assert!(matches!(check(&rows, tokens), Err(DeviceError::Misuse(_))), "{what}");
    }
}

#[test]
fn inputs_of_other_lengths_and_copies_of_slots_are_refused() {
    let row = RowInputs {
        first_token: 0,
        tokens: 2,
        start: 0,
        slot: SlotId::NULL,
        continues: false,
        block_table: &[PageId(1)],
    };
    let (full, short) = ([0.0, 1.0], [0.0]);
    let (rows, copies) = ([row], [SlotCopy { from: SlotId::NULL, to: SlotId(1) }]);
    let good = StepInputs {
        token_ids: &[0, 1],
        positions: [&full[..]; 3],
        rows: &rows,
        copies: &[],
        logit_rows: &[1],
        shape: None,
    };
    Step::default().begin(&good, &no_planes()).unwrap();
    for axis in 0..3 {
        let mut positions = good.positions;
        positions[axis] = &short;
        let refused = Step::default().begin(&StepInputs { positions, ..good }, &no_planes());
        assert!(matches!(refused, Err(DeviceError::Misuse(_))), "axis {axis}");
    }
    let refused = Step::default().begin(&StepInputs { copies: &copies, ..good }, &no_planes());
    assert!(matches!(refused, Err(DeviceError::Misuse(_))));
}
