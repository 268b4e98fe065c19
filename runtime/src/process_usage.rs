//! Resources that this process has: memory, time of processors, descriptors, and the time of its start.

use std::{
    fs,
    sync::OnceLock,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use rustix::{
    process::{Resource, getrlimit},
    time::{ClockId, clock_gettime},
};
use tutti_proto::cluster::v1 as pb;

use crate::memory::kibibytes;

/// Ticks per second of the times in `/proc`, for programs of any architecture (`USER_HZ` in Linux).
const TICKS_PER_SECOND: u64 = 100;

/// The start, read once: two readings of the clocks would differ, and look like a restart.
static STARTED_US: OnceLock<Option<u64>> = OnceLock::new();

/// Reads the bytes of memory that this process has.
pub fn resident_bytes() -> Option<u64> {
    kibibytes(&fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// Reads the resources of this process. A number that the system does not say is absent.
pub fn read() -> pb::ProcessUsage {
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    let cpu = Duration::new(cpu.tv_sec.unsigned_abs(), u32::try_from(cpu.tv_nsec).unwrap_or_default());
    pb::ProcessUsage {
        resident_bytes: resident_bytes(),
        cpu_us: u64::try_from(cpu.as_micros()).ok(),
        // The directory that is read is open, too.
        open_descriptors: fs::read_dir("/proc/self/fd")
            .ok()
            .map(|open| open.count().saturating_sub(1) as u64),
        max_descriptors: getrlimit(Resource::Nofile).current,
        started_us: *STARTED_US.get_or_init(started_us),
    }
}

/// Start of this process, in microseconds since the Unix epoch.
fn started_us() -> Option<u64> {
    let ticks = start_ticks(&fs::read_to_string("/proc/self/stat").ok()?)?;
    let up = clock_gettime(ClockId::Boottime);
    let up = Duration::new(up.tv_sec.try_into().ok()?, up.tv_nsec.try_into().ok()?);
    let age = up.checked_sub(Duration::from_millis(ticks * (1000 / TICKS_PER_SECOND)))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    u64::try_from(now.checked_sub(age)?.as_micros()).ok()
}

/// The start of a process in ticks since the machine's start, from its `/proc/PID/stat`. The name of the process, in
/// parentheses, may have spaces and parentheses.
fn start_ticks(stat: &str) -> Option<u64> {
    // Field 22. The text behind the name begins with field 3.
    stat.rsplit_once(')')?.1.split_whitespace().nth(22 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests;
