use super::*;

#[test]
fn a_line_has_a_name_a_hash_and_limits() {
    let hash = "ab".repeat(32);
    let text = format!("# people\n\nalice {hash} concurrent=2 most-urgent=-3 # and no more\n");
    let keys = parse(&text).unwrap();
    assert_eq!((keys.len(), keys[0].name.as_str(), keys[0].hash), (1, "alice", [0xab; 32]));
    assert_eq!((keys[0].concurrent, keys[0].tokens_per_minute), (Some(2), None));
    assert_eq!(keys[0].most_urgent, Some(-3));
}

#[test]
fn a_wrong_line_is_named_and_no_key_is_repeated() {
    let hash = "ab".repeat(32);
    let secret = "sk-secret";
    for (text, word) in [
        (String::new(), "no keys"),
        ("alice".into(), "no hash"),
        (format!("alice {secret}"), "SHA-256"),
        (format!("alice {hash}0"), "SHA-256"),
        (format!("al/ice {hash}"), "name"),
        (format!("a {hash} speed=1"), "speed"),
        (format!("a {hash} concurrent=0"), "at least 1"),
        (format!("a {hash} concurrent=1 concurrent=2"), "once"),
        (format!("a {hash} concurrent=x"), "number"),
        (format!("a {hash} most-urgent=-9"), "-8 to 8"),
        (format!("a {hash} most-urgent=x"), "-8 to 8"),
        (format!("a {hash} most-urgent=1 most-urgent=1"), "once"),
        (format!("a {hash}\nb {hash}"), "line 2 has the key of a"),
        (format!("a {hash}\na {}", "cd".repeat(32)), "line 2 has the name of a"),
    ] {
        let error = parse(&text).unwrap_err();
        assert!(error.contains(word) && !error.contains(secret), "{error}");
    }
}
