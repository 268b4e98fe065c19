use super::*;

fn refusal(result: Result<(), ConstraintError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn patterns_are_refused_with_one_short_reason() {
    assert_eq!(refusal(check_regex("regex", "")), "regex: is empty");
    assert_eq!(
        refusal(check_regex("regex", "a(?=b)")),
        "regex: is no regular expression: look-around, including look-ahead and look-behind, is not supported"
    );
    assert_eq!(refusal(check_regex("regex", &"a".repeat(9000))), "regex: has 9000 bytes; the limit is 8192");
    assert_eq!(
        refusal(check_regex("regex", &"(".repeat(65))),
        "regex: nests brackets 65 deep; the limit is 64"
    );
    let unclosed = refusal(check_regex("regex", "(a"));
    assert_eq!(unclosed, "regex: is no regular expression: unclosed group");
    assert_eq!(check_regex("regex", r"^[a-z]+\d{2,3}$"), Ok(()));
}

#[test]
fn a_pattern_for_a_whole_text_is_not_empty() {
    for pattern in ["", "^", "$", "^$"] {
        assert_eq!(refusal(check_whole_regex("regex", pattern)), "regex: is empty");
    }
    assert_eq!(check_whole_regex("regex", "^a?$"), Ok(()));
}

#[test]
fn lists_and_grammars_have_bounds() {
    assert_eq!(refusal(check_choices("choice", &[])), "choice: is empty");
    assert_eq!(refusal(check_choices("choice", &["a".into(), String::new()])), "choice[1]: is empty");
    let many = vec!["a".to_owned(); 10_001];
    assert_eq!(refusal(check_choices("choice", &many)), "choice: has 10001 choices; the limit is 10000");
    assert_eq!(
        refusal(check_choices("choice", &["a".repeat(50_000)])),
        "choice: has 50000 bytes; the limit is 49152"
    );
    assert_eq!(refusal(check_lark("grammar", " \n")), "grammar: is empty");
    for attribute in ["stop=\"\"", "capture, stop = \"\"", "suffix=\"\""] {
        assert_eq!(
            refusal(check_lark("grammar", &format!("start[{attribute}]: /.*/"))),
            "grammar: has a rule with an empty `stop` or `suffix`, which is not supported"
        );
    }
    assert_eq!(check_lark("grammar", "start[stop=\"x\"]: /.*/"), Ok(()));
    let rules: String = (0..1025).map(|n| format!("r{n}: \"a\"\n")).collect();
    assert_eq!(
        refusal(check_lark("grammar", &rules)),
        "grammar: has 1025 rules and alternatives; the limit is 1024"
    );
    // Schemas have bounds of their own.
    let members: Vec<String> = (0..2000).map(|n| format!("\"p{n}\": {{\"enum\": [\"a|b\"]}}")).collect();
    let schema = format!("start: a\na: %json {{\"properties\": {{{}}}}}\n", members.join(", "));
    assert_eq!(check_lark("grammar", &schema), Ok(()));
    assert!(check_lark("grammar", &(schema + &rules)).is_err());
    // But a text that only looks like one hides nothing.
    let hidden = "a: \"%json\" | \"x\"\n".repeat(1000);
    assert!(check_lark("grammar", &hidden).is_err());
}

#[test]
fn tags_and_triggers_belong_to_each_other() {
    let tag = |begin: &str| StructuralTag { begin: begin.into(), schema: true.into(), end: "</f>".into() };
    let check = |tags: &[StructuralTag], triggers: &[&str]| {
        let triggers: Vec<String> = triggers.iter().map(ToString::to_string).collect();
        check_tags("structural_tag", tags, &triggers)
    };
    assert_eq!(check(&[tag("<f=a>")], &["<f="]), Ok(()));
    assert_eq!(refusal(check(&[], &["<f="])), "structural_tag.structures: is empty");
    assert_eq!(refusal(check(&[tag("<f>")], &[""])), "structural_tag.triggers[0]: is empty");
    assert_eq!(
        refusal(check(&[tag("<f>"), tag("<g>")], &["<f"])),
        "structural_tag.structures[1].begin: begins with no trigger"
    );
    assert_eq!(
        refusal(check(&[tag("<f>")], &["<f", "<g"])),
        "structural_tag.triggers[1]: begins no structure"
    );
    let many: Vec<_> = (0..129).map(|n| tag(&format!("<f{n}>"))).collect();
    assert_eq!(refusal(check(&many, &["<f"])), "structural_tag.structures: has 129 tags; the limit is 128");
}
