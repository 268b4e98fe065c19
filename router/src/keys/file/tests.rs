use super::*;

#[test]
fn a_line_has_a_name_a_hash_and_limits() {
    let hash = "ab".repeat(32);
    let text = format!("# people\n\nalice {hash} concurrent=2 most-urgent=-3 # and no more\n");
    let KeyFile { keys, mistakes } = parse(text.as_bytes());
    assert!(mistakes.is_empty(), "{mistakes:?}");
    assert_eq!((keys.len(), keys[0].name.as_str(), keys[0].hash), (1, "alice", [0xab; 32]));
    assert_eq!((keys[0].concurrent, keys[0].tokens_per_minute), (Some(2), None));
    assert_eq!((keys[0].most_urgent, keys[0].operator), (Some(-3), false));
    let KeyFile { keys, mistakes } = parse(format!("oncall {hash} concurrent=2 operator").as_bytes());
    assert!(mistakes.is_empty(), "{mistakes:?}");
    assert_eq!((keys[0].concurrent, keys[0].operator), (Some(2), true));
}

#[test]
fn a_wrong_line_is_named_and_left_out_and_no_key_is_repeated() {
    let hash = "ab".repeat(32);
    let secret = "sk-secret";
    for (text, word, kept) in [
        ("alice".into(), "no hash", 0),
        (format!("alice {secret}"), "SHA-256", 0),
        (format!("alice {hash}0"), "SHA-256", 0),
        (format!("al/ice {hash}"), "name", 0),
        (format!("a {hash} speed=1"), "speed", 0),
        (format!("a {hash} concurrent=0"), "at least 1", 0),
        (format!("a {hash} concurrent=1 concurrent=2"), "once", 0),
        (format!("a {hash} concurrent=x"), "number", 0),
        (format!("a {hash} operators"), "nor operator", 0),
        (format!("a {hash} operator operator"), "once", 0),
        (format!("a {hash} operator=1"), "no limit \"operator\"", 0),
        (format!("a {hash} most-urgent=-9"), "-8 to 8", 0),
        (format!("a {hash} most-urgent=x"), "-8 to 8", 0),
        (format!("a {hash} most-urgent=1 most-urgent=1"), "once", 0),
        (format!("a {hash}\nb {hash}"), "line 2 has the key of a", 1),
        (format!("a {hash}\na {}", "cd".repeat(32)), "line 2 has the name of a", 1),
        (format!("x\na {hash}\n\nb"), "line 1", 1),
        (format!("x\na {hash}\n\nb"), "line 4", 1),
    ] {
        let KeyFile { keys, mistakes } = parse(text.as_bytes());
        assert_eq!(keys.len(), kept, "{text}");
        assert!(mistakes.iter().any(|mistake| mistake.contains(word)), "{mistakes:?}");
        assert!(!mistakes.concat().contains(secret), "{mistakes:?}");
    }
    let KeyFile { keys, mistakes } = parse(&[b"a \xff\nb ", hash.as_bytes()].concat());
    assert_eq!((keys.len(), &mistakes[..]), (1, &["line 1 is not UTF-8 text".to_owned()][..]));
    // A file without lines has no keys, and that is no mistake.
    let KeyFile { keys, mistakes } = parse(b"# nobody\n");
    assert!(keys.is_empty() && mistakes.is_empty());
}
