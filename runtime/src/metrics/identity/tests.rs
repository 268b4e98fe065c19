use serde_json::json;

use super::*;

#[test]
fn the_hash_of_settings_leaves_out_own_addresses_alone() {
    let hash = |settings: Value| settings_hash(&settings).expect("a hash");
    let one = hash(json!({ "http": "10.0.0.1:80", "grpc": "10.0.0.1:90", "drain_timeout": 30 }));
    assert_eq!(one, hash(json!({ "http": "10.0.0.2:80", "grpc": "10.0.0.2:90", "drain_timeout": 30 })));
    assert_ne!(one, hash(json!({ "http": "10.0.0.1:80", "grpc": "10.0.0.1:90", "drain_timeout": 31 })));
    // Only a top-level field can be an address of the process itself.
    assert_ne!(hash(json!({ "fleet": { "http": 1 } })), hash(json!({ "fleet": { "http": 2 } })));
}

#[test]
fn a_process_names_its_build_and_settings_once() {
    let metrics = Metrics::default();
    let settings = metrics.identify("router", &json!({ "log": "warn" })).expect("settings that serialise");
    let hashes = || metrics.encode().lines().filter(|line| line.contains("hash=")).collect::<String>();
    let before = hashes();
    settings.loaded(&json!({ "log": "info" })).expect("settings that serialise");
    assert_ne!(before, hashes());
    let text = metrics.encode();
    let build = format!("tutti_build_info{{process=\"router\",version=\"{VERSION}\"}} 1");
    assert!(text.lines().any(|line| line == build), "{text}");
    let configs =
        text.lines().filter(|line| line.starts_with("tutti_config_info{process=\"router\",hash=\""));
    assert_eq!(configs.count(), 1, "{text}");
    assert!(!text.contains(" info\n"), "a type that old parsers refuse: {text}");
}
