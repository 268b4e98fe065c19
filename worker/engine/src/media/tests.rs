use super::*;

#[test]
fn rows_are_the_same_wherever_a_prompt_is_cut() {
    let ranges = vec![2..5, 5..6, 9..12];
    let embeddings: Vec<f32> = (0..14).map(|value| value as f32).collect();
    let media = Media { ranges, width: 2, embeddings };
    assert_eq!(media.tokens(), 7);
    let of = |positions: Range<usize>| -> Vec<(usize, f32)> {
        let start = positions.start;
        let rows = media.rows(&positions, 100).flat_map(|rows| {
            let tokens = (rows.first_token..).flat_map(|token| [token, token]);
            tokens.zip(rows.values.to_vec()).collect::<Vec<_>>()
        });
        rows.map(|(token, value)| (token - 100 + start, value)).collect()
    };
    let whole = of(0..14);
    assert_eq!(whole.len(), 14);
    assert_eq!(whole.iter().map(|(_, value)| *value).collect::<Vec<_>>(), media.embeddings);
    for cut in 0..14 {
        assert_eq!([of(0..cut), of(cut..14)].concat(), whole, "cut at {cut}");
    }
    assert!(of(6..9).is_empty() && of(0..2).is_empty());
}
