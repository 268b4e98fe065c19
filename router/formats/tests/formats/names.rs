//! Names of tools and parameters: a name that no rule refuses is read as it was declared, in every format.

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use tutti_formats::{Format, NAME_CHARS, NameRefusal, ToolGrammar, is_name_char};

use crate::{
    grammars::{Tested, tested_text},
    samples::SAMPLES,
    support::tools_of,
};

/// A tool with one required parameter of a type that makes short values.
fn schema(parameter: &str) -> Map<String, Value> {
    let mut properties = Map::new();
    properties.insert(parameter.to_owned(), json!({"type": "boolean"}));
    let schema = json!({"type": "object", "properties": properties, "required": [parameter],
        "additionalProperties": false});
    schema.as_object().unwrap().clone()
}

/// Every format, with each set of markers that its samples have, and with none.
fn formats() -> Vec<(&'static str, &'static [&'static str])> {
    let mut formats: Vec<_> = SAMPLES.iter().flat_map(|s| [(s.format, s.markers), (s.format, &[])]).collect();
    formats.sort_unstable();
    formats.dedup();
    formats
}

/// Checks that the calls which a grammar generates are read with the names that they were declared with.
fn is_carried(tool: &str, parameter: &str, seed: u64) {
    for (format, markers) in formats() {
        if Format::choose(format, None).unwrap().check_parameter_name(parameter).is_err() {
            continue;
        }
        let tested = Tested::new(markers);
        let schema = schema(parameter);
        let grammar = tested.grammar_of(format, &[ToolGrammar::with_schema(tool, &schema)]);
        tested.check(&grammar);
        let mut random = fastrand::Rng::with_seed(seed);
        let Some(tokens) = (0..20).find_map(|_| tested.walk(&grammar, &mut random)) else {
            panic!("{format}: no walk ends: {grammar}")
        };
        let tools = tools_of([(tool, Value::Object(schema))]);
        let answer = tested.read_with(format, "none", tools, &tokens);
        let context = || format!("{format} reads {:?} as {answer:?}", tested_text(&tested, &tokens));
        assert!(!answer.calls.is_empty() && answer.content.is_empty(), "{}", context());
        for call in &answer.calls {
            assert_eq!(call.name, tool, "{}", context());
            let arguments: Map<String, Value> = serde_json::from_str(&call.arguments).unwrap();
            assert_eq!(arguments.keys().collect::<Vec<_>>(), [parameter], "{}", context());
        }
    }
}

fn tool_names() -> impl Strategy<Value = String> {
    let characters = NAME_CHARS.chars().chain("aZ09é中".chars()).collect::<Vec<_>>();
    proptest::collection::vec(proptest::sample::select(characters), 1..12)
        .prop_map(|characters| characters.into_iter().collect())
}

/// Names with the characters that formats use, and any others.
fn parameter_names() -> impl Strategy<Value = String> {
    let parts = [
        "a",
        "$filter",
        "x-y",
        " ",
        "\n",
        "\"",
        ">",
        "\">",
        "</arg_key>",
        "<",
        "=",
        "(",
        "é",
        "\\",
        "/",
        ":",
        "7",
    ];
    prop_oneof![
        tool_names(),
        proptest::collection::vec(proptest::sample::select(parts.to_vec()), 0..5)
            .prop_map(|parts| parts.concat()),
        any::<String>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn what_a_grammar_admits_is_read(tool in tool_names(), parameter in parameter_names(), seed: u64) {
        prop_assert!(tool.chars().all(is_name_char));
        is_carried(&tool, &parameter, seed);
    }
}

#[test]
fn names_of_paths_and_namespaces_are_read() {
    is_carried("fs/read", "a.b-c_d", 1);
    is_carried("functions.f:1", "$filter", 2);
    is_carried("7", "arguments", 3);
}

#[test]
fn names_that_a_format_cannot_carry_are_refused() {
    let check = |format: &str, name: &str| Format::choose(format, None).unwrap().check_parameter_name(name);
    for name in ["$filter", "a b", "a=b", ""] {
        assert_eq!(check("pythonic", name), Err(NameRefusal::NoWord(name.to_owned())));
        assert_eq!(check("hermes", name), Ok(()));
    }
    assert_eq!(check("glm", " a"), Err(NameRefusal::Spaced(" a".to_owned())));
    assert_eq!(check("qwen_xml", "a>b"), Err(NameRefusal::HasMarker("a>b".to_owned(), ">")));
    assert_eq!(check("minimax", "a>b"), Ok(()));
    assert_eq!(check("dsml", &"a".repeat(2000)), Err(NameRefusal::Long(2000)));
    assert_eq!(check("harmony", &"a".repeat(2000)), Ok(()));
}

#[test]
fn long_grammars_are_refused_without_being_written() {
    // A parameter's rule repeats all definitions: as a whole, these would be 100 MB.
    let definitions: Map<String, Value> =
        Map::from_iter([("a".to_owned(), json!({"enum": vec!["x".repeat(90); 500]}))]);
    let properties: Map<String, Value> =
        (0..2000).map(|n| (format!("p{n}"), json!({"type": "integer"}))).collect();
    let schema = json!({"type": "object", "properties": properties, "$defs": definitions});
    let tools = [ToolGrammar::with_schema("f", schema.as_object().unwrap())];
    for format in ["pythonic", "qwen_xml"] {
        let format = Format::choose(format, None).unwrap();
        let grammar = format.grammar(
            &tools,
            tutti_formats::Wanted::Calls,
            tutti_formats::CallLimit::None,
            &tutti_formats::Vocabulary::default(),
        );
        assert_eq!(grammar, Err(tutti_formats::LongGrammar));
    }
}
