//! Constraints that are meant to harm: each is refused with its reason, or its work is bounded.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::thread;

use serde_json::{Value, json};
use support::{Tested, byte_level, of_schema};
use tutti_constraints::{Constraint, Kind, Progress, Strictness, StructuralTag};

fn refusal(tested: &Tested, constraint: &Constraint) -> String {
    let error = tested.check(constraint).expect_err(&format!("{constraint:?}"));
    let text = error.to_string();
    assert!(text.len() < 400 && !text.contains('\n'), "{text}");
    text
}

#[test]
fn schemas_that_cannot_be_enforced_are_refused_by_position() {
    let tested = Tested::new(byte_level());
    let nested =
        |schema: Value| json!({"type": "object", "properties": {"a": {"type": "array", "items": schema}}});
    let cases = [
        (json!({"not": {"type": "null"}}), "not: cannot be enforced"),
        (json!({"if": true, "then": true}), "if: cannot be enforced"),
        (json!({"uniqueItems": true}), "uniqueItems: cannot be enforced"),
        (json!({"contains": true}), "contains: cannot be enforced"),
        (json!({"x-guidance": {"lenient": true}}), "x-guidance: cannot be enforced"),
        (
            json!({"type": "string", "pattern": "(?!a)b"}),
            "pattern: is no regular expression: look-around, including look-ahead and look-behind, is not supported",
        ),
        (json!({"type": "string", "pattern": "(a"}), "pattern: is no regular expression: unclosed group"),
        (
            json!({"$ref": "https://example.com/s"}),
            "$ref: does not begin with `#/`, so it is not inside the schema",
        ),
        (json!(3), ": is neither an object nor a boolean"),
    ];
    for (schema, expected) in cases {
        let separator = if expected.starts_with(':') { "" } else { "." };
        let wanted = format!("schema.properties.a.items{separator}{expected}");
        assert_eq!(refusal(&tested, &of_schema(nested(schema))), wanted);
    }
    let format = refusal(&tested, &of_schema(nested(json!({"type": "string", "format": "regex"}))));
    assert!(
        format.starts_with("schema.properties.a.items.format: cannot be enforced; the formats are "),
        "{format}"
    );
}

#[test]
fn what_the_library_refuses_has_a_position_too() {
    let tested = Tested::new(byte_level());
    let overlapping = json!({"oneOf": [{"type": "integer"}, {"type": "number"}]});
    let inside = |schema: &Value| json!({"type": "object", "properties": {"x": {"type": "boolean"}, "a": schema}, "required": ["a"]});
    for (schema, word) in [
        (overlapping, "oneOf"),
        (json!({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
        (json!({"type": "unknown"}), "type"),
        (json!({"$ref": "#/$defs/missing"}), "missing"),
    ] {
        let text = refusal(&tested, &of_schema(inside(&schema)));
        assert!(text.starts_with("schema.properties.a: ") && text.contains(word), "{text}");
    }
}

#[test]
fn a_pattern_over_the_limit_of_work_is_refused() {
    let tested = Tested::new(byte_level());
    let pattern = refusal(&tested, &Constraint::new(Kind::Regex("a?".repeat(4000))));
    assert!(pattern.ends_with("is too complex to compile") || pattern.contains("too many"), "{pattern}");
    let members: Value = (0..1000).map(|n| (format!("m{n}"), json!({"type": "string"}))).collect();
    let members = refusal(&tested, &of_schema(json!({"type": "object", "properties": members})));
    assert!(members.starts_with("schema: ") && members.contains("max is 2000"), "{members}");
}

#[test]
fn schemas_that_admit_nothing_are_refused() {
    let tested = Tested::new(byte_level());
    for schema in [
        json!(false),
        json!({"allOf": [{"type": "null"}, {"type": "boolean"}]}),
        json!({"properties": {"a": false}, "required": ["a"], "type": "object"}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        json!({"$ref": "#"}),
        json!({"allOf": [{"$ref": "#"}]}),
    ] {
        let text = refusal(&tested, &of_schema(schema.clone()));
        assert!(text.starts_with("schema"), "{text} of {schema}");
    }
    refusal(&tested, &Constraint::new(Kind::Lark("start: start".into())));
    refusal(&tested, &Constraint::new(Kind::Regex("[^\\s\\S]".into())));
}

#[test]
fn sizes_are_refused_before_anything_is_compiled() {
    let tested = Tested::new(byte_level());
    let mut deep = json!({"type": "null"});
    for _ in 0..40 {
        deep = json!({"type": "array", "items": deep});
    }
    assert!(refusal(&tested, &of_schema(deep)).ends_with("is nested 33 deep; the limit is 32"));
    let members =
        |count: usize| -> Value { (0..count).map(|n| (format!("m{n}"), json!({"type": "null"}))).collect() };
    let wide = refusal(&tested, &of_schema(json!({"type": "object", "properties": members(1100)})));
    assert_eq!(wide, "schema.properties.m1023: is schema number 1025; the limit is 1024");
    let values: Vec<Value> = (0..10_001).map(|n| json!(n)).collect();
    let many = refusal(&tested, &of_schema(json!({"enum": values})));
    assert_eq!(many, "schema.enum: has 10001 values with all before it; the limit is 10000");
    let long = refusal(&tested, &of_schema(json!({"enum": ["a".repeat(50_000)]})));
    assert_eq!(long, "schema.enum: has 50002 bytes of values with all before it; the limit is 49152");
    let large = refusal(&tested, &of_schema(json!({"description": "a".repeat(70_000)})));
    assert_eq!(large, "schema: has 70018 bytes; the limit is 65536");
    let brackets = refusal(&tested, &Constraint::new(Kind::Lark(format!("start: {}", "(".repeat(30_000)))));
    assert_eq!(brackets, "grammar: nests brackets 30000 deep; the limit is 64");
}

/// No document of the schema and no text of the grammar is finite. `max_tokens` ends their requests.
#[test]
fn what_never_ends_goes_on_until_it_is_cut() {
    let tested = Tested::new(byte_level());
    let schema = json!({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]});
    for (constraint, text) in [
        (of_schema(schema), "{\"a\":".repeat(200)),
        (Constraint::new(Kind::Lark("start: \"a\" start".into())), "a".repeat(500)),
    ] {
        assert_eq!(tested.check(&constraint), Ok(()));
        let mut matcher = tested.environment.compile(&constraint).unwrap();
        assert_eq!(matcher.advance(&tested.tokens(&text)), Ok(Progress::Continues));
        let mut words = vec![0; matcher.mask_words()];
        assert!(!matcher.mask(&mut words).unwrap().may_end);
    }
}

/// Nothing of this list may overflow a stack, panic, or take memory without bound. What is accepted works for a while,
/// or ends its own request with an error.
#[test]
fn what_is_accepted_is_bounded() {
    let tested = Tested::new(byte_level());
    let optional = |count: usize| -> Value {
        (0..count).map(|n| (format!("m{n}"), json!({"type": "string"}))).collect()
    };
    let schemas = [
        json!({"type": "object", "properties": optional(1000)}),
        json!({"enum": (0..2000).map(|n| format!("value {n}")).collect::<Vec<_>>()}),
        json!({"type": "array", "maxItems": u64::MAX}),
        json!({"type": "array", "minItems": u64::MAX}),
        json!({"type": "string", "maxLength": 10_000_000}),
        json!({"type": "string", "minLength": 9000, "maxLength": 10_000}),
        json!({"anyOf": (0..300).map(|n| json!({"properties": {format!("m{n}"): {"const": n}}})).collect::<Vec<_>>()}),
        json!({"type": "string", "pattern": "^.*a.{20}$"}),
        json!({"type": "number", "multipleOf": 1e-300}),
        json!({"type": "integer", "minimum": -1e308, "maximum": 1e308}),
        json!({"properties": {"\u{ff}<|im_end|>": {"const": "<|im_end|>"}}, "required": ["\u{ff}<|im_end|>"]}),
    ];
    let regexes = [
        r"[01]*1[01]{30}",
        r"(a|b|ab){1,1000}",
        r"((a{1,100}){1,100}){1,100}",
        r"(.*a){20}",
        r"\p{L}{1,5000}",
        r"(((((((((a*)*)*)*)*)*)*)*)*)*",
        r"a{1000000000}",
        r"\",
        r"[",
        r"^",
        r"$",
        r"\b",
    ];
    let wide = "[ab]".repeat(2000);
    let optional_letters = "a?".repeat(4000);
    let grammars = [
        "start: \"a\" start".to_owned(),
        format!(
            "start: r0\n{}r500: \"a\"\n",
            (0..500).map(|n| format!("r{n}: r{}\n", n + 1)).collect::<String>()
        ),
        format!(
            "start: R0\n{}R500: \"a\"\n",
            (0..500).map(|n| format!("R{n}: R{}\n", n + 1)).collect::<String>()
        ),
        "start: a a a\na: a a | \"x\"".to_owned(),
        "start: <|unknown|>".to_owned(),
        "start: %json {\"type\": \"nothing\"}".to_owned(),
        "start: /(/".to_owned(),
        "%import common.WORD\nstart: WORD".to_owned(),
        "start: \"\u{0}\"".to_owned(),
        "start: <[0-4294967295]>".to_owned(),
        "start: <[999999999]>".to_owned(),
        "start: \"a\"{1,100000000}".to_owned(),
        "start[max_tokens=5]: /.*/".to_owned(),
        "start: @start".to_owned(),
        "start: @answer".to_owned(),
        "(((".to_owned(),
    ];
    let tag = |n: usize| StructuralTag {
        begin: format!("<{n}>"),
        schema: json!({"type": "object", "properties": optional(3)}),
        end: "</>".into(),
    };
    let tags = Kind::StructuralTags {
        tags: (0..128).map(tag).collect(),
        triggers: (0..128).map(|n| format!("<{n}>")).collect(),
    };
    let constraints = schemas
        .into_iter()
        .map(of_schema)
        .chain(
            regexes
                .into_iter()
                .chain([wide.as_str(), optional_letters.as_str()])
                .map(|regex| Constraint::new(Kind::Regex(regex.to_owned()))),
        )
        .chain(grammars.into_iter().map(|grammar| Constraint::new(Kind::Lark(grammar))))
        .chain([Constraint::new(tags)])
        .chain([Constraint::new(Kind::Choice(
            (0..10_000).map(|n| format!("{:04}", n * 7 % 10_007)).collect(),
        ))]);
    let mut accepted = 0;
    for constraint in constraints {
        match tested.check(&constraint) {
            Ok(()) => accepted += 1,
            Err(error) => {
                let text = error.to_string();
                assert!(text.len() < 400 && !text.contains('\n'), "{text}");
                continue;
            }
        }
        // Threads of the standard library have this much stack, and masks are computed on threads of a pool.
        thread::scope(|scope| {
            let masks = || follow(&tested, &constraint);
            thread::Builder::new().stack_size(2 << 20).spawn_scoped(scope, masks).unwrap();
        });
    }
    assert!(accepted > 10);
}

/// Follows a constraint for some tokens. An error ends its request.
fn follow(tested: &Tested, constraint: &Constraint) {
    let mut matcher = tested.environment.compile(constraint).unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    let mut words = vec![0; matcher.mask_words()];
    for _ in 0..40 {
        let Ok(allowed) = matcher.mask(&mut words) else { break };
        if allowed.only_ends() {
            break;
        }
        let mut tokens = support::set_tokens(&words);
        tokens.retain(|token| !tested.vocabulary.ends().contains(token));
        if matcher.commit(tokens[random.usize(..tokens.len())]).is_err() {
            break;
        }
    }
    assert!(matcher.bytes() < 256 << 20, "{} bytes", matcher.bytes());
}

#[test]
fn strict_mode_names_the_member_that_breaks_its_rules() {
    let tested = Tested::new(byte_level());
    let strict = |schema: Value| Constraint::new(Kind::JsonSchema { schema, strictness: Strictness::Strict });
    let closed = |a: Value| json!({"type": "object", "properties": {"a": a}, "required": ["a"], "additionalProperties": false});
    assert_eq!(tested.check(&strict(closed(json!({"type": "string"})))), Ok(()));
    let open = json!({"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]});
    let optional =
        json!({"type": "object", "properties": {"b": {"type": "null"}}, "additionalProperties": false});
    let unknown =
        json!({"type": "object", "properties": {}, "required": ["b"], "additionalProperties": false});
    for (schema, expected) in [
        (json!({"type": "array"}), "schema.type: must be \"object\" in strict mode"),
        (json!({"anyOf": [closed(json!({}))]}), "schema.anyOf: is not allowed here in strict mode"),
        (open.clone(), "schema.additionalProperties: must be false in strict mode"),
        (
            closed(json!({"type": "array", "items": open.clone()})),
            "schema.properties.a.items.additionalProperties: must be false in strict mode",
        ),
        (closed(optional), "schema.properties.a.properties.b: must be required in strict mode"),
        (closed(unknown), "schema.properties.a.required[0]: is not in `properties`"),
        (
            closed(json!({"anyOf": [{"type": "null"}, open.clone()]})),
            "schema.properties.a.anyOf[1].additionalProperties: must be false in strict mode",
        ),
        (
            json!({"type": "object", "properties": {"a b": {"$ref": "#/$defs/x"}}, "required": ["a b"],
                   "additionalProperties": false, "$defs": {"x": open}}),
            "schema.$defs.x.additionalProperties: must be false in strict mode",
        ),
    ] {
        assert_eq!(refusal(&tested, &strict(schema)), expected);
    }
}

#[test]
fn the_panic_hook_of_the_process_is_kept() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().name() == Some("of the process") {
            PANICS.fetch_add(1, Ordering::Relaxed);
        } else {
            before(info);
        }
    }));
    let tested = Tested::new(byte_level());
    tested.check(&of_schema(json!({"type": "null"}))).unwrap();
    let panics = std::thread::Builder::new().name("of the process".into()).spawn(|| panic!("seen")).unwrap();
    assert!(panics.join().is_err());
    assert_eq!(PANICS.load(Ordering::Relaxed), 1);
}

#[test]
fn a_check_ends_at_its_time_limit() {
    let tested = Tested::new(byte_level());
    let error =
        tested.checks.check(&of_schema(json!({"type": "null"})), std::time::Duration::ZERO).unwrap_err();
    assert_eq!(error.to_string(), "schema: takes too long to compile");
}
