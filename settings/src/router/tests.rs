use super::*;

#[test]
fn the_defaults_are_valid_and_zero_is_refused_by_name() {
    assert_eq!(RouterSettings::default().validate(), Ok(()));
    let error = RouterSettings { tokenizer_threads: 0, ..RouterSettings::default() }.validate().unwrap_err();
    assert_eq!(error.field, "tokenizer_threads");
}

#[test]
fn the_defaults_are_valid_and_a_pace_of_zero_is_refused_by_name() {
    assert_eq!(FleetSettings::default().validate(), Ok(()));
    let error = FleetSettings { poll_ms: 0, ..FleetSettings::default() }.validate().unwrap_err();
    assert_eq!(error.field, "fleet.poll_ms");
}

#[test]
fn an_origin_that_no_browser_sends_is_refused() {
    let validate = |origin: &str| {
        RouterSettings { allowed_origins: vec![origin.to_owned()], ..RouterSettings::default() }.validate()
    };
    for origin in
        ["https://chat.example.com", "http://localhost:3000/", "http://[::1]:8080", "tauri://localhost"]
    {
        assert_eq!(validate(origin), Ok(()), "{origin}");
    }
    for origin in [
        "*",
        "",
        "chat.example.com",
        "https://",
        "https://Chat.example.com",
        "https://a.example/chat",
        "null",
        "://chat.example.com",
        "https://chat.example.com:443",
        "http://chat.example.com:80",
    ] {
        let error = validate(origin).unwrap_err();
        assert_eq!(error.field, "allowed_origins");
        assert!(error.to_string().contains(&format!("{origin:?}")), "{error}");
    }
}

#[test]
fn an_origin_that_no_file_is_fetched_from_is_refused() {
    let validate = |origin: &str| {
        RouterSettings { media_origins: vec![origin.to_owned()], ..RouterSettings::default() }.validate()
    };
    for origin in ["https://pictures.example.com", "http://10.0.0.1:3000", "http://[::1]:8080/"] {
        assert_eq!(validate(origin), Ok(()), "{origin}");
    }
    for origin in ["*", "pictures.example.com", "file://x", "tauri://localhost", "https://a.example/b"] {
        let error = validate(origin).unwrap_err();
        assert_eq!(error.field, "media_origins");
        assert!(error.to_string().contains(&format!("{origin:?}")), "{error}");
    }
}
