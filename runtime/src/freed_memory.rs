//! Gives freed memory back to the system while a process is idle.
//!
//! glibc's allocator keeps what is freed, in an arena per thread, so that a process stays as large as its busiest
//! moment made it. `malloc_trim` returns the pages that nothing uses. It takes milliseconds and holds each arena's lock
//! in turn, so it runs only while no request does, and only after memory has grown.

use std::{fs, time::Duration};

use tokio::{task::spawn_blocking, time::sleep};

/// Time between two looks at the process.
const INTERVAL: Duration = Duration::from_secs(2);
/// Growth of the process in bytes that is worth a search for free pages.
const WORTHWHILE: usize = 1 << 20;

/// Gives memory back whenever the process is idle and has grown since the last time. Never completes.
pub async fn give_back(mut is_idle: impl FnMut() -> bool) {
    let mut kept = 0;
    loop {
        sleep(INTERVAL).await;
        if is_idle() && resident() > kept + WORTHWHILE {
            // A failure means that the runtime ends.
            kept = spawn_blocking(trimmed).await.unwrap_or(usize::MAX - WORTHWHILE);
        }
    }
}

/// Returns free pages to the system, and the bytes that the process keeps.
fn trimmed() -> usize {
    trim();
    resident()
}

/// Bytes of the process in memory. 0 if the system does not say.
fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    let kibibytes = line.trim().trim_end_matches(" kB").parse::<usize>().unwrap_or(0);
    kibibytes * 1024
}

#[cfg(target_env = "gnu")]
fn trim() {
    unsafe extern "C" {
        /// `malloc_trim(3)`.
        fn malloc_trim(pad: usize) -> std::ffi::c_int;
    }
    // SAFETY: the declaration is that of glibc, which this target links. The function may be called at any time from
    // any thread, and frees nothing that is allocated.
    unsafe { malloc_trim(0) };
}

/// Other allocators give memory back by themselves, or keep it.
#[cfg(not(target_env = "gnu"))]
fn trim() {}

#[cfg(test)]
mod tests;
