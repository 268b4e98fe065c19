use serde_json::{Value, json};
use tutti_proto::v1::constraint::Whitespace;

use super::*;

fn asked(members: Value) -> Result<Asked, Error> {
    let body = members.to_string();
    let mut fields = Fields::of_body(body.as_bytes(), Scope::Completions)?;
    let asked = take(&mut fields)?;
    fields.finish()?;
    Ok(asked)
}

fn schema(text: &str, strict: bool) -> Kind {
    Kind::JsonSchema(pb::JsonSchema { schema: text.into(), strict })
}

fn tags(begin: &str) -> Kind {
    let tag = pb::StructuralTag { begin: begin.into(), schema: r#"{"const":1}"#.into(), end: "</f>".into() };
    Kind::StructuralTags(pb::StructuralTags { tags: vec![tag], triggers: vec!["<f".into()] })
}

/// Each spelling of a constraint, with the constraint and its name in errors.
#[test]
fn good_spellings() {
    let structures =
        json!({"structures": [{"begin": "<f>", "schema": {"const": 1}, "end": "</f>"}], "triggers": ["<f"]});
    let mut typed = structures.clone();
    typed["type"] = json!("structural_tag");
    let format = |kind: &str, more: Value| {
        let mut format = json!({"type": kind});
        format.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({ "response_format": format })
    };
    let ordered = r#"{"z":1,"a":{"m":1,"b":2}}"#;
    let of_schema = |strict: Value| {
        let schema: Value = serde_json::from_str(ordered).unwrap();
        format("json_schema", json!({"json_schema": {"name": "n", "schema": schema, "strict": strict}}))
    };
    let object = || Kind::JsonObject(pb::JsonObject {});
    let choice = || Kind::Choice(pb::Choices { texts: vec!["a".into(), "b".into()] });
    for (members, kind, name) in [
        (format("json_object", json!({})), object(), "response_format"),
        (of_schema(json!(true)), schema(ordered, true), "response_format.json_schema.schema"),
        (of_schema(json!(false)), schema(ordered, false), "response_format.json_schema.schema"),
        (of_schema(json!(null)), schema(ordered, false), "response_format.json_schema.schema"),
        (format("structural_tag", structures.clone()), tags("<f>"), "response_format"),
        (
            json!({"structured_outputs": {"json": {"a": 1}}}),
            schema(r#"{"a":1}"#, false),
            "structured_outputs.json",
        ),
        (
            json!({"structured_outputs": {"json": "{\"a\": 1}"}}),
            schema(r#"{"a": 1}"#, false),
            "structured_outputs.json",
        ),
        (
            json!({"structured_outputs": {"regex": "a+"}}),
            Kind::Regex("a+".into()),
            "structured_outputs.regex",
        ),
        (json!({"structured_outputs": {"choice": ["a", "b"]}}), choice(), "structured_outputs.choice"),
        (
            json!({"structured_outputs": {"grammar": "start: A"}}),
            Kind::Lark("start: A".into()),
            "structured_outputs.grammar",
        ),
        (json!({"structured_outputs": {"json_object": true}}), object(), "structured_outputs.json_object"),
        (
            json!({"structured_outputs": {"structural_tag": typed.to_string()}}),
            tags("<f>"),
            "structured_outputs.structural_tag",
        ),
        (
            json!({"structured_outputs": {"structural_tag": typed}}),
            tags("<f>"),
            "structured_outputs.structural_tag",
        ),
        (json!({"guided_json": {"a": 1}}), schema(r#"{"a":1}"#, false), "guided_json"),
        (json!({"guided_json": "{}"}), schema("{}", false), "guided_json"),
        (json!({"guided_regex": "a+"}), Kind::Regex("a+".into()), "guided_regex"),
        (json!({"guided_choice": ["a", "b"]}), choice(), "guided_choice"),
        (json!({"guided_grammar": "start: A"}), Kind::Lark("start: A".into()), "guided_grammar"),
        (json!({"structural_tag": structures.to_string()}), tags("<f>"), "structural_tag"),
    ] {
        let asked = asked(members.clone()).unwrap_or_else(|error| panic!("{members}: {error}"));
        let constraint = asked.constraint.unwrap_or_else(|| panic!("{members}"));
        assert_eq!((constraint.kind, asked.name), (Some(kind), ConstraintName(name)), "{members}");
        assert_eq!(constraint.whitespace, i32::from(Whitespace::Bounded));
    }
}

#[test]
fn neutral_values_ask_for_nothing() {
    for members in [
        json!({}),
        json!({"response_format": null}),
        json!({"response_format": {}}),
        json!({"response_format": {"type": null}}),
        json!({"response_format": {"type": "text"}}),
        json!({"response_format": {"type": "text", "json_schema": null}}),
        json!({"structured_outputs": null, "guided_json": null, "guided_choice": null}),
        json!({"structured_outputs": {}}),
        json!({"structured_outputs": {"json": null, "json_object": false, "disable_any_whitespace": false}}),
        json!({"structured_outputs": {"disable_fallback": true, "disable_additional_properties": false}}),
        json!({"guided_json": {}, "guided_choice": [], "guided_regex": "", "guided_grammar": "", "structural_tag": {}}),
        json!({"guided_json": "", "structural_tag": ""}),
        json!({"guided_decoding_backend": "xgrammar", "guided_whitespace_pattern": null}),
    ] {
        assert_eq!(asked(members.clone()), Ok(Asked::default()), "{members}");
    }
}

#[test]
fn bad_spellings_are_named() {
    let format = |format: Value| json!({ "response_format": format });
    let of_schema = |schema: Value| format(json!({"type": "json_schema", "json_schema": schema}));
    for (members, field) in [
        (format(json!("json_object")), "response_format"),
        (format(json!([])), "response_format"),
        (format(json!({"type": 1})), "response_format.type"),
        (format(json!({"type": "grammar"})), "response_format.type"),
        (format(json!({"json_schema": {}})), "response_format.type"),
        (format(json!({"type": "json_object", "schema": {}})), "response_format.schema"),
        (format(json!({"type": "json_schema"})), "response_format.json_schema"),
        (format(json!({"type": "text", "json_schema": {}})), "response_format.json_schema"),
        (of_schema(json!({"schema": {}})), "response_format.json_schema.name"),
        (of_schema(json!({"name": "", "schema": {}})), "response_format.json_schema.name"),
        (of_schema(json!({"name": 1, "schema": {}})), "response_format.json_schema.name"),
        (of_schema(json!({"name": "n"})), "response_format.json_schema.schema"),
        (
            of_schema(json!({"name": "n", "schema": {}, "strict": "yes"})),
            "response_format.json_schema.strict",
        ),
        (of_schema(json!({"name": "n", "schema": {}, "scheme": {}})), "response_format.json_schema.scheme"),
        (format(json!({"type": "structural_tag"})), "response_format.structures"),
        (format(json!({"type": "structural_tag", "structures": []})), "response_format.triggers"),
        (format(json!({"type": "structural_tag", "format": {}})), "response_format.format"),
        (
            format(
                json!({"type": "structural_tag", "structures": [{"begin": "a", "schema": {}}], "triggers": []}),
            ),
            "response_format.structures[0].end",
        ),
        (
            format(
                json!({"type": "structural_tag", "structures": [{"begin": "a", "end": "b"}], "triggers": []}),
            ),
            "response_format.structures[0].schema",
        ),
        (json!({"structured_outputs": []}), "structured_outputs"),
        (json!({"structured_outputs": {"json": 1}}), "structured_outputs.json"),
        (json!({"structured_outputs": {"json": true}}), "structured_outputs.json"),
        (json!({"structured_outputs": {"regex": ["a"]}}), "structured_outputs.regex"),
        (json!({"structured_outputs": {"choice": "a"}}), "structured_outputs.choice"),
        (json!({"structured_outputs": {"choice": [1]}}), "structured_outputs.choice"),
        (json!({"structured_outputs": {"grammar": {}}}), "structured_outputs.grammar"),
        (json!({"structured_outputs": {"json_object": 1}}), "structured_outputs.json_object"),
        (json!({"structured_outputs": {"structural_tag": "{"}}), "structured_outputs.structural_tag"),
        (
            json!({"structured_outputs": {"structural_tag": {"type": "text"}}}),
            "structured_outputs.structural_tag.type",
        ),
        (json!({"structured_outputs": {"xgrammar": 1}}), "structured_outputs.xgrammar"),
        (
            json!({"structured_outputs": {"disable_additional_properties": true}}),
            "structured_outputs.disable_additional_properties",
        ),
        (json!({"guided_json": [1]}), "guided_json"),
        (json!({"guided_choice": {"a": 1}}), "guided_choice"),
        (json!({"structural_tag": 1}), "structural_tag"),
        // More than one at a time.
        (json!({"guided_json": {"a": 1}, "guided_regex": "a"}), "guided_regex"),
        (json!({"structured_outputs": {"json": {}, "regex": "a"}}), "structured_outputs.regex"),
        (json!({"response_format": {"type": "json_object"}, "guided_json": "true"}), "guided_json"),
        (
            json!({"response_format": {"type": "json_object"}, "structured_outputs": {"json": {}}}),
            "structured_outputs.json",
        ),
    ] {
        let error = asked(members.clone()).expect_err(&members.to_string());
        assert_eq!(error.field(), Some(field), "{members}: {error}");
    }
}

#[test]
fn white_space_is_chosen_by_options_that_agree() {
    let of = |options: Value, more: Value| {
        let mut members = json!({"response_format": {"type": "json_object"}, "structured_outputs": options});
        members.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        asked(members).map(|asked| asked.constraint.unwrap().whitespace())
    };
    for (options, whitespace) in [
        (json!({}), Whitespace::Bounded),
        (json!({"whitespace": "bounded"}), Whitespace::Bounded),
        (json!({"whitespace": "compact"}), Whitespace::Compact),
        (json!({"whitespace": "any"}), Whitespace::Any),
        (json!({"disable_any_whitespace": true}), Whitespace::Compact),
        (json!({"whitespace_pattern": ""}), Whitespace::Compact),
        (json!({"whitespace_pattern": r"[\n\t ]*"}), Whitespace::Any),
        (json!({"whitespace_pattern": r"\s*", "whitespace": "any"}), Whitespace::Any),
    ] {
        assert_eq!(of(options.clone(), json!({})), Ok(whitespace), "{options}");
    }
    let older = json!({"guided_whitespace_pattern": r"\s*"});
    assert_eq!(of(json!({}), older.clone()), Ok(Whitespace::Any));
    for (options, more, field) in [
        (json!({"whitespace": "tight"}), json!({}), "structured_outputs.whitespace"),
        (json!({"whitespace_pattern": "[ ]?"}), json!({}), "structured_outputs.whitespace_pattern"),
        (
            json!({"whitespace": "any", "disable_any_whitespace": true}),
            json!({}),
            "structured_outputs.disable_any_whitespace",
        ),
        (json!({"whitespace": "compact"}), older, "guided_whitespace_pattern"),
        (json!({}), json!({"guided_whitespace_pattern": "x"}), "guided_whitespace_pattern"),
    ] {
        assert_eq!(of(options, more).unwrap_err().field(), Some(field));
    }
}
