use super::*;

/// SHA-256 of a text in hexadecimal.
fn hash(key: &str) -> String {
    ring::digest::digest(&ring::digest::SHA256, key.as_bytes())
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn keys(text: &str) -> (Arc<ApiKeys>, Metrics, tempfile::TempDir) {
    let (directory, metrics) = (tempfile::tempdir().unwrap(), Metrics::default());
    let file = directory.path().join("keys");
    std::fs::write(&file, text).unwrap();
    (read_keys(settings(&file), &metrics).unwrap(), metrics, directory)
}

fn settings(file: &Path) -> RouterSettings {
    RouterSettings { api_key_file: Some(file.to_owned()), ..RouterSettings::default() }
}

fn read_keys(settings: RouterSettings, metrics: &Metrics) -> Result<Arc<ApiKeys>, Error> {
    ApiKeys::read(settings.into(), metrics)
}

fn caller(keys: &ApiKeys, key: &str) -> Result<Caller, Error> {
    keys.identify(Some(&format!("Bearer {key}")), None, None)
}

fn reason(result: Result<Entry, Error>) -> ErrorKind {
    result.err().unwrap().kind()
}

#[test]
fn the_hash_is_that_of_sha256sum() {
    // `printf %s abc | sha256sum`, FIPS 180-2 appendix B.1.
    assert_eq!(hash("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

#[test]
fn a_caller_is_known_by_its_key_alone() {
    let (keys, metrics, _directory) = keys(&format!("a {}\nb {}\n", hash("one"), hash("two")));
    for (authorization, api_key) in [
        (None, None),
        (Some("one"), None),
        (Some("Basic one"), None),
        (Some("Bearer "), None),
        (Some("Bearer three"), None),
        (Some("Bearer on"), Some("one")),
    ] {
        let refused = keys.identify(authorization, api_key, None).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Unauthenticated, "{authorization:?}");
        assert!(!refused.message().contains("three"));
    }
    // The hash of a key is not accepted as a key.
    assert!(caller(&keys, &hash("one")).is_err());
    for (authorization, api_key, name) in
        [(Some("Bearer one"), None, "a"), (Some("bearer  two"), None, "b"), (None, Some("two"), "b")]
    {
        let caller = keys.identify(authorization, api_key, None).unwrap();
        assert_eq!(caller.0.unwrap().line.name, name);
    }
    assert!(
        metrics.encode().contains("tutti_router_requests_unauthenticated_total 7"),
        "{}",
        metrics.encode()
    );
}

#[test]
fn without_a_file_everyone_is_let_in() {
    let keys = read_keys(RouterSettings::default(), &Metrics::default()).unwrap();
    keys.identify(None, None, None).unwrap().enter().unwrap().charge(5);
}

#[test]
fn a_missing_file_is_an_error_of_its_setting() {
    let error = read_keys(settings(Path::new("/nowhere/keys")), &Metrics::default()).err().unwrap();
    assert_eq!(error.field(), Some("api_key_file"));
}

#[test]
fn each_limit_holds_for_its_own_key() {
    let (keys, metrics, _directory) = keys(&format!(
        "many {}\nfew {} concurrent=1\nslow {} requests-per-minute=2\nshort {} tokens-per-minute=10\n",
        hash("1"),
        hash("2"),
        hash("3"),
        hash("4")
    ));
    let [many, few, slow, short] = ["1", "2", "3", "4"].map(|key| caller(&keys, key).unwrap());
    let _held: Vec<Entry> = (0..100).map(|_| many.enter().unwrap()).collect();

    let running = few.enter().unwrap();
    assert_eq!(reason(few.enter()), ErrorKind::RateLimited);
    let clone = running.clone();
    drop(running);
    assert_eq!(reason(few.enter()), ErrorKind::RateLimited);
    drop(clone);
    few.enter().unwrap();

    slow.enter().unwrap();
    slow.enter().unwrap();
    let refused = slow.enter().err().unwrap();
    assert!(
        refused.kind() == ErrorKind::RateLimited && refused.retry_after().unwrap() > Duration::from_secs(20)
    );

    short.enter().unwrap().charge(11);
    assert_eq!(reason(short.enter()), ErrorKind::RateLimited);
    let text = metrics.encode();
    for line in [
        r#"tutti_router_key_requests_total{key="many"} 100"#,
        r#"tutti_router_key_requests_in_flight{key="many"} 100"#,
        r#"tutti_router_key_requests_in_flight{key="few"} 0"#,
        r#"tutti_router_key_requests_refused_total{key="few",limit="concurrent"} 2"#,
        r#"tutti_router_key_requests_refused_total{key="slow",limit="requests"} 1"#,
        r#"tutti_router_key_requests_refused_total{key="short",limit="tokens"} 1"#,
        r#"tutti_router_key_tokens_total{key="short"} 11"#,
    ] {
        assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
    }
}

fn only(keys: &ApiKeys) -> Caller {
    caller(keys, "1").unwrap()
}

#[test]
fn choices_count_as_they_run() {
    let (keys, _, _directory) = keys(&format!("a {} concurrent=8\n", hash("1")));
    let many = only(&keys).enter().unwrap();
    many.reserve(6, 0).unwrap();
    let few = only(&keys).enter().unwrap();
    few.reserve(2, 0).unwrap();
    assert_eq!(reason(only(&keys).enter()), ErrorKind::RateLimited);
    drop(many);
    let too_many = only(&keys).enter().unwrap();
    assert_eq!(too_many.reserve(7, 0).unwrap_err().kind(), ErrorKind::RateLimited);
    let error = too_many.reserve(9, 0).unwrap_err();
    assert_eq!((error.kind(), error.field()), (ErrorKind::InvalidArgument, Some("n")));
    drop((few, too_many));
    assert_eq!(keys.table.read().keys().next().unwrap().usage.state.lock().running, 0);
}

#[test]
fn requests_at_once_use_no_more_tokens_than_the_key_may() {
    let (keys, _, _directory) = keys(&format!("a {} tokens-per-minute=100\n", hash("1")));
    let entered: Vec<Entry> = (0..64).map(|_| only(&keys).enter().unwrap()).collect();
    // Each request reserves more than one minute's tokens, so only one of them is accepted.
    let running: Vec<&Entry> = entered.iter().filter(|entry| entry.reserve(1, 3001).is_ok()).collect();
    assert_eq!(running.len(), 1);
    running[0].charge(3001);
    drop(entered);
    let refused = only(&keys).enter().err().unwrap();
    assert!(refused.retry_after().unwrap() > Duration::from_secs(60 * 28), "{refused:?}");
}

#[test]
fn what_is_reserved_and_not_used_comes_back() {
    let (keys, metrics, _directory) = keys(&format!("a {} tokens-per-minute=100\n", hash("1")));
    let first = only(&keys).enter().unwrap();
    first.reserve(1, 90).unwrap();
    // The exact number replaces the estimate.
    first.reserve(1, 80).unwrap();
    let second = only(&keys).enter().unwrap();
    let refused = second.reserve(1, 40).unwrap_err();
    assert!(refused.retry_after().unwrap() <= Duration::from_secs(60), "{refused:?}");
    first.charge(10);
    drop(first);
    second.reserve(1, 40).unwrap();
    drop(second);
    only(&keys).enter().unwrap().reserve(1, 90).unwrap();
    let line = r#"tutti_router_key_requests_refused_total{key="a",limit="tokens"} 1"#;
    assert!(metrics.encode().contains(line));
}

#[test]
fn a_key_uses_the_priorities_of_its_line() {
    let (keys, _, _directory) = keys(&format!("a {} most-urgent=-2\nb {}\n", hash("1"), hash("2")));
    let entry = only(&keys).enter().unwrap();
    entry.check_priority(-2).unwrap();
    entry.check_priority(8).unwrap();
    let error = entry.check_priority(-3).unwrap_err();
    assert_eq!(error.field(), Some("priority"));
    assert!(error.message().contains("-3") && error.message().contains("-2"), "{error}");
    caller(&keys, "2").unwrap().enter().unwrap().check_priority(-8).unwrap();
    Entry::default().check_priority(-8).unwrap();
}

#[test]
fn a_share_is_that_of_the_name() {
    let (keys, _, _directory) = keys(&format!("a {}\nb {}\n", hash("1"), hash("2")));
    let share = |key| caller(&keys, key).unwrap().enter().unwrap().share();
    assert_eq!((share("1"), share("2")), (Share::of_key("a"), Share::of_key("b")));
    assert!(share("1") != share("2") && !Entry::default().share().is_of_key());
}

#[test]
fn a_refused_request_uses_nothing_of_the_other_limits() {
    let (keys, _, _directory) = keys(&format!("a {} concurrent=1 requests-per-minute=2\n", hash("1")));
    let caller = caller(&keys, "1").unwrap();
    let running = caller.enter().unwrap();
    for _ in 0..5 {
        assert_eq!(reason(caller.enter()), ErrorKind::RateLimited);
    }
    drop(running);
    caller.enter().unwrap();
}

#[tokio::test]
async fn a_changed_file_is_read_and_a_broken_one_is_not() {
    let (keys, _, directory) = keys(&format!("a {} concurrent=1\n", hash("old")));
    let held = caller(&keys, "old").unwrap().enter().unwrap();
    let following = tokio::spawn(keys.clone().follow());
    let replace = |text: &str| {
        // A new file replaces the old one, as in Kubernetes.
        let (new, file) = (directory.path().join("new"), directory.path().join("keys"));
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, file).unwrap();
    };
    let until = async |key: &str| {
        let known = async {
            while caller(&keys, key).is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), known).await.unwrap();
    };
    replace(&format!("a {} concurrent=1\n", hash("new")));
    until("new").await;
    assert!(caller(&keys, "old").is_err());
    // The counted usage of the key is kept, because its name stays.
    assert_eq!(reason(caller(&keys, "new").unwrap().enter()), ErrorKind::RateLimited);
    drop(held);
    caller(&keys, "new").unwrap().enter().unwrap();
    let file = directory.path().join("keys");
    let settings = settings(&file);
    check_api_keys(&settings).unwrap();
    replace("a broken");
    let error = check_api_keys(&settings).unwrap_err();
    assert!(error.field() == Some("api_key_file") && error.message().contains("line 1"), "{error}");
    following.abort();
}

/// Returns keys, and a closure that writes their file (`None` deletes it) and reads it again.
fn reloaded(
    change: impl FnOnce(&mut RouterSettings),
) -> (Arc<ApiKeys>, impl Fn(Option<&str>) -> Result<(), Error>) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("keys");
    std::fs::write(&file, format!("a {}\nb {}\n", hash("one"), hash("two"))).unwrap();
    let mut settings = settings(&file);
    change(&mut settings);
    let keys = read_keys(settings, &Metrics::default()).unwrap();
    let same = keys.clone();
    let reload = move |text: Option<&str>| {
        let _kept = &directory;
        match text {
            Some(text) => std::fs::write(&file, text).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        same.reload(&file)
    };
    (keys, reload)
}

#[test]
fn a_revoked_key_is_refused_whatever_else_the_new_file_has() {
    let (keys, reload) = reloaded(|_| {});
    let known = |key: &str| caller(&keys, key).is_ok();
    // The line of `two` has a mistake, and `one` is not in the file any more.
    let mistake = reload(Some(&format!("b {} speed=1\nc {}\n", hash("two"), hash("three")))).unwrap_err();
    assert!(mistake.message().contains("1 lines with mistakes"), "{mistake}");
    assert_eq!((known("one"), known("two"), known("three")), (false, false, true));
    assert_eq!((keys.metrics.of_file.in_force.get(), keys.metrics.of_file.mistakes.get()), (1, 1));
    reload(Some("")).unwrap();
    assert_eq!((known("three"), keys.metrics.of_file.in_force.get()), (false, 0));
    reload(Some(&format!("a {}", hash("one")))).unwrap();
    assert_eq!((known("one"), keys.metrics.of_file.mistakes.get()), (true, 0));
}

#[test]
fn a_deleted_file_denies_or_keeps_as_the_setting_says() {
    for (gone, is_known) in [(KeyFileGone::Deny, false), (KeyFileGone::Keep, true)] {
        let (keys, reload) = reloaded(|settings| settings.api_key_file_gone = gone);
        let error = reload(None).unwrap_err();
        assert!(error.message().contains("api_key_file_gone"), "{error}");
        assert_eq!(caller(&keys, "one").is_ok(), is_known, "{gone}");
        reload(Some(&format!("a {}", hash("one")))).unwrap();
        assert!(caller(&keys, "one").is_ok());
    }
}

#[tokio::test]
async fn requests_of_a_revoked_key_end_if_the_setting_says_so() {
    for revoked in [RevokedRequests::End, RevokedRequests::Finish] {
        let (keys, reload) = reloaded(|settings| settings.revoked_requests = revoked);
        let [one, two] = ["one", "two"].map(|key| keys.revoked(&caller(&keys, key).unwrap()).unwrap());
        // `a` has another key now, `b` has other limits.
        reload(Some(&format!("a {}\nb {} concurrent=1\n", hash("new"), hash("two")))).unwrap();
        let ends = |request| futures_util::FutureExt::now_or_never(request).is_some();
        assert_eq!((ends(one), ends(two)), (revoked == RevokedRequests::End, false));
    }
}

#[test]
fn an_address_that_guesses_is_refused_before_its_key_is_looked_at() {
    let (keys, _) = reloaded(|settings| settings.max_wrong_keys_per_minute = 3);
    let from = |last: u8, key: &str| {
        let address = IpAddr::from([10, 0, 0, last]);
        keys.identify(None, Some(key), Some(address)).map(drop).map_err(|error| error.kind())
    };
    for _ in 0..3 {
        assert_eq!(from(1, "guess"), Err(ErrorKind::Unauthenticated));
    }
    assert_eq!(from(1, "guess"), Err(ErrorKind::RateLimited));
    assert_eq!(from(1, "one"), Err(ErrorKind::RateLimited), "a guess is not told to be right");
    assert_eq!(from(2, "one"), Ok(()));
    assert_eq!(keys.metrics.of_file.guesses.get(), 2);
    // An address that has sent a right key, such as that of a proxy, is not refused.
    (0..100).for_each(|_| assert_eq!(from(2, "guess"), Err(ErrorKind::Unauthenticated)));
    assert_eq!(from(2, "two"), Ok(()));
}

#[test]
fn a_search_does_not_cost_more_with_more_keys() {
    let lines: String =
        (0..5000).map(|number| format!("key{number} {}\n", hash(&number.to_string()))).collect();
    let (many, ..) = keys(&lines);
    let (few, ..) = keys(&lines[..lines.find('\n').unwrap() + 1]);
    let cost = |keys: &ApiKeys| {
        let began = Instant::now();
        (0..500).for_each(|_| assert!(caller(keys, "wrong").is_err()));
        began.elapsed()
    };
    // The minimum of ten runs, because other tests run at the same time.
    let best = |keys: &ApiKeys| (0..10).map(|_| cost(keys)).min().unwrap();
    assert!(best(&many) < 4 * best(&few), "{:?} for many keys, {:?} for one", best(&many), best(&few));
    assert_eq!(caller(&many, "4999").unwrap().0.unwrap().line.name, "key4999");
}
