//! The kinds of constraints, their ends, and the thinking block in front of them.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use serde_json::json;
use support::{Tested, byte_level, is_set, of_schema, special};
use tutti_constraints::{BaseMatchers, Constraint, Kind, Progress, StructuralTag, Thinking};

fn constraint(kind: Kind) -> Constraint {
    Constraint::new(kind)
}

fn texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(ToString::to_string).collect()
}

#[test]
fn a_regular_expression_matches_the_whole_text() {
    let tested = Tested::new(byte_level());
    let regex = constraint(Kind::Regex(r"^[a-c]{2}/\d+$".into()));
    assert_eq!(tested.check(&regex), Ok(()));
    assert!(tested.admits(&regex, "ab/12"));
    for text in ["ab/", "xab/1", "ab/1x"] {
        assert!(!tested.admits(&regex, text), "{text}");
    }
    let anchored = constraint(Kind::Regex("^a$|^b$".into()));
    assert_eq!(tested.check(&anchored), Ok(()));
    assert!(tested.admits(&anchored, "b") && !tested.admits(&anchored, "ba"));
    // An anchor inside the text could never hold.
    assert!(tested.check(&constraint(Kind::Regex("a^b".into()))).is_err());
}

#[test]
fn a_choice_is_one_of_its_texts() {
    let tested = Tested::new(byte_level());
    let choice = constraint(Kind::Choice(texts(&["yes", "no", "no.", "<|im_end|>", "a|b"])));
    assert_eq!(tested.check(&choice), Ok(()));
    for text in ["yes", "no", "no.", "a|b"] {
        assert!(tested.admits(&choice, text), "{text}");
    }
    assert!(!tested.admits(&choice, "a"));
    // The text of a special token is ordinary bytes, and not the token.
    assert!(!tested.admits(&choice, "<|im_end|>"));
    let mut matcher = tested.environment.compile(&choice).unwrap();
    let bytes: Vec<u32> = "<|im_end|>".chars().flat_map(|c| tested.tokens(&c.to_string())).collect();
    assert_eq!(matcher.advance(&bytes), Ok(Progress::Finished));
}

#[test]
fn a_grammar_in_lark_is_followed() {
    let tested = Tested::new(byte_level());
    let lark = constraint(Kind::Lark("start: \"a\" list\nlist: \"(\" list* \")\"\n".into()));
    assert_eq!(tested.check(&lark), Ok(()));
    assert!(tested.admits(&lark, "a(()(()))"));
    assert!(!tested.admits(&lark, "a(()"));
}

#[test]
fn attributes_of_rules_survive_a_replay() {
    let tested = Tested::new(byte_level());
    let lark = "start: a b c\na[stop=\"x\"]: /[a-w]*/\nb[max_tokens=2]: /[0-9]*/\nc[lazy]: /.*/ \"!\"\n";
    let lark = constraint(Kind::Lark(lark.into()));
    assert_eq!(tested.check(&lark), Ok(()));
    let tokens = tested.tokens("abcx00value!");
    let mut cache = BaseMatchers::new(usize::MAX);
    let mut first = cache.matcher(&tested.environment, &lark).unwrap();
    let (mut words, mut replayed_words) = (vec![0; first.mask_words()], vec![0; first.mask_words()]);
    for (n, &token) in tokens.iter().enumerate() {
        first.mask(&mut words).unwrap();
        let (mut replayed, _) = cache.replayed(&tested.environment, &lark, &tokens[..n]).unwrap();
        replayed.mask(&mut replayed_words).unwrap();
        assert_eq!(words, replayed_words, "{n}");
        assert!(is_set(&words, token), "{n}");
        first.commit(token).unwrap();
    }
    assert!(first.is_finished());
}

#[test]
fn a_matcher_that_is_stopped_fails_and_no_other_one() {
    fn is_shared_by_threads<T: Send + Sync>(_: &T) {}
    fn moves_between_threads<T: Send>(_: &T) {}
    let tested = Tested::new(byte_level());
    is_shared_by_threads(&tested.environment);
    let mut cache = BaseMatchers::new(usize::MAX);
    let mut matcher = || cache.matcher(&tested.environment, &constraint(Kind::JsonObject)).unwrap();
    let (mut stopped, mut other) = (matcher(), matcher());
    moves_between_threads(&stopped);
    let canceller = stopped.canceller();
    std::thread::spawn(move || canceller.cancel()).join().unwrap();
    let mut words = vec![0; stopped.mask_words()];
    assert_eq!(stopped.mask(&mut words).unwrap_err().to_string(), "takes too long");
    assert_eq!(stopped.commit(tested.tokens("{")[0]).unwrap_err().to_string(), "takes too long");
    assert!(!stopped.is_finished() && stopped.bytes() == 0);
    assert!(other.mask(&mut words).is_ok() && matcher().mask(&mut words).is_ok());
}

#[test]
fn a_range_of_tokens_has_neither_padding_nor_ends() {
    let tested = Tested::new(byte_level());
    let any = constraint(Kind::Lark("start: \"a\" <[*]> \"b\"\n".into()));
    assert_eq!(tested.check(&any), Ok(()));
    let mut matcher = tested.environment.compile(&any).unwrap();
    matcher.advance(&tested.tokens("a")).unwrap();
    let mut words = vec![u32::MAX; matcher.mask_words() + 3];
    let allowed = matcher.mask(&mut words).unwrap();
    assert!(!allowed.may_end && words[matcher.mask_words()..] == [0; 3]);
    let tokens = tested.vocabulary.tokens();
    for (token, id) in tokens.iter().zip(0..) {
        let usable = *token != tutti_constraints::Token::Unused && !tested.vocabulary.ends().contains(&id);
        assert_eq!(is_set(&words, id), usable, "token {id}");
    }
}

#[test]
fn structural_tags_follow_their_triggers_and_free_text_stays_free() {
    let tested = Tested::new(byte_level());
    let tag = |name: &str| StructuralTag {
        begin: format!("<f={name}>"),
        schema: json!({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": false}),
        end: "</f>".into(),
    };
    let tags = constraint(Kind::StructuralTags { tags: vec![tag("x"), tag("y")], triggers: texts(&["<f="]) });
    assert_eq!(tested.check(&tags), Ok(()));
    for text in ["", "free <f text", "a <f=x>{\"a\":1}</f>", "<f=y>{\"a\":1}</f> and <f=x>{\"a\":1}</f>."] {
        assert!(tested.admits(&tags, text), "{text}");
    }
    for text in ["a <f=z>{\"a\":1}</f>", "<f=x>{\"b\":1}</f>", "<f=x>{\"a\":1}", "a <f="] {
        assert!(!tested.admits(&tags, text), "{text}");
    }
}

#[test]
fn several_triggers_have_each_its_tags() {
    let tested = Tested::new(byte_level());
    let tag = |begin: &str, schema| StructuralTag { begin: begin.into(), schema, end: "!".into() };
    let tags = vec![
        tag("<f=", json!({"const": 1})),
        tag("<g=", json!({"const": 2})),
        tag("<f=<", json!({"const": 3})),
        tag("<tool_call>", json!({"const": 4})),
    ];
    let triggers = texts(&["<f=", "<g=", "<f=<", "<tool_call>"]);
    let tags = constraint(Kind::StructuralTags { tags, triggers });
    assert_eq!(tested.check(&tags), Ok(()));
    for text in ["<f=1! <g=2!<f=<3!", "f=1 <g <tool_call>4!<g=2!", "<<g=2! <"] {
        assert!(tested.admits(&tags, text), "{text}");
    }
    // A trigger in the text before another one is a trigger, too.
    for text in ["<f=2!", "<g=1! <f=1!", "<g=x <f=1!", "<f=x <tool_call>4!", "<tool_call>1!", "<f=<1!"] {
        assert!(!tested.admits(&tags, text), "{text}");
    }
}

#[test]
fn a_special_token_in_a_tag_is_that_token() {
    let tested = Tested::new(byte_level());
    let tag = StructuralTag { begin: "<tool_call>".into(), schema: json!({"const": 1}), end: "\n".into() };
    let tags = constraint(Kind::StructuralTags { tags: vec![tag], triggers: texts(&["<tool_call>"]) });
    assert_eq!(tested.check(&tags), Ok(()));
    assert!(tested.admits(&tags, "text <tool_call>1\n more"));
    assert!(!tested.admits(&tags, "text <tool_call>2\n"));
}

#[test]
fn the_end_is_allowed_exactly_where_the_grammar_may_end() {
    let tested = Tested::new(byte_level());
    let ends = tested.vocabulary.ends();
    let mut matcher = tested.environment.compile(&constraint(Kind::Regex("ab+".into()))).unwrap();
    let mut words = vec![0; matcher.mask_words()];
    for (token, may_end) in [("a", false), ("b", false), ("b", true)] {
        let allowed = matcher.mask(&mut words).unwrap();
        assert_eq!(allowed.may_end, may_end);
        assert!(ends.iter().all(|&end| is_set(&words, end) == may_end));
        assert_eq!(matcher.commit(tested.tokens(token)[0]), Ok(Progress::Continues));
    }
    assert_eq!(matcher.commit(ends[1]), Ok(Progress::Finished));
    assert!(matcher.mask(&mut words).unwrap().only_ends());
}

#[test]
fn a_grammar_that_is_complete_finishes_without_an_end_token() {
    let tested = Tested::new(byte_level());
    let mut matcher = tested.environment.compile(&of_schema(json!({"const": true}))).unwrap();
    assert_eq!(matcher.advance(&tested.tokens("true")), Ok(Progress::Finished));
    assert!(matcher.is_finished());
    // `min_tokens` forbids end tokens, and here they are all that is left.
    let mut words = vec![0; matcher.mask_words()];
    let allowed = matcher.mask(&mut words).unwrap();
    assert!(allowed.only_ends() && allowed.may_end && allowed.tokens == 2);
}

#[test]
fn the_constraint_begins_behind_the_thinking_block() {
    let tested = Tested::new(byte_level());
    let [begin, end] = ["<think>", "</think>"].map(|text| special(&tested.vocabulary, text));
    let of = |thinking| Constraint { thinking, ..of_schema(json!({"const": 12})) };
    let (open, optional) = (of(Thinking::Open { end }), of(Thinking::Optional { begin, end }));
    for constraint in [&open, &optional] {
        assert_eq!(tested.check(constraint), Ok(()));
    }
    assert!(tested.admits(&open, "some { text\n</think>\n\n12"));
    assert!(tested.admits(&open, "</think>12"));
    assert!(!tested.admits(&open, "12"));
    assert!(!tested.admits(&open, "<think>x</think>12"));
    assert!(tested.admits(&optional, "12"));
    assert!(tested.admits(&optional, "<think>\nx\n</think>\n\n12"));
    assert!(!tested.admits(&optional, "x</think>12"));
    assert!(!tested.admits(&of(Thinking::Closed), "</think>12"));
    // Inside the block: any text, its end, and nothing that ends the request.
    let mut matcher = tested.environment.compile(&open).unwrap();
    matcher.advance(&tested.tokens("x")).unwrap();
    let mut words = vec![0; matcher.mask_words()];
    let allowed = matcher.mask(&mut words).unwrap();
    assert!(is_set(&words, end) && !is_set(&words, begin) && !allowed.may_end);
    assert!(tested.tokens("the\n{").iter().all(|&token| is_set(&words, token)));
}

#[test]
fn a_wrong_token_ends_one_matcher_alone() {
    let tested = Tested::new(byte_level());
    let mut cache = BaseMatchers::new(usize::MAX);
    let mut matcher = || cache.matcher(&tested.environment, &of_schema(json!({"const": true}))).unwrap();
    let (mut failing, mut other, mut third) = (matcher(), matcher(), matcher());
    assert!(failing.commit(tested.tokens("x")[0]).is_err());
    assert!(failing.commit(tested.tokens("t")[0]).is_err());
    assert!(failing.commit(u32::MAX).is_err());
    assert_eq!(other.advance(&tested.tokens("true")), Ok(Progress::Finished));
    let error = third.mask(&mut []).unwrap_err();
    assert_eq!(error.to_string(), "a mask of 11 words does not fit into 0");
}

#[test]
fn equal_constraints_share_a_compilation_until_the_cache_is_full() {
    let tested = Tested::new(byte_level());
    let of = |n: u32| of_schema(json!({"const": n}));
    let mut cache = BaseMatchers::new(64 << 20);
    for n in [1, 2, 1, 1] {
        let mut matcher = cache.matcher(&tested.environment, &of(n)).unwrap();
        assert_eq!(matcher.advance(&tested.tokens(&n.to_string())), Ok(Progress::Finished));
    }
    assert_eq!((cache.len(), cache.counts().hits, cache.counts().compilations), (2, 2, 2));
    assert!(cache.matcher(&tested.environment, &of_schema(json!({"type": "nothing"}))).is_err());
    assert_eq!(cache.len(), 2);
    let mut small = BaseMatchers::new(cache.bytes() * 3 / 2);
    for n in 0..4 {
        small.matcher(&tested.environment, &of(n)).unwrap();
    }
    assert!(small.len() < 4 && small.bytes() <= cache.bytes() * 3 / 2);
}
