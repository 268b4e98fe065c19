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
