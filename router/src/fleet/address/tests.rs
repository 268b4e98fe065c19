use super::*;

fn refused(urls: &[&str], discover: Option<&str>) -> Option<String> {
    let urls: Vec<String> = urls.iter().map(|url| (*url).to_owned()).collect();
    check(&urls, discover).err().and_then(|error| error.field().map(str::to_owned))
}

#[test]
fn an_invalid_address_is_refused_by_the_setting_s_name() {
    assert_eq!(refused(&["http://a:1", "http://b:1"], Some("conductors:50051")), None);
    assert_eq!(refused(&[], Some("[::1]:50051")), None);
    assert_eq!(refused(&["unix:/run/tutti/cluster.sock"], None), None);
    for urls in
        [&[][..], &["unix:"], &["a:1"], &["ftp://a:1"], &["http://x y"], &["http://a:1", "http://a:1"]]
    {
        assert_eq!(refused(urls, None).as_deref(), Some("conductor"), "{urls:?}");
    }
    for name in ["conductors", ":1", "conductors:", "conductors:0", "conductors:70000"] {
        assert_eq!(refused(&[], Some(name)).as_deref(), Some("discover"), "{name:?}");
    }
}

#[test]
fn a_conductor_elsewhere_needs_certificates_or_the_flag() {
    let plain = ClusterTransport::default();
    let reach = |url: &str, transport: &ClusterTransport| check_reach(&[url.to_owned()], None, transport);
    for near in ["http://127.0.0.1:1", "http://[::1]:1", "http://localhost:1", "unix:/run/x"] {
        assert!(reach(near, &plain).is_ok(), "{near}");
    }
    for far in ["http://10.0.0.1:1", "http://conductor:1", "http://[2001:db8::1]:1", "https://127.0.0.1:1"] {
        let error = reach(far, &plain).unwrap_err();
        assert_eq!(error.field(), Some("conductor"));
        assert!(error.message().contains("--cluster-tls-cert"), "{error}");
    }
    let error = reach("http://10.0.0.1:50052", &plain).unwrap_err();
    let message = error.message();
    assert!(message.contains("10.0.0.1:50052") && message.contains("--insecure-plaintext"), "{error}");
    let error = check_reach(&[], Some("conductors:50052"), &plain).unwrap_err();
    assert_eq!(error.field(), Some("discover"));
    assert!(reach("http://10.0.0.1:1", &Access::insecure().transport).is_ok());
}
