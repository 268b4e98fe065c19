//! Threads of the host that prepare weights while they are loaded.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Number of threads of the host that a device may use.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostThreads(pub(super) usize);

impl HostThreads {
    /// Runs `task` for each index below `tasks`, in any order, on these threads, of which the caller's is one.
    pub(super) fn run(self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= tasks {
                    break;
                }
                task(index);
            }
        };
        thread::scope(|scope| {
            for _ in 1..self.0.min(tasks) {
                // If the system has no more threads, those that there are do all tasks.
                if thread::Builder::new().name("weights".to_owned()).spawn_scoped(scope, work).is_err() {
                    break;
                }
            }
            work();
        });
    }
}

#[cfg(test)]
mod tests;
