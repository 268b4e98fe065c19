use proptest::prelude::*;

use super::*;
use crate::test_support;

fn streamed(tokenizer: &Arc<Tokenizer>, ids: &[u32], special_tokens: SpecialTokens) -> (Vec<String>, String) {
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), special_tokens);
    let mut pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
    pieces.push(detokenizer.flush());
    let whole = pieces.concat();
    (pieces, whole)
}

#[test]
fn an_emoji_appears_whole_with_its_last_byte() {
    let tokenizer = test_support::tokenizer();
    let ids = tokenizer.encode("a🎻b", SpecialTokens::Exclude).unwrap();
    let (pieces, _) = streamed(&tokenizer, &ids, SpecialTokens::Exclude);
    assert_eq!(pieces, ["a", "", "", "", "🎻", "b", ""]);
}

#[test]
fn an_incomplete_character_is_flushed_as_a_replacement() {
    let tokenizer = test_support::tokenizer();
    let ids = tokenizer.encode("🎻", SpecialTokens::Exclude).unwrap();
    assert_eq!(streamed(&tokenizer, &ids[..3], SpecialTokens::Exclude).1, "\u{fffd}");
}

/// Regression test for a finding of `tests/fuzz stop`.
#[test]
fn tokens_without_text_do_not_push_out_the_start_of_the_text() {
    let tokenizer = test_support::metaspace_tokenizer();
    // Token 3, a space, has no text at the start of an output. The vocabulary has no token 999, and token 7 is empty.
    for none in [999, 7] {
        let ids = [&[3][..], &[none; 20], &[0]].concat();
        assert_eq!(streamed(&tokenizer, &ids, SpecialTokens::Exclude).1, " a");
        let ids = [&[none; 20][..], &ids].concat();
        let (_, whole) = streamed(&tokenizer, &ids, SpecialTokens::Exclude);
        assert_eq!(whole, tokenizer.decode(&ids, SpecialTokens::Exclude).unwrap());
    }
}

#[test]
fn tokens_without_text_do_not_pile_up() {
    let tokenizer = test_support::metaspace_tokenizer();
    let mut detokenizer = Detokenizer::new(tokenizer, SpecialTokens::Exclude);
    assert_eq!(detokenizer.push(0), "a");
    // The vocabulary has no token 999, and token 7 is empty.
    for id in [999, 7].repeat(500) {
        assert_eq!(detokenizer.push(id), "");
        let State::Window { tokens, .. } = &detokenizer.state else { panic!("a window") };
        assert!(tokens.len() <= 1 + MAX_HELD, "{}", tokens.len());
    }
    assert_eq!((detokenizer.push(1), detokenizer.flush()), (" b".into(), String::new()));
}

proptest! {
    #[test]
    fn pieces_add_up_to_the_whole_decode(
        ids in prop::collection::vec(0..test_support::VOCAB, 0..40),
        special_tokens in prop_oneof![Just(SpecialTokens::Include), Just(SpecialTokens::Exclude)],
    ) {
        let tokenizer = test_support::tokenizer();
        prop_assert_eq!(streamed(&tokenizer, &ids, special_tokens).1, tokenizer.decode(&ids, special_tokens).unwrap());
    }

    #[test]
    fn no_piece_of_valid_text_holds_half_a_character(text in "[a-c é日🎻]{0,20}") {
        let tokenizer = test_support::tokenizer();
        let ids = tokenizer.encode(&text, SpecialTokens::Exclude).unwrap();
        let (pieces, whole) = streamed(&tokenizer, &ids, SpecialTokens::Exclude);
        let broken = pieces.iter().any(|piece| piece.contains('\u{fffd}'));
        prop_assert!(!broken);
        prop_assert_eq!(whole, text);
    }

    #[test]
    fn bytes_to_fall_back_on_become_characters(text in "[a-c é日🎻]{0,12}") {
        let tokenizer = test_support::byte_fallback_tokenizer();
        let ids = tokenizer.encode(&text, SpecialTokens::Exclude).unwrap();
        let (pieces, whole) = streamed(&tokenizer, &ids, SpecialTokens::Exclude);
        let broken = pieces.iter().any(|piece| piece.contains('\u{fffd}'));
        prop_assert!(!broken);
        prop_assert_eq!(&whole, &tokenizer.decode(&ids, SpecialTokens::Exclude).unwrap());
        prop_assert_eq!(whole, text);
    }

    #[test]
    fn a_decoder_that_looks_at_neighbours_agrees_too(words in prop::collection::vec(0u32..6, 0..20)) {
        let tokenizer = test_support::metaspace_tokenizer();
        let (_, whole) = streamed(&tokenizer, &words, SpecialTokens::Exclude);
        prop_assert_eq!(whole, tokenizer.decode(&words, SpecialTokens::Exclude).unwrap());
    }
}
