use super::{ONE, Record, RowResult};

#[test]
fn a_record_gives_the_logprob_of_its_sum() {
    // Two equal logits: each has half of the probability.
    let words = [7u32, 0, 1.5f32.to_bits(), 1.5f32.to_bits(), 0, 1 << 13, 1, 1];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let record = RowResult::of_bytes(&bytes);
    assert_eq!(record.sum as f64, 2.0 * ONE);
    let top: Vec<u8> = [9u32, 1.5f32.to_bits()].iter().flat_map(|word| word.to_ne_bytes()).collect();
    let score = record.score(&top);
    assert_eq!((score.rank, score.top.len(), score.top[0].0), (1, 1, 9));
    assert!((score.logprob - 0.5f32.ln()).abs() < 1e-6 && score.top[0].1 == score.logprob);
}
