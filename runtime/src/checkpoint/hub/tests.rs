use super::*;

#[test]
fn the_environment_decides() {
    let home = tempfile::tempdir().unwrap();
    fs::write(home.path().join("token"), "from-file\n").unwrap();
    let options = |extra: &[(&str, &str)]| {
        HubOptions::from_variables(|name| match extra.iter().find(|(key, _)| *key == name) {
            Some((_, value)) => Some((*value).to_owned()),
            None => (name == "HF_HOME").then(|| home.path().to_str().unwrap().to_owned()),
        })
    };
    let plain = options(&[]);
    assert_eq!((plain.endpoint, plain.offline), (None, false));
    assert_eq!(plain.cache, home.path().join("hub"));
    assert_eq!(plain.token.as_deref(), Some("from-file"));

    let set = options(&[
        ("HF_TOKEN", "from-variable"),
        ("HF_ENDPOINT", "http://mirror"),
        ("HF_HUB_OFFLINE", "1"),
        ("HF_HUB_CACHE", "/elsewhere"),
    ]);
    assert_eq!(set.token.as_deref(), Some("from-variable"));
    assert_eq!(set.endpoint.as_deref(), Some("http://mirror"));
    assert_eq!((set.offline, set.cache), (true, PathBuf::from("/elsewhere")));
    assert!(!options(&[("HF_HUB_OFFLINE", "0")]).offline);
}

#[test]
fn a_token_is_not_shown() {
    let options =
        HubOptions { endpoint: None, token: Some("hf_secret".into()), cache: "/x".into(), offline: false };
    assert!(!format!("{options:?}").contains("hf_secret"));
}

#[test]
fn an_index_may_not_reach_out_of_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    for bad in ["../model.safetensors", "/etc/passwd", "x.bin"] {
        let index = serde_json::json!({"weight_map": {"w": bad}});
        fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
        assert!(shards(dir.path()).unwrap_err().contains(bad));
    }
}
