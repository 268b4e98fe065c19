use super::*;

/// An item whose runs have these first tokens and ends.
fn item(runs: &[(usize, usize)], width: usize, first_value: usize) -> Item {
    let runs = runs.iter().map(|&(first, end)| first..end).collect();
    Item { runs, width, first_value, rule: Rule::Through(Kind::Line) }
}

#[test]
fn rows_are_the_same_wherever_a_prompt_is_cut() {
    let embeddings: Vec<f32> = (0..14).map(|value| value as f32).collect();
    let items = vec![item(&[(2, 5)], 2, 0), item(&[(5, 6)], 2, 6), item(&[(9, 12)], 2, 8)];
    let media = Media { items, embeddings };
    assert_eq!(media.values(), 14);
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

#[test]
fn rows_of_items_of_different_widths_are_not_mixed_up() {
    let items = vec![item(&[(1, 3)], 1, 0), item(&[(4, 6)], 3, 2)];
    let media = Media { items, embeddings: (0..8).map(|value| value as f32).collect() };
    let of = |positions: Range<usize>| -> Vec<(usize, usize, Vec<f32>)> {
        media.rows(&positions, 0).map(|rows| (rows.first_token, rows.width, rows.values.to_vec())).collect()
    };
    assert_eq!(of(0..7), [(1, 1, vec![0.0, 1.0]), (4, 3, vec![2.0, 3.0, 4.0, 5.0, 6.0, 7.0])]);
    assert_eq!(of(2..5), [(0, 1, vec![1.0]), (2, 3, vec![2.0, 3.0, 4.0])]);
    assert_eq!(of(5..6), [(0, 3, vec![5.0, 6.0, 7.0])]);
}

/// Two items take turns, and the second was encoded first.
#[test]
fn rows_of_several_runs_follow_their_items_and_not_the_prompt() {
    let items = vec![item(&[(0, 1), (3, 4)], 1, 2), item(&[(1, 2), (4, 5)], 1, 0)];
    let mut media = Media { items, embeddings: (0..4).map(|value| value as f32).collect() };
    let of = |positions: Range<usize>| -> Vec<(usize, f32)> {
        let mut rows: Vec<_> =
            media.rows(&positions, 0).map(|rows| (rows.first_token, rows.values[0])).collect();
        rows.sort_by_key(|(token, _)| *token);
        rows
    };
    assert_eq!(of(0..6), [(0, 2.0), (1, 0.0), (3, 3.0), (4, 1.0)]);
    assert_eq!(of(2..4), [(1, 3.0)]);
    assert!(!media.consume(4) && media.consume(5) && !media.consume(6));
}
