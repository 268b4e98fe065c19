//! Random walks under masks: what ends is valid, and masks do not depend on how a state was reached.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use serde_json::Value;
use support::{End, Tested, byte_level, is_set, judge, of_schema, schemas, sentence_piece, walk};
use tutti_constraints::{BaseMatchers, Constraint, Kind, Matcher, Progress, Token, Whitespace};

/// Tokens after which a walk is given up.
const MOST_TOKENS: usize = 120;

fn vocabularies() -> [Tested; 2] {
    [Tested::new(byte_level()), Tested::new(sentence_piece())]
}

#[test]
fn documents_validate_and_masks_have_neither_padding_nor_special_tokens() {
    let mut random = fastrand::Rng::with_seed(39);
    let (mut walks, mut ended) = (0, 0);
    for tested in &vocabularies() {
        for schema in schemas::all() {
            let constraint = of_schema(schema.clone());
            assert_eq!(tested.check(&constraint), Ok(()), "{schema}");
            let mut cache = BaseMatchers::new(usize::MAX);
            for _ in 0..2 {
                let mut each = |matcher: &mut Matcher, _: &[u32], words: &[u32]| {
                    let may_end = matcher.is_accepting().unwrap();
                    let tokens = tested.vocabulary.tokens().iter().zip(0..);
                    for (_, id) in tokens.filter(|(token, _)| !matches!(token, Token::Text(_))) {
                        let is_end = tested.vocabulary.ends().contains(&id);
                        assert_eq!(is_set(words, id), is_end && may_end, "token {id} of {schema}");
                    }
                };
                let mut matcher = cache.matcher(&tested.environment, &constraint).unwrap();
                let (tokens, end) = walk(tested, &mut matcher, &mut random, MOST_TOKENS, &mut each);
                walks += 1;
                if end == End::Ended {
                    ended += 1;
                    let text = tested.text(&tokens);
                    let document: Value = match serde_json::from_str(&text) {
                        Ok(document) => document,
                        // JSON has no largest number.
                        Err(error) if error.to_string().contains("number out of range") => continue,
                        Err(error) => panic!("{error}: {text} of {schema}"),
                    };
                    assert!(judge::is_valid(&schema, &schema, &document), "{text} of {schema}");
                }
            }
        }
    }
    assert!(walks > 240 && ended * 2 > walks, "{ended} of {walks} walks ended");
}

#[test]
fn the_mask_after_a_replay_is_that_of_the_undisturbed_matcher() {
    let mut random = fastrand::Rng::with_seed(7);
    let tested = Tested::new(byte_level());
    for schema in schemas::all().into_iter().step_by(3) {
        let constraint = of_schema(schema.clone());
        let mut cache = BaseMatchers::new(usize::MAX);
        let mut masks: Vec<(Vec<u32>, Vec<u32>)> = Vec::new();
        let mut each = |_: &mut Matcher, tokens: &[u32], words: &[u32]| {
            if tokens.len().is_multiple_of(5) {
                masks.push((tokens.to_vec(), words.to_vec()));
            }
        };
        let mut undisturbed = tested.environment.compile(&constraint).unwrap();
        walk(&tested, &mut undisturbed, &mut random, 40, &mut each);
        for (tokens, mask) in masks {
            let (mut replayed, progress) = cache.replayed(&tested.environment, &constraint, &tokens).unwrap();
            assert_eq!(progress, Progress::Continues);
            let mut words = vec![0; replayed.mask_words()];
            replayed.mask(&mut words).unwrap();
            assert_eq!(words, mask, "{schema}");
            // A mask that is computed again is the same one.
            replayed.mask(&mut words).unwrap();
            assert_eq!(words, mask, "{schema}");
        }
    }
}

#[test]
fn whitespace_is_as_asked_for() {
    let tested = Tested::new(byte_level());
    let object = |whitespace| Constraint { whitespace, ..Constraint::new(Kind::JsonObject) };
    let text = |spaces: usize| format!("{{{}\"a\":1}}", " ".repeat(spaces));
    for (whitespace, allowed, refused) in
        [(Whitespace::Compact, 0, Some(1)), (Whitespace::Bounded, 8, Some(9)), (Whitespace::Any, 300, None)]
    {
        let constraint = object(whitespace);
        assert!(tested.admits(&constraint, &text(allowed)), "{whitespace:?}");
        if let Some(refused) = refused {
            assert!(!tested.admits(&constraint, &text(refused)), "{whitespace:?}");
        }
    }
    // Bounded behind the last bracket, too: nothing can follow.
    assert!(!tested.admits(&object(Whitespace::Bounded), "{} "));
}
