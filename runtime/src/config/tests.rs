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
    assert_eq!(error.field(), Some("workers"));
}

#[test]
fn an_unknown_setting_is_refused_with_its_path_and_source() {
    let file = file(".toml", "[sim]\nfail_evry = 3\n");
    let flags = serde_json::Map::new();
    let error = layered::<tutti_settings::ConductorSettings>(Some(file.path()), &flags).unwrap_err();
    assert_eq!(error.field(), Some("sim.fail_evry"));
    assert!(error.message().contains("`fail_every`") && error.message().contains(".toml"), "{error}");
}
