use super::*;

#[test]
fn a_forward_survives_the_journey() {
    let (one, two) = ([PageId(7)], [PageId(3), PageId(9)]);
    let inputs = StepInputs {
        token_ids: &[5, 6, 7],
        positions: [&[0.0, 16.0, 17.0]; 3],
        rows: &[
            RowInputs {
                first_token: 0,
                tokens: 1,
                start: 0,
                slot: SlotId::NULL,
                continues: false,
                block_table: &one,
            },
            RowInputs {
                first_token: 1,
                tokens: 2,
                start: 16,
                slot: SlotId::NULL,
                continues: false,
                block_table: &two,
            },
        ],
        copies: &[],
        logit_rows: &[0, 2],
    };
    let embeddings = [EmbeddedRows { first_token: 1, values: &[0.5, -2.0] }];
    Forward::new(forward(&inputs, &embeddings)).run(|arrived, embedded| {
        assert_eq!((arrived, embedded), (&inputs, &embeddings[..]));
    });
}
