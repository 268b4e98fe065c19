use axum::http::HeaderValue;

use super::*;

fn checked(headers: &[(&'static str, &'static str)]) -> Result<(), ErrorKind> {
    let mut map = HeaderMap::new();
    for &(name, value) in headers {
        map.insert(name, HeaderValue::from_static(value));
    }
    let allowed = ["https://chat.example.com".to_owned()];
    check(&Uri::from_static("/v1/completions"), &map, &allowed).map_err(|error| error.kind())
}

const JSON: (&str, &str) = ("content-type", "application/json");

#[test]
fn other_clients_and_pages_of_this_server_are_let_in() {
    for headers in [
        &[("host", "gpu.cluster.local:8000"), JSON][..],
        &[("host", "127.0.0.1:8000"), ("content-type", "application/x-www-form-urlencoded")],
        &[("host", "127.0.0.1:8000"), ("origin", "http://127.0.0.1:8000"), JSON],
        &[
            ("host", "localhost:8000"),
            ("origin", "http://localhost:8000"),
            ("sec-fetch-site", "same-origin"),
            JSON,
        ],
        &[("host", "[::1]:8000"), ("origin", "http://[::1]:8000"), JSON],
        &[("host", "10.1.2.3:8000"), ("sec-fetch-site", "none")],
        &[
            ("host", "api.example.com"),
            ("origin", "https://chat.example.com"),
            ("sec-fetch-site", "cross-site"),
            JSON,
        ],
    ] {
        assert_eq!(checked(headers), Ok(()), "{headers:?}");
    }
}

#[test]
fn pages_of_other_origins_are_refused() {
    for headers in [
        &[("host", "127.0.0.1:8000"), ("origin", "https://evil.example"), ("content-type", "text/plain")][..],
        &[("host", "127.0.0.1:8000"), ("origin", "https://evil.example"), JSON],
        &[("host", "127.0.0.1:8000"), ("origin", "null"), JSON],
        // Another port is another origin.
        &[("host", "127.0.0.1:8000"), ("origin", "http://127.0.0.1:9000"), JSON],
        &[("host", "127.0.0.1:8000"), ("sec-fetch-site", "cross-site")],
        &[("host", "127.0.0.1:8000"), ("sec-fetch-site", "same-site"), JSON],
        // The page's name resolves to this machine.
        &[("host", "evil.example:8000"), ("origin", "http://evil.example:8000"), JSON],
        &[("host", "evil.example:8000"), ("sec-fetch-site", "same-origin")],
        &[("host", "localhost.evil.example"), ("origin", "http://localhost.evil.example"), JSON],
        // A page of this server must send JSON as well.
        &[
            ("host", "127.0.0.1:8000"),
            ("origin", "http://127.0.0.1:8000"),
            ("content-type", "text/plain; charset=x"),
        ],
        &[("origin", "http://127.0.0.1:8000"), JSON],
    ] {
        assert_eq!(checked(headers), Err(ErrorKind::Forbidden), "{headers:?}");
    }
}
