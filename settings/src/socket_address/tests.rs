use super::parse;
use crate::{ConductorSettings, RouterProcessSettings};

#[test]
fn addresses_are_read_in_the_forms_that_users_write() {
    let read = |text| parse(text).unwrap().to_string();
    assert_eq!(read("10.0.0.1:8000"), "10.0.0.1:8000");
    assert_eq!(read("[::1]:8000"), "[::1]:8000");
    assert_eq!(read("8000"), "127.0.0.1:8000");
    assert_eq!(read(":8000"), "0.0.0.0:8000");
    assert_eq!(read("*:8000"), "0.0.0.0:8000");
    assert_eq!(read("localhost:8000"), "127.0.0.1:8000");
    assert_eq!(read("LocalHost:0"), "127.0.0.1:0");
}

#[test]
fn a_refusal_names_the_value_and_the_fault() {
    for (text, why) in [
        ("nowhere", "has no port"),
        ("nowhere:8000", "has no IP address"),
        ("127.0.0.1", "has no port"),
        ("::1", "has no port"),
        ("[::1]", "has no port"),
        ("localhost", "has no port"),
        ("localhost:", "has no port from 0 to 65535"),
        (":65536", "has no port from 0 to 65535"),
        ("65536", "is no port from 0 to 65535"),
        ("http://127.0.0.1:8000", "has a scheme, http"),
        ("127.0.0.1:8000/v1", "has no port from 0 to 65535"),
        ("", "is no address"),
    ] {
        let refused = parse(text).unwrap_err();
        assert!(refused.starts_with(&format!("{text:?} {why}")), "{refused}");
        assert!(refused.contains("IP:PORT"), "{refused}");
    }
}

#[test]
fn files_and_variables_have_the_same_forms_as_flags() {
    let read = |text: &str| serde_json::from_str::<ConductorSettings>(text);
    let settings = read(
        r#"{ "http": ":81", "grpc": 82, "operations": "localhost:83", "worker_listen": ":84", "cluster_grpc": 85 }"#,
    );
    let settings = settings.unwrap();
    assert_eq!(settings.addresses.http.to_string(), "0.0.0.0:81");
    assert_eq!(settings.addresses.grpc.to_string(), "127.0.0.1:82");
    assert_eq!(settings.addresses.operations.unwrap().to_string(), "127.0.0.1:83");
    assert_eq!(settings.membership.worker_listen.unwrap().to_string(), "0.0.0.0:84");
    assert_eq!(settings.membership.cluster_grpc.unwrap().to_string(), "127.0.0.1:85");
    assert_eq!(read(r#"{ "operations": null }"#).unwrap().addresses.operations, None);
    for text in [r#"{ "http": "nowhere" }"#, r#"{ "operations": "nowhere" }"#] {
        let refused = read(text).unwrap_err().to_string();
        assert!(refused.contains(r#""nowhere" has no port"#), "{refused}");
    }
    for text in
        [r#"{ "http": true }"#, r#"{ "grpc": -1 }"#, r#"{ "operations": [] }"#, r#"{ "cluster_grpc": true }"#]
    {
        let refused = read(text).unwrap_err().to_string();
        assert!(refused.contains("expected a text or a whole number"), "{refused}");
    }
    let refused = read(r#"{ "http": 65536 }"#).unwrap_err().to_string();
    assert!(refused.contains(r#""65536" is no port"#), "{refused}");
    let router: RouterProcessSettings = serde_json::from_str(r#"{ "http": "localhost:81" }"#).unwrap();
    assert_eq!(router.addresses.http.to_string(), "127.0.0.1:81");
}
