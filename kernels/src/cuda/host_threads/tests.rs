use std::sync::{Barrier, Mutex};

use super::*;

#[test]
fn each_task_runs_once_whatever_the_number_of_threads() {
    for (threads, tasks) in [(1, 0), (1, 5), (4, 3), (3, 100), (0, 2)] {
        let done = Mutex::new(Vec::new());
        HostThreads(threads).run(tasks, &|index| done.lock().unwrap().push(index));
        let mut done = done.into_inner().unwrap();
        done.sort_unstable();
        assert_eq!(done, Vec::from_iter(0..tasks), "{threads} threads");
    }
}

#[test]
fn tasks_run_at_once() {
    // No task ends before all three have begun.
    let all = Barrier::new(3);
    HostThreads(3).run(3, &|_| {
        all.wait();
    });
}
