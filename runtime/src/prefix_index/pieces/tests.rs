use super::*;

#[test]
fn pieces_grow_and_leave_little_over() {
    for (tokens, pieces) in
        [(0, 0), (15, 0), (16, 1), (512, 32), (512 + 31, 32), (512 + 32, 33), (55_000, 214)]
    {
        let prompt: Vec<u32> = (0..tokens).collect();
        let cut = PromptPieces::new(&prompt, CacheSalt::default(), 16);
        assert_eq!((cut.hashes.len(), cut.of(&prompt).count()), (pieces, pieces), "{tokens} tokens");
        let over = cut.needed() - cut.indexable();
        assert!(over <= 1 + cut.needed() / 32, "{over} blocks of {}", cut.needed());
        let again: Vec<u32> = cut.of(&prompt).flat_map(|piece| piece.tokens).copied().collect();
        assert!(prompt.starts_with(&again) && again.len() == cut.indexable() * 16);
    }
}

#[test]
fn prompts_that_begin_alike_have_the_same_pieces() {
    let long: Vec<u32> = (0..5000).collect();
    let (whole, begun) = (
        PromptPieces::new(&long, CacheSalt::default(), 16),
        PromptPieces::new(&long[..3000], CacheSalt::default(), 16),
    );
    assert_eq!(begun.hashes, whole.hashes[..begun.hashes.len()]);
    let mut other = long;
    other[0] += 1;
    let other = PromptPieces::new(&other, CacheSalt::default(), 16);
    assert!(other.hashes.iter().zip(&whole.hashes).all(|(a, b)| a != b));
}
