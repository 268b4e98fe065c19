use std::io::Write;

use serde::Deserialize;

use super::*;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Sample {
    workers: u32,
    name: String,
}

impl Default for Sample {
    fn default() -> Self {
        Self { workers: 1, name: "thinker".into() }
    }
}

#[derive(Serialize)]
struct Flags {
    #[serde(skip_serializing_if = "Option::is_none")]
    workers: Option<u32>,
}

fn file(suffix: &str, text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::Builder::new().suffix(suffix).tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

#[test]
fn flags_win_over_the_file_and_the_file_over_defaults() {
    let file = file(".toml", "workers = 3\nname = \"talker\"\n");
    let config: Sample = layered(Some(file.path()), &Flags { workers: Some(5) }).unwrap();
    assert_eq!(config, Sample { workers: 5, name: "talker".into() });
}

#[test]
fn yaml_is_read_by_its_ending() {
    let file = file(".yaml", "workers: 4\n");
    let config: Sample = layered(Some(file.path()), &Flags { workers: None }).unwrap();
    assert_eq!(config.workers, 4);
}

#[test]
fn an_unknown_key_is_refused_by_name() {
    let file = file(".toml", "wrokers = 3\n");
    let error = layered::<Sample>(Some(file.path()), &Flags { workers: None }).unwrap_err();
    assert!(error.to_string().contains("wrokers"), "{error}");
}

#[test]
fn a_wrong_type_names_the_key() {
    let file = file(".toml", "workers = \"many\"\n");
    let error = layered::<Sample>(Some(file.path()), &Flags { workers: None }).unwrap_err();
    assert_eq!(error.field(), Some(format!("{}: workers", file.path().display()).as_str()));
}

#[test]
fn an_unknown_setting_is_refused_with_its_path_and_source() {
    let file = file(".toml", "[sim]\nfail_evry = 3\n");
    let flags = serde_json::Map::new();
    let error = layered::<tutti_settings::ConductorSettings>(Some(file.path()), &flags).unwrap_err();
    let path = file.path().display();
    let said = format!("{path}: sim.fail_evry: there is no such key; did you mean `fail_every`?");
    assert_eq!(error.to_string(), said);
}

#[test]
fn an_unknown_key_gets_the_nearest_one_or_that_of_another_server() {
    let flags = serde_json::Map::new();
    let refused = |text: &str| {
        let file = file(".toml", text);
        let error = layered::<tutti_settings::ConductorSettings>(Some(file.path()), &flags).unwrap_err();
        error.to_string().strip_prefix(&format!("{}: ", file.path().display())).unwrap().to_owned()
    };
    for (text, said) in [
        ("wrokers = 2\n", "wrokers: there is no such key; did you mean `workers`?"),
        (
            "[router]\nmax_bdy_bytes = 2\n",
            "router.max_bdy_bytes: there is no such key; did you mean `max_body_bytes`?",
        ),
        ("abacus = 2\n", "abacus: there is no such key; all are in docs/configuration.md"),
    ] {
        assert_eq!(refused(text), said);
    }
    assert!(refused("tensor_parallel_size = 2\n").contains("--tp T divides"));
    assert!(refused("port = 2\n").contains("--http IP:PORT"));
    // Several problems are each named with their key, and the file once.
    let several = refused("wrokers = 2\nportt = 2\n");
    assert!(several.len() < 200, "{several}");
}

#[test]
fn a_key_of_a_variable_is_refused_like_that_of_a_file() {
    let flags = serde_json::json!({ "wrokers": 2 });
    let error = layered::<tutti_settings::ConductorSettings>(None, &flags).unwrap_err();
    assert!(
        error.to_string().starts_with("wrokers: there is no such key; did you mean `workers`? in "),
        "{error}"
    );
}
