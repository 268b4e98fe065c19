use super::*;

#[test]
fn each_bit_of_units_and_of_their_place_counts() {
    let bytes: Vec<u8> = (0..=255).collect();
    let right = of_units(0, 3, 4, &bytes);
    assert_eq!(right, of_units(0, 3, 4, &bytes));
    for (kind, first, count) in [(1, 3, 4), (0, 2, 4), (0, 3, 5), (0, 4, 3)] {
        assert_ne!(right, of_units(kind, first, count, &bytes));
    }
    for bit in 0..8 * bytes.len() {
        let mut other = bytes.clone();
        other[bit / 8] ^= 1 << (bit % 8);
        assert_ne!(right, of_units(0, 3, 4, &other), "bit {bit}");
    }
}

#[test]
fn each_field_of_a_hand_over_counts() {
    let first = Some(pb::SampledToken { token_id: 9, index: 2, logprob: None });
    let right = pb::HandOver { first, computed_tokens: 70, counts: vec![5, 1], checksum: 0 }.sealed();
    assert!(right.is_sound() && right.clone().sealed() == right);
    let other = pb::SampledToken { token_id: 8, index: 2, logprob: None };
    for wrong in [
        pb::HandOver { first: Some(other), ..right.clone() },
        pb::HandOver { first: None, ..right.clone() },
        pb::HandOver { computed_tokens: 71, ..right.clone() },
        pb::HandOver { counts: vec![5], ..right.clone() },
        pb::HandOver { checksum: 0, ..right.clone() },
    ] {
        assert!(!wrong.is_sound(), "{wrong:?}");
    }
}
