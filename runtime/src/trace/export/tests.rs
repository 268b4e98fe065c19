use super::*;

fn refusal(url: &str) -> String {
    match Collector::configured(Some(url)) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("{url:?} is taken"),
    }
}

#[test]
fn only_urls_of_collectors_are_taken() {
    for url in ["http://localhost:4317", "http://collector", "http://[::1]:4317", "HTTP://10.0.0.1:4317/"] {
        assert!(matches!(Collector::configured(Some(url)), Ok(Some(_))), "{url}");
    }
    let refused = [
        ("collector:4317", "has no scheme"),
        ("127.0.0.1:4317", "has no scheme"),
        ("collector", "has no scheme"),
        ("ftp://collector:4317", "has another scheme"),
        ("grpc://collector:4317", "has another scheme"),
        ("https://collector:4317", "asks for TLS"),
        ("", "is no URL"),
        ("http://", "is no URL"),
        ("/collector", "has no host"),
        ("http://a b", "is no URL"),
    ];
    for (url, why) in refused {
        let message = refusal(url);
        assert!(
            message.contains("otlp_endpoint") && message.contains(&format!("{url:?} {why}")),
            "{message}"
        );
        assert!(message.contains("http://HOST:PORT"), "{message}");
    }
}
