use proptest::prelude::*;

use super::*;
use crate::test_support;

fn streamed(tokenizer: &Arc<Tokenizer>, ids: &[u32], special_tokens: SpecialTokens) -> (Vec<String>, String) {
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), special_tokens);
    let mut pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id).text).collect();
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
    assert_eq!(detokenizer.push(0).text, "a");
    // The vocabulary has no token 999, and token 7 is empty.
    for id in [999, 7].repeat(500) {
        assert_eq!(detokenizer.push(id).text, "");
        let State::Window { tokens, .. } = &detokenizer.state else { panic!("a window") };
        assert!(tokens.len() <= 1 + MAX_HELD, "{}", tokens.len());
    }
    assert_eq!((detokenizer.push(1).text, detokenizer.flush()), (" b".into(), String::new()));
}

/// The text of an output behind a prompt, and the offset of each of its tokens.
fn continued(
    tokenizer: &Arc<Tokenizer>,
    ids: &[u32],
    prompt: usize,
    unfinished: Unfinished,
) -> (String, Vec<usize>) {
    let tokenizer = tokenizer.clone();
    let mut detokenizer = Detokenizer::after(&ids[..prompt], tokenizer, SpecialTokens::Include, unfinished);
    let (mut text, mut offsets) = (String::new(), Vec::new());
    for &id in &ids[prompt..] {
        let piece = detokenizer.push(id);
        offsets.push(text.chars().count() + piece.earlier);
        text.push_str(&piece.text);
    }
    (text + &detokenizer.flush(), offsets)
}

#[test]
fn the_first_word_of_an_output_keeps_its_space() {
    let tokenizer = test_support::byte_fallback_tokenizer();
    let ids = tokenizer.encode("a a", SpecialTokens::Exclude).unwrap();
    assert_eq!(ids, [259, 259]);
    assert_eq!(continued(&tokenizer, &ids, 1, Unfinished::Hidden).0, " a");
    let tokenizer = test_support::metaspace_tokenizer();
    assert_eq!(continued(&tokenizer, &[0, 1, 2], 1, Unfinished::Hidden).0, " bc");
}

#[test]
fn a_character_of_prompt_and_output_is_completed_and_broken_ones_have_offsets() {
    let tokenizer = test_support::tokenizer();
    let ids: Vec<u32> = "a🎻b".bytes().map(u32::from).collect();
    for unfinished in [Unfinished::Hidden, Unfinished::Shown] {
        assert_eq!(continued(&tokenizer, &ids, 3, unfinished), ("🎻b".into(), vec![0, 0, 1]));
    }
    let broken = [&ids[..3], &[98, 240, 99]].concat();
    assert_eq!(continued(&tokenizer, &broken, 3, Unfinished::Hidden), ("b\u{fffd}c".into(), vec![0, 1, 2]));
    assert_eq!(
        continued(&tokenizer, &broken, 3, Unfinished::Shown),
        ("\u{fffd}b\u{fffd}c".into(), vec![1, 2, 3])
    );
    assert_eq!(continued(&tokenizer, &ids[..3], 3, Unfinished::Hidden).0, "");
    assert_eq!(continued(&tokenizer, &ids[..3], 3, Unfinished::Shown).0, "\u{fffd}");
    let tokenizer = test_support::byte_fallback_tokenizer();
    // An incomplete character of byte tokens, and the letter b.
    assert_eq!(
        continued(&tokenizer, &[257, 0xc3, 258], 1, Unfinished::Hidden),
        ("\u{fffd}b".into(), vec![0, 1])
    );
}

/// The expected values are those of the output's tokens decoded alone.
#[test]
fn a_hidden_character_stays_hidden_behind_tokens_without_text_and_the_outputs_own_bytes_are_shown() {
    let tokenizer = test_support::tokenizer();
    let text = |ids: &[u32], prompt, unfinished| continued(&tokenizer, ids, prompt, unfinished).0;
    // The vocabulary has no token 999. Bytes of prompt and output share one U+FFFD.
    for (ids, hidden, shown) in [
        (&[240, 999, 98][..], "b", "\u{fffd}b"),
        (&[240, 999], "", "\u{fffd}"),
        (&[240, 999, 999, 159, 142, 187], "🎻", "🎻"),
        (&[240, 159], "\u{fffd}", "\u{fffd}"),
        (&[240, 159, 98], "\u{fffd}b", "\u{fffd}b"),
    ] {
        assert_eq!(text(ids, 1, Unfinished::Hidden), hidden, "{ids:?}");
        assert_eq!(text(ids, 1, Unfinished::Shown), shown, "{ids:?}");
    }
    let tokenizer = test_support::byte_fallback_tokenizer();
    let text = |ids: &[u32], prompt, unfinished| continued(&tokenizer, ids, prompt, unfinished).0;
    // Byte tokens have a U+FFFD each. The first token is the letter a, and 258 the letter b.
    for (ids, prompt, hidden, shown) in [
        (&[257, 240, 999, 258][..], 2, "b", "\u{fffd}b"),
        (&[257, 240, 999], 2, "", "\u{fffd}"),
        (&[257, 240, 159, 258], 2, "\u{fffd}b", "\u{fffd}\u{fffd}b"),
        (&[257, 240, 159, 258], 3, "b", "\u{fffd}\u{fffd}b"),
        (&[257, 240, 159], 2, "\u{fffd}", "\u{fffd}\u{fffd}"),
        (&[257, 240, 159, 142, 187, 258], 3, "🎻b", "🎻b"),
    ] {
        assert_eq!(text(ids, prompt, Unfinished::Hidden), hidden, "{ids:?} {prompt}");
        assert_eq!(text(ids, prompt, Unfinished::Shown), shown, "{ids:?} {prompt}");
    }
}

proptest! {
    #[test]
    fn prompt_and_output_add_up_to_the_whole_decode(
        ids in prop::collection::vec(0u32..6, 1..20),
        letters in "[a-c é日🎻.']{0,11}[a-c]",
        at in 0usize..20,
    ) {
        let letters = |tokenizer: Arc<Tokenizer>| (tokenizer.encode(&letters, SpecialTokens::Exclude).unwrap(), tokenizer);
        let all = [
            (ids, test_support::metaspace_tokenizer()),
            letters(test_support::tokenizer()),
            letters(test_support::byte_fallback_tokenizer()),
            letters(test_support::word_piece_tokenizer()),
        ];
        for (ids, tokenizer) in all {
            let at = 1 + at % ids.len();
            let mut prompt = Detokenizer::new(tokenizer.clone(), SpecialTokens::Include);
            let echo: String = ids[..at].iter().map(|&id| prompt.push(id).text).collect();
            let whole = tokenizer.decode(&ids, SpecialTokens::Include).unwrap();
            prop_assert_eq!(echo + &continued(&tokenizer, &ids, at, Unfinished::Shown).0, whole);
            // A token's own bytes are those of its place in a text, except for the first.
            let text = continued(&tokenizer, &ids, 1, Unfinished::Hidden).0;
            let bytes: Vec<u8> = ids[1..].iter().flat_map(|&id| tokenizer.token_bytes(id)).collect();
            if String::from_utf8(bytes.clone()).is_ok() && tokenizer.decode(&ids[..1], SpecialTokens::Include).is_ok_and(|first| !first.ends_with('\u{fffd}')) {
                prop_assert_eq!(text.as_bytes(), bytes);
            }
        }
    }

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

#[test]
fn text_before_a_marker_is_released_and_text_behind_it_keeps_its_space() {
    let byte_level = test_support::tokenizer();
    let mut detokenizer = Detokenizer::new(byte_level.clone(), SpecialTokens::Exclude);
    assert_eq!(detokenizer.push(0xc3).text, "");
    assert_eq!(detokenizer.release(), "\u{fffd}");
    assert_eq!((detokenizer.push(97).text.as_str(), detokenizer.release().as_str()), ("a", ""));
    let metaspace = test_support::metaspace_tokenizer();
    let mut detokenizer = Detokenizer::new(metaspace, SpecialTokens::Exclude);
    assert_eq!(detokenizer.push(0).text, "a");
    assert_eq!(detokenizer.release(), "");
    // The decoder strips the space of the first token alone.
    assert_eq!(detokenizer.push(1).text, " b");
}
