//! Spawned processes: their arguments and secret, restarts, and their end with the supervisor. The worker is a script.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process, time::Duration};

use tokio::time::timeout;
use tutti_conductor::supervise::{Succession, Supervisor, WorkerCommand};

use crate::bench::{Bench, limits, soon};

/// A supervisor of one worker, which is a shell script.
fn supervise(bench: &Bench, directory: &Path, script: &str) -> Supervisor {
    let program = directory.join("script");
    fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o700)).unwrap();
    let command =
        WorkerCommand { program, conductor_url: "unix:/workers".into(), lifeline_line: "private".into() };
    Supervisor::start(bench.cluster.clone(), command, 1, Succession::default()).unwrap()
}

/// The script's output, once it is a whole line.
async fn line(path: &Path) -> String {
    soon("the script writes", async {
        loop {
            match fs::read_to_string(path) {
                Ok(text) if text.ends_with('\n') => return text.trim().to_owned(),
                _ => tokio::task::yield_now().await,
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_worker_gets_its_rank_its_secret_and_a_process_group_and_does_not_outlive_the_supervisor() {
    let (bench, directory) = (Bench::new(limits(1)).await, tempfile::tempdir().unwrap());
    let out = directory.path().join("out");
    let script = format!(
        r#"read secret; echo "$* $secret $$ $(cut -d' ' -f5 /proc/$$/stat)" > {}; exec sleep 1000"#,
        out.display()
    );
    let supervisor = supervise(&bench, directory.path(), &script);
    let said = line(&out).await;
    let [rest @ .., pid, group] = &said.split(' ').collect::<Vec<_>>()[..] else { panic!("{said}") };
    assert_eq!(rest, ["--conductor", "unix:/workers", "--rank", "0", "private"]);
    assert_eq!(pid, group);
    assert_ne!(*pid, process::id().to_string());
    soon("the supervisor stops", supervisor.stop()).await;
    assert!(!Path::new("/proc").join(pid).exists(), "{pid} is still there");
}

#[tokio::test]
async fn a_supervisor_without_workers_of_its_own_does_not_end() {
    let bench = Bench::new(limits(1)).await;
    let program = Path::new("/nonexistent").to_owned();
    let command =
        WorkerCommand { program, conductor_url: "unix:/workers".into(), lifeline_line: "private".into() };
    let mut supervisor = Supervisor::start(bench.cluster.clone(), command, 0, Succession::default()).unwrap();
    // A conductor whose workers all join by hand would treat the supervisor's end as a fault.
    let ended = timeout(Duration::from_millis(300), supervisor.ended()).await;
    assert!(ended.is_err(), "the supervisor has ended");
    soon("the supervisor stops", supervisor.stop()).await;
}

#[tokio::test]
async fn a_worker_that_ends_is_started_again() {
    let (bench, directory) = (Bench::new(limits(1)).await, tempfile::tempdir().unwrap());
    let supervisor = supervise(&bench, directory.path(), "exit 70");
    soon("two restarts", async {
        while bench.metric(r#"tutti_worker_restarts_total{worker="0"}"#) < 2 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let status = bench.cluster.status().workers[0].clone();
    assert!(status.detail.contains("exit status: 70"), "{}", status.detail);
    assert!(status.restarts >= 2);
    soon("the supervisor stops", supervisor.stop()).await;
}

#[tokio::test]
async fn a_worker_that_refuses_its_settings_ends_the_start() {
    let (bench, directory) = (Bench::new(limits(1)).await, tempfile::tempdir().unwrap());
    let supervisor = supervise(&bench, directory.path(), "exit 64");
    let error = soon("the fatal error", bench.cluster.fatal()).await;
    assert!(error.message().contains("worker 0"), "{error}");
    soon("the supervisor stops", supervisor.stop()).await;
}

#[tokio::test]
async fn a_worker_that_is_killed_before_it_joins_is_started_again() {
    let (bench, directory) = (Bench::new(limits(1)).await, tempfile::tempdir().unwrap());
    let supervisor = supervise(&bench, directory.path(), "kill -KILL $$");
    soon("two restarts", async {
        while bench.metric(r#"tutti_worker_restarts_total{worker="0"}"#) < 2 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert!(
        !bench.cluster.is_given_up(tutti_proto::Rank(0)),
        "only a process that loads is likely killed for memory"
    );
    soon("the supervisor stops", supervisor.stop()).await;
}
