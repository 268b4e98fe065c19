use std::{
    os::unix::fs::{DirBuilderExt, symlink},
    process::Command,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use rustix::fs::{CWD, FileType, Mode, mknodat};

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
        // `PrivateDirectory` uses this mode whatever the umask is.
        fs::DirBuilder::new().mode(0o700).create(directory).unwrap();
    }
    for directory in [&dead, &other] {
        fs::write(directory.join(OWNER), "").unwrap();
        fs::write(directory.join("workers.sock"), "").unwrap();
    }
    remove_abandoned(parent.path());
    let left = [alive.path(), &dead, &new, &other].map(Path::exists);
    assert_eq!(left, [true, false, true, true]);
}

#[test]
fn traps_of_other_users_hold_up_no_start_and_lose_no_file() {
    let (parent, victim) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let named = |name: &str| parent.path().join(name);
    // An owner file that is a FIFO. A blocking open would wait for a writer that never comes.
    let fifo = named("tutti-conductor-fifo");
    fs::DirBuilder::new().mode(0o700).create(&fifo).unwrap();
    mknodat(CWD, fifo.join(OWNER), FileType::Fifo, Mode::RWXU, 0).unwrap();
    // A symbolic link to a directory that looks abandoned.
    fs::write(victim.path().join(OWNER), "").unwrap();
    symlink(victim.path(), named("tutti-conductor-link")).unwrap();
    // An owner file that is a symbolic link.
    let linked = named("tutti-conductor-linked");
    fs::DirBuilder::new().mode(0o700).create(&linked).unwrap();
    symlink("/etc/passwd", linked.join(OWNER)).unwrap();
    // A directory that other users may write to.
    let open = named("tutti-conductor-open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
    fs::write(open.join(OWNER), "").unwrap();

    let (done, ended) = mpsc::channel();
    let path = parent.path().to_owned();
    thread::spawn(move || done.send(PrivateDirectory::new_in(&path).map(drop)));
    ended.recv_timeout(Duration::from_secs(20)).expect("the start waits for the FIFO").unwrap();
    assert!(victim.path().join(OWNER).exists());
    assert!([&fifo, &linked, &open].iter().all(|path| path.exists()));
}

#[test]
fn a_shared_directory_stays_until_the_last_worker_of_a_killed_conductor_has_ended() {
    let parent = tempfile::tempdir().unwrap();
    let shared = PrivateDirectory::new_in(parent.path()).unwrap();
    let mut worker = shared.lock().sharing(|| Command::new("sleep").arg("1000").spawn()).unwrap();
    // A process that is no worker does not hold the directory.
    let mut other = Command::new("sleep").arg("1000").spawn().unwrap();
    // The kernel closes the files of a killed conductor, and its directory stays.
    let PrivateDirectory { directory, owner } = shared;
    let path = directory.keep();
    drop(owner);
    remove_abandoned(parent.path());
    assert!(path.exists(), "the worker needs it");
    worker.kill().unwrap();
    worker.wait().unwrap();
    // Processes of other tests may have been started with the lock, too.
    let end = Instant::now() + Duration::from_secs(20);
    while path.exists() && Instant::now() < end {
        remove_abandoned(parent.path());
        thread::yield_now();
    }
    let is_left = path.exists();
    other.kill().unwrap();
    other.wait().unwrap();
    assert!(!is_left, "nothing needs it");
}
