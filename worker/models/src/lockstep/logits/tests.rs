use prost::Message;

use super::*;

const WORDS: usize = 4748;
const VOCABULARY: usize = 151_936;

fn nominated(row: usize, mask: &TokenMask) -> (usize, Nomination) {
    let adjustments = Adjustments {
        allowed: Some(mask.clone()),
        bias: vec![(3, -1.0)],
        forbidden: vec![2],
        repetition_penalty: 1.0,
        ..Default::default()
    };
    (row, Nomination { count: 1, temperature: 0.0, adjustments: Some(adjustments) })
}

fn plan(masks: &[&TokenMask]) -> pb::LogitsPlan {
    let rows: Vec<usize> = (0..masks.len()).collect();
    let nominated = rows.iter().map(|&row| nominated(row, masks[row])).collect();
    encode(WantedRows { rows, likeliest: vec![], nominated })
}

#[test]
fn masks_survive_the_journey_in_every_form() {
    let few = TokenMask::of_tokens(WORDS, [0, 31, 32, 151_935]);
    let most = TokenMask::new(few.words().iter().map(|word| !word).collect::<Vec<_>>());
    let half = TokenMask::new(vec![0x5555_5555; WORDS]);
    let none = TokenMask::new(vec![0; WORDS]);
    let masks = [&few, &most, &half, &none];
    let message = plan(&masks);
    let decoded = decode(message, VOCABULARY).unwrap();
    for (mask, (_, nomination)) in masks.iter().zip(decoded.nominated) {
        assert_eq!(nomination.adjustments.unwrap().allowed.as_ref(), Some(*mask));
    }
}

#[test]
fn a_mask_is_sent_once_and_short() {
    let few = TokenMask::of_tokens(WORDS, [7, 9]);
    let most = TokenMask::new(few.words().iter().map(|word| !word).collect::<Vec<_>>());
    let half = TokenMask::new(vec![0x5555_5555; WORDS]);
    for (mask, most_bytes) in [(&few, 100), (&most, 100), (&half, WORDS * 4 + 100)] {
        let message = plan(&[mask, &mask.clone(), mask]);
        assert_eq!(message.masks.len(), 1);
        let bytes = message.encoded_len();
        assert!(bytes <= most_bytes, "{bytes} bytes");
    }
}

#[test]
fn what_is_no_mask_is_refused() {
    let refused = |change: &dyn Fn(&mut pb::LogitsPlan)| {
        let mut message = plan(&[&TokenMask::of_tokens(2, [1])]);
        change(&mut message);
        decode(message, 64).unwrap_err()
    };
    assert_eq!(refused(&|plan| plan.masks.clear()), "mask 0 of 0");
    for words in [1, 3] {
        let other = TokenMask::new(vec![1; words]);
        assert_eq!(
            refused(&|plan| plan.masks = self::plan(&[&other]).masks),
            format!("a mask of {words} words for a vocabulary of 64")
        );
    }
    assert_eq!(refused(&|plan| plan.masks[0].form = None), "a mask of no known form");
    assert_eq!(refused(&|plan| plan.masks[0].words = 0), "token 1 of a mask of 0 words");
    assert_eq!(
        refused(&|plan| plan.masks[0].words = u32::MAX),
        "a mask of 4294967295 words, but a mask has at most 1048576"
    );
    let bits = pb::token_mask::Form::Bits(pb::MaskBits { words: vec![1] });
    assert_eq!(refused(&|plan| plan.masks[0].form = Some(bits.clone())), "1 words of a mask of 2");
}
