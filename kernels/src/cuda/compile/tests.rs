use super::{KernelCache, SOURCES, file_name, fnv, virtual_architecture};

#[test]
fn a_file_is_named_by_all_that_decides_its_contents() {
    let (first, second) = (&SOURCES[0], &SOURCES[1]);
    let name = file_name(first, "compute_90", Some(13000));
    assert_eq!(name, file_name(first, "compute_90", Some(13000)));
    assert!(name.starts_with("rms_norm-compute_90-") && name.ends_with(".ptx"), "{name}");
    for other in [
        file_name(second, "compute_90", Some(13000)),
        file_name(first, "compute_80", Some(13000)),
        file_name(first, "compute_90", Some(13010)),
        file_name(first, "compute_90", None),
    ] {
        assert_ne!(name, other);
    }
    // The test vector of RFC 9923 for "a".
    assert_eq!(fnv(b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
}

#[test]
fn a_cached_file_is_read_and_no_compiler_is_asked() {
    let dir = tempfile::tempdir().unwrap();
    let cache = KernelCache::new(Some(dir.path().to_owned()));
    let source = &SOURCES[0];
    std::fs::write(dir.path().join(file_name(source, "compute_0", Some(1))), "cached").unwrap();
    assert_eq!(cache.ptx(source, "compute_0", 1).unwrap(), "cached");
    // No compiler knows this architecture, and this machine may have no compiler.
    assert!(cache.ptx(source, "compute_0", 2).is_err());
}

#[test]
fn what_was_compiled_ahead_goes_before_the_cache_whatever_the_driver() {
    let [own, ahead] = [(), ()].map(|()| tempfile::tempdir().unwrap());
    let source = &SOURCES[0];
    let cache = KernelCache::new(Some(own.path().to_owned())).with_compiled(Some(ahead.path().to_owned()));
    std::fs::write(own.path().join(file_name(source, "compute_0", Some(1))), "cached").unwrap();
    for (name, what) in [("compute_0", "for 0 and later"), ("compute_0a", "for 0 alone")] {
        assert_ne!(cache.ptx(source, "compute_0", 1).unwrap(), what);
        std::fs::write(ahead.path().join(file_name(source, name, None)), what).unwrap();
        assert_eq!(cache.ptx(source, "compute_0", 1).unwrap(), what);
        assert_eq!(cache.ptx(source, "compute_0", 2).unwrap(), what);
    }
    let error = cache.ptx(&SOURCES[1], "compute_0", 1).unwrap_err().to_string();
    assert!(error.contains(&*ahead.path().to_string_lossy()) && error.contains(SOURCES[1].name), "{error}");
}

#[test]
fn architectures_are_named_as_gpus_are() {
    assert_eq!(virtual_architecture("sm_90a").as_deref(), Some("compute_90a"));
    assert_eq!(virtual_architecture("sm_120").as_deref(), Some("compute_120"));
    for wrong in ["90a", "sm_", "sm_a", "sm_90aa", "sm_9x", "compute_90", "sm_90 -DX"] {
        assert_eq!(virtual_architecture(wrong), None, "{wrong}");
    }
}
