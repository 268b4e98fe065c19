use super::*;

fn refused(arguments: &[&str]) -> Option<String> {
    let arguments = ["router"].iter().chain(arguments).map(OsString::from);
    run(arguments).unwrap_err().field().map(str::to_owned)
}

#[test]
fn bad_usage_is_named_before_anything_binds() {
    assert_eq!(refused(&[]).as_deref(), Some("conductor"));
    assert_eq!(refused(&["--conductor", "10.0.0.1:1"]).as_deref(), Some("conductor"));
    assert_eq!(refused(&["--conductor", "http://x y"]).as_deref(), Some("conductor"));
    assert_eq!(refused(&["--conductor", "http://a:1", "--conductor", "b:1"]).as_deref(), Some("conductor"));
    assert_eq!(refused(&["--discover", "nowhere"]).as_deref(), Some("discover"));
    assert_eq!(refused(&["--config", "nowhere.toml"]).as_deref(), Some("config"));
}
