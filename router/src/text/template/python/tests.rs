use minijinja::Environment;

fn evaluate(expression: &str) -> String {
    let mut environment = Environment::new();
    super::add(&mut environment);
    let source = format!("{{{{ {expression} }}}}");
    environment.render_str(&source, ()).unwrap_or_else(|error| error.kind().to_string())
}

/// The right values are those of Python 3.11.
#[test]
fn methods_of_texts_are_those_of_python() {
    let cases = [
        (r"'ab'.ljust(4) ~ '|' ~ 'é'.rjust(3, '*') ~ '|' ~ 'abc'.ljust(2)", "ab  |**é|abc"),
        (r"'a'.center(4, '.') ~ 'ab'.center(5, '.')", ".a....ab."),
        (r"'-42'.zfill(5) ~ ' ' ~ '7'.zfill(3) ~ ' ' ~ '+'.zfill(2)", "-0042 007 +0"),
        (r"'<a>'.removeprefix('<').removesuffix('>').removeprefix('x')", "a"),
        (r"' a  b c '.split()|join('|')", "a|b|c"),
        (r"' a  b c '.split(none, 1)|join('|')", "a|b c "),
        (r"' a  b c '.rsplit(none, 1)|join('|')", " a  b|c"),
        (r"'a,b,c'.rsplit(',', maxsplit=1)|join('|')", "a,b|c"),
        (r"'a,b,c'.split(',', 1)|join('|')", "a|b,c"),
        (r"'a=b=c'.partition('=')|join('|') ~ '&' ~ 'a=b=c'.rpartition('=')|join('|')", "a|=|b=c&a=b|=|c"),
        (r"'abc'.partition('=')|join('|') ~ '&' ~ 'abc'.rpartition('=')|join('|')", "abc||&||abc"),
        (r"'\u001fa\u001c'.strip() ~ '\u001d b\u001e'|trim ~ 'xay'.strip('xy')", "aba"),
        (r"'a\r\nb\u2028c\n'.splitlines()|join('|')", "a|b|c"),
        (r"'a\r\nb'.splitlines(true)|join('|')", "a\r\n|b"),
        (r"'éab'.index('b') ~ 'abab'.rindex('a') ~ ['x', 'y'].index('y')", "221"),
        (r"'aB'.swapcase() ~ 'Straße'.casefold() ~ '\u001f'.isspace()", "AbstrasseTrue"),
        (r"'abc'.index('x')", "invalid operation"),
        (r"none is iterable ~ (missing is iterable) ~ missing|length ~ (true is number)", "FalseTrue0True"),
    ];
    for (expression, expected) in cases {
        assert_eq!(evaluate(expression), expected, "{expression}");
    }
}

/// The right values are those of `json.dumps` of Python 3.11.
#[test]
fn json_has_the_options_of_python() {
    let value = "{'a': [1, {'b': 'é\\n'}], 'c': {}, 'd': []}";
    let cases = [
        ("", r#"{"a": [1, {"b": "é\n"}], "c": {}, "d": []}"#),
        ("(ensure_ascii=true)", r#"{"a": [1, {"b": "\u00e9\n"}], "c": {}, "d": []}"#),
        ("(separators=[',', ':'])", r#"{"a":[1,{"b":"é\n"}],"c":{},"d":[]}"#),
        (
            "(indent=2)",
            "{\n  \"a\": [\n    1,\n    {\n      \"b\": \"é\\n\"\n    }\n  ],\n  \"c\": {},\n  \"d\": []\n}",
        ),
    ];
    for (options, expected) in cases {
        assert_eq!(evaluate(&format!("{value}|tojson{options}")), expected, "{options}");
    }
}
