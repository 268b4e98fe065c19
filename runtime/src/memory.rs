//! Free memory of this machine.

use std::fs;

/// Returns the bytes of memory that processes can still allocate: the minimum of the bytes left on the machine and the
/// bytes left in this process's control group. `None` if the system does not say.
pub fn available() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| machine_bytes(&text));
    let group = || {
        let read = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/memory.{name}")).ok();
        let number = |name| read(name)?.trim().parse::<u64>().ok();
        let (limit, used) = (number("max")?, number("current")?);
        Some(
            limit
                .saturating_sub(used.saturating_sub(read("stat").map_or(0, |text| reclaimable_bytes(&text)))),
        )
    };
    machine.into_iter().chain(group()).min()
}

fn machine_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// Bytes of a control group's memory that the kernel frees when memory is needed: cached contents of files.
fn reclaimable_bytes(stat: &str) -> u64 {
    let line = stat.lines().find_map(|line| line.strip_prefix("inactive_file "));
    line.and_then(|bytes| bytes.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests;
