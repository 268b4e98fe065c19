use super::*;

fn shape(shapes: &str, tokens: usize, logit_rows: usize) -> Option<(usize, usize)> {
    let shapes: ChunkShapes = shapes.parse().unwrap_or_else(|why| panic!("{why}"));
    shape_of(Some(&shapes), tokens, logit_rows).map(|shape| (shape.tokens, shape.logit_rows))
}

#[test]
fn tokens_and_logit_rows_have_the_smallest_shape_that_has_room() {
    for (tokens, logit_rows, expected) in
        [(1, 1, (8, 8)), (8, 8, (8, 8)), (9, 1, (32, 8)), (32, 9, (32, 32)), (32, 0, (32, 0))]
    {
        assert_eq!(
            shape("8,32", tokens, logit_rows),
            Some(expected),
            "{tokens} tokens, {logit_rows} logit rows"
        );
    }
    assert_eq!(shape("8,32", 33, 1), None);
    assert_eq!(shape_of(None, 1, 1), None);
}
