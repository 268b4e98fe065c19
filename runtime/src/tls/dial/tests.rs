use crate::tls::{ClusterTransport, roles::Role};

#[test]
fn only_urls_of_processes_are_dialled() {
    let dial = |url: &str| ClusterTransport::default().dial("conductor", url, Role::Conductor);
    for url in ["http://127.0.0.1:1", "http://[::1]:1", "unix:/run/x", "unix:x"] {
        assert!(dial(url).is_ok(), "{url}");
    }
    for url in [
        "",
        "host:50052",
        "127.0.0.1:1",
        "50052",
        "unix:",
        "ftp://127.0.0.1:1",
        "http://",
        "http://:1",
        "http:/x",
    ] {
        let refused = dial(url).unwrap_err().to_string();
        assert_eq!(
            refused,
            format!("conductor: {url:?} is not a URL such as http://10.0.0.1:50052 or unix:/path")
        );
    }
}
