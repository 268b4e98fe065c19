use super::*;

fn refusal(body: &[u8]) -> Error {
    Fields::read(body).err().unwrap()
}

#[test]
fn members_are_taken_by_type_and_leftovers_are_named() {
    let mut fields = Fields::read(br#"{"n": 2, "user": null, "x": "y"}"#).unwrap();
    assert_eq!(fields.take::<u32>("n"), Ok(Some(2)));
    assert_eq!(fields.take::<String>("user"), Ok(None));
    assert_eq!(fields.finish().unwrap_err().field(), Some("x"));
}

#[test]
fn a_wrong_type_is_named_without_a_position() {
    let mut fields = Fields::read(br#"{"n": "two"}"#).unwrap();
    let error = fields.take::<u32>("n").unwrap_err();
    assert_eq!((error.field(), error.message()), (Some("n"), "invalid type: string \"two\", expected u32"));
}

#[test]
fn nested_members_have_full_names() {
    let mut fields = Fields::read(br#"{"a": {"b": 1, "c": 2}}"#).unwrap();
    let inner = fields.take_raw("a").unwrap();
    let mut inner = Fields::of_value("a", inner).unwrap();
    assert_eq!(inner.take::<u32>("b"), Ok(Some(1)));
    assert_eq!(inner.finish().unwrap_err().field(), Some("a.c"));
}

#[test]
fn an_invalid_body_is_refused_with_reason_and_position() {
    assert!(refusal(b"").message().contains("empty"));
    assert!(refusal(b"[1]").message().contains("expected an object"));
    assert!(refusal(b"{\"a\": 1").message().contains("line 1 column 7"));
    assert!(refusal(b"{\"a\": \"\xff\"}").message().contains("byte 7"));
    assert_eq!(refusal(br#"{"a": 1, "a": 2}"#).field(), Some("a"));
}

#[test]
fn a_number_that_json_does_not_have_is_named_by_its_member() {
    for value in ["NaN", "Infinity", "-Infinity"] {
        let body = format!("{{\"prompt\": \"a: b\",\n \"temperature\": {value}, \"n\": 1}}");
        assert_eq!(refusal(body.as_bytes()).field(), Some("temperature"), "{value}");
    }
}

#[test]
fn a_thousand_members_are_too_many() {
    let members: Vec<String> = (0..1000).map(|i| format!("\"m{i}\": 1")).collect();
    assert!(refusal(format!("{{{}}}", members.join(",")).as_bytes()).message().contains("256"));
}

#[test]
fn the_declaration_decides_what_is_refused_and_what_is_ignored() {
    for scope in [Scope::Completions, Scope::Chat] {
        for parameter in parameters::at(scope) {
            let read = |value: &str| {
                Fields::of_body(format!(r#"{{"{}": {value}}}"#, parameter.name).as_bytes(), scope)
                    .map(|fields| fields.members.len())
            };
            match parameter.standing {
                Standing::Refused { why, harmless } => {
                    let error = read(r#"{"a": 1}"#).unwrap_err();
                    assert_eq!(error.field(), Some(parameter.name));
                    assert!(error.message().contains(why), "{error}");
                    assert!(harmless.iter().all(|value| read(value) == Ok(0)), "{}", parameter.name);
                }
                Standing::Ignored => assert_eq!(read("[1]"), Ok(0), "{}", parameter.name),
                Standing::Honoured | Standing::RefusedUnless(_) => assert_eq!(read("1"), Ok(1)),
            }
        }
    }
    let error = Fields::of_body(br#"{"temprature": 1}"#, Scope::Chat).err().unwrap();
    assert_eq!((error.field(), error.message()), (Some("temprature"), UNKNOWN));
}
