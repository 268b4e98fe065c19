use std::{
    fs::Permissions,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    process::{Child, Command},
};

use serde_json::json;

use super::*;

fn sleeper() -> Child {
    Command::new("sleep").arg("1000").process_group(0).spawn().unwrap()
}

fn none() -> Result<Vec<Value>, Error> {
    Ok(Vec::new())
}

#[test]
fn a_directory_is_this_users_alone_and_belongs_to_one_conductor() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("state");
    let first = StateDirectory::open(&path).unwrap();
    assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
    let error = StateDirectory::open(&path).unwrap_err();
    assert_eq!(error.field(), Some(FIELD));
    let holder = format!("belongs to the running conductor with pid {}", std::process::id());
    assert!(error.message().contains(&holder), "{error}");
    drop(first);
    fs::set_permissions(&path, Permissions::from_mode(0o750)).unwrap();
    let error = StateDirectory::open(&path).unwrap_err();
    assert!(error.message().contains("has mode 750"), "{error}");
    let link = parent.path().join("link");
    std::os::unix::fs::symlink(parent.path(), &link).unwrap();
    assert!(StateDirectory::open(&link).unwrap_err().message().contains("is no directory"));
}

#[tokio::test]
async fn equal_workers_are_taken_over_with_their_secret_and_settings() {
    let parent = tempfile::tempdir().unwrap();
    let path = &parent.path().join("state");
    let mut worker = sleeper();
    let first = StateDirectory::open(path).unwrap();
    let began = first.succeed(json!({ "model": "a" }), || Ok(vec![json!(1)])).await.unwrap();
    assert_eq!((began.life, began.survivors.len()), (0, 0));
    first.started(Rank(3), worker.id()).unwrap();
    drop(first);
    let mode = path.join(RECORD).metadata().unwrap().mode();
    assert_eq!(mode & 0o777, 0o600);

    let second = StateDirectory::open(path).unwrap();
    let next =
        second.succeed(json!({ "model": "a" }), || panic!("the settings are those of the first")).await;
    let next = next.unwrap();
    assert_eq!((next.life, &next.secret, next.worker_settings), (1, &began.secret, vec![json!(1)]));
    assert_eq!(next.survivors[&Rank(3)].id().pid, worker.id());
    assert_eq!(next.survivors.len(), 1);

    // A conductor that ends by itself leaves no worker.
    second.kill_all();
    worker.wait().unwrap();
    drop(second);
    let third = StateDirectory::open(path).unwrap().succeed(json!({ "model": "a" }), none).await.unwrap();
    assert!(third.survivors.is_empty());
    assert_ne!(third.secret, began.secret);
}

#[tokio::test]
async fn workers_that_hold_something_else_are_ended() {
    let parent = tempfile::tempdir().unwrap();
    let path = &parent.path().join("state");
    let mut worker = sleeper();
    let first = StateDirectory::open(path).unwrap();
    let began = first.succeed(json!({ "model": "a" }), none).await.unwrap();
    first.started(Rank(0), worker.id()).unwrap();
    drop(first);
    let second = StateDirectory::open(path).unwrap();
    let next = second.succeed(json!({ "model": "b" }), none).await.unwrap();
    assert!(next.survivors.is_empty() && next.life == 0 && next.secret != began.secret);
    assert!(!worker.wait().unwrap().success());
}

#[tokio::test]
async fn a_pid_that_belongs_to_another_process_by_now_is_no_survivor() {
    let mut worker = sleeper();
    let id = ProcessId::of(worker.id()).unwrap();
    let earlier = ProcessId { started: id.started - 1, ..id };
    assert!(Survivor::find(earlier).is_none());
    let found = Survivor::find(id).unwrap();
    let record = Record { workers: [(0, id)].into(), ..Record::of_this_boot() };
    assert_eq!(record.survivors().len(), 1);
    assert!(Record { boot: "another".into(), ..record }.survivors().is_empty());
    found.end().await;
    // It has ended, and nobody has waited for it yet.
    assert_eq!(ProcessId::of(worker.id()), None);
    worker.wait().unwrap();
}

#[test]
fn the_first_difference_is_named() {
    let before = json!({ "model": "a", "groups": [{ "threads": 1 }, { "threads": 2 }] });
    assert_eq!(difference(&before, &before), None);
    let now = json!({ "model": "a", "groups": [{ "threads": 1 }, { "threads": 3 }] });
    assert_eq!(difference(&before, &now).as_deref(), Some("groups.1.threads was 2, and is 3"));
    let fewer = json!({ "groups": [{ "threads": 1 }, { "threads": 2 }] });
    assert_eq!(difference(&before, &fewer).as_deref(), Some(r#"model was "a", and is null"#));
    assert_eq!(difference(&fewer, &before).as_deref(), Some(r#"model was null, and is "a""#));
}

#[tokio::test]
async fn workers_in_a_record_of_another_version_are_ended() {
    let parent = tempfile::tempdir().unwrap();
    let path = &parent.path().join("state");
    let mut worker = sleeper();
    let first = StateDirectory::open(path).unwrap();
    first.succeed(json!({ "model": "a" }), none).await.unwrap();
    first.started(Rank(0), worker.id()).unwrap();
    drop(first);
    let mut record: Value = serde_json::from_slice(&fs::read(path.join(RECORD)).unwrap()).unwrap();
    record["later"] = json!(true);
    fs::write(path.join(RECORD), record.to_string()).unwrap();

    let second = StateDirectory::open(path).unwrap();
    let next = second.succeed(json!({ "model": "a" }), none).await.unwrap();
    assert_eq!((next.life, next.survivors.len()), (0, 0));
    assert!(!worker.wait().unwrap().success(), "it was killed");
}

#[tokio::test]
async fn the_rest_of_a_replica_that_has_lost_a_rank_is_ended() {
    let parent = tempfile::tempdir().unwrap();
    let path = &parent.path().join("state");
    let mut workers: Vec<_> = (0..4).map(|_| sleeper()).collect();
    let first = StateDirectory::open(path).unwrap();
    first.succeed(json!({ "model": "a" }), none).await.unwrap();
    for (rank, worker) in (0..).map(Rank).zip(&workers) {
        first.started(rank, worker.id()).unwrap();
    }
    drop(first);
    workers[1].kill().unwrap();
    workers[1].wait().unwrap();

    let second = StateDirectory::open(path).unwrap();
    let mut next = second.succeed(json!({ "model": "a" }), none).await.unwrap();
    assert_eq!(next.survivors.len(), 3);
    next.end_broken_replicas(&Topology::all_in_one(4, 2), &second).await;
    assert_eq!(next.survivors.keys().copied().collect::<Vec<_>>(), [Rank(2), Rank(3)]);
    assert!(!workers[0].wait().unwrap().success(), "it was killed");
    assert_eq!(second.record.lock().workers.keys().copied().collect::<Vec<_>>(), [2, 3]);
    second.kill_all();
    workers.iter_mut().skip(2).for_each(|worker| assert!(!worker.wait().unwrap().success()));
}
