use super::*;

#[test]
fn it_is_private_and_goes_away() {
    let parent = tempfile::tempdir().unwrap();
    let directory = PrivateDirectory::new_in(parent.path()).unwrap();
    let path = directory.path().to_owned();
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    drop(directory);
    assert!(!path.exists());
}

#[test]
fn only_what_a_dead_conductor_left_is_removed() {
    let parent = tempfile::tempdir().unwrap();
    let alive = PrivateDirectory::new_in(parent.path()).unwrap();
    let named = |name: &str| parent.path().join(name);
    let (dead, new, other) = (named("tutti-conductor-dead"), named("tutti-conductor-new"), named("other"));
    for directory in [&dead, &new, &other] {
        fs::create_dir(directory).unwrap();
    }
    for directory in [&dead, &other] {
        fs::write(directory.join(OWNER), "").unwrap();
        fs::write(directory.join("workers.sock"), "").unwrap();
    }
    remove_abandoned(parent.path());
    let left = [alive.path(), &dead, &new, &other].map(Path::exists);
    assert_eq!(left, [true, false, true, true]);
}
