//! Gives freed memory back to the system while a process is idle, in builds without jemalloc, which does so by itself
//! (`runtime/executable/allocator.rs`).
//!
//! glibc's allocator keeps what is freed, in an arena per thread, so that a process stays as large as its busiest
//! moment made it. `malloc_trim` returns the pages that nothing uses. It takes milliseconds and holds each arena's lock
//! in turn, so it runs only while no request does. Idle connections end later, and their memory is freed then, so it
//! runs several times while a process stays idle, ever more seldom.

use std::time::Duration;

use tokio::{task::spawn_blocking, time::sleep};

/// Time between two looks at the process.
const INTERVAL: Duration = Duration::from_secs(2);

/// Number of arenas of the allocator. glibc makes up to eight per core. A page returns only once all that is on it is
/// freed, so memory that is spread over many arenas leaves more pages in use than the same memory in a few.
#[cfg(target_env = "gnu")]
const ARENAS: std::ffi::c_int = 2;
/// The variable by which an operator sets the number of arenas. It wins.
#[cfg(target_env = "gnu")]
const ARENAS_VARIABLE: &str = "MALLOC_ARENA_MAX";

/// Limits the arenas of the allocator. Called before a process starts threads, each of which would get its own arena.
#[cfg(target_env = "gnu")]
pub fn limit_arenas() {
    /// The option of `mallopt(3)` for the number of arenas.
    const M_ARENA_MAX: std::ffi::c_int = -8;
    unsafe extern "C" {
        /// `mallopt(3)`.
        fn mallopt(option: std::ffi::c_int, value: std::ffi::c_int) -> std::ffi::c_int;
    }
    if std::env::var_os(ARENAS_VARIABLE).is_none() {
        // SAFETY: the declaration is that of glibc, which this target links. The function may be called at any time
        // from any thread, and changes nothing that is allocated.
        unsafe { mallopt(M_ARENA_MAX, ARENAS) };
    }
}

/// Other allocators have no arenas to limit.
#[cfg(not(target_env = "gnu"))]
pub fn limit_arenas() {}

/// Gives memory back while the process is idle. Never completes.
pub async fn give_back(mut is_idle: impl FnMut() -> bool) {
    let mut idleness = Idleness::default();
    loop {
        sleep(INTERVAL).await;
        if idleness.look(is_idle()) {
            // A failure means that the runtime ends.
            let _ = spawn_blocking(trim).await;
        }
    }
}

/// Number of looks for which a process has been idle.
#[derive(Default)]
struct Idleness(u32);

impl Idleness {
    /// Takes a look. Returns true after 1, 2, 4, 8 looks and so on at an idle process.
    fn look(&mut self, is_idle: bool) -> bool {
        self.0 = if is_idle { self.0.saturating_add(1) } else { 0 };
        self.0.is_power_of_two()
    }
}

/// Returns free pages to the system.
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
