//! Free memory: of this machine, and under the limits of this process's control groups.

mod groups;

use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

use self::groups::Group;

/// Free memory, and the bound that leaves no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeMemory {
    /// Number of bytes.
    pub bytes: u64,
    /// Number of bytes under the same bound, free or not.
    pub total: u64,
    bound: Bound,
}

/// The bound of free memory.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Bound {
    /// The machine has no more.
    Machine,
    /// The limit of a control group, in bytes.
    Group { path: PathBuf, limit: u64 },
}

/// Says how much memory is free, and under which bound.
impl fmt::Display for FreeMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let free = Size(self.bytes);
        match &self.bound {
            Bound::Machine => write!(f, "{free} are free on this machine"),
            Bound::Group { path, limit } => {
                let (limit, path) = (Size(*limit), path.display());
                write!(f, "{free} are free under the limit of {limit} of the control group {path}")
            }
        }
    }
}

/// A number of bytes in the largest unit that it has one of, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 4] =
            [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        match UNITS.iter().find(|(_, bytes)| self.0 >= *bytes) {
            Some((unit, bytes)) => write!(f, "{:.1} {unit}", self.0 as f64 / *bytes as f64),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// The part of a control group's cached file contents that counts as free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cached {
    /// Contents that no process has used lately.
    Idle,
    /// All contents: the kernel drops them before it kills a process.
    All,
}

/// Returns the bytes of memory that processes can allocate without a loss: the minimum of the bytes left on the machine
/// and the bytes left in each of this process's control groups. File contents that are in use are not free. `None` if
/// the system does not say.
pub fn available() -> Option<u64> {
    free_under(Path::new("/"), Cached::Idle).map(|free| free.bytes)
}

/// Returns the memory that processes can allocate before the kernel kills one. `None` if the system does not say.
pub fn allocatable() -> Option<FreeMemory> {
    free_under(Path::new("/"), Cached::All)
}

/// Reads the files of the system whose root directory is `root`.
fn free_under(root: &Path, cached: Cached) -> Option<FreeMemory> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).ok();
    let machine = meminfo.and_then(|text| {
        let bytes = kibibytes(&text, "MemAvailable:")?;
        let total = kibibytes(&text, "MemTotal:").unwrap_or(bytes);
        Some(FreeMemory { bytes, total, bound: Bound::Machine })
    });
    let groups = groups::of_process(root).into_iter().filter_map(|Group { path, version }| {
        let (limit, used) = version.limit_and_use(&path)?;
        let bytes = limit.saturating_sub(used.saturating_sub(version.cached_bytes(&path, cached)));
        let path = Path::new("/").join(path.strip_prefix(root).unwrap_or(&path));
        Some(FreeMemory { bytes, total: limit, bound: Bound::Group { path, limit } })
    });
    // If two bounds are equal, the machine or the innermost group is named, which comes first.
    machine.into_iter().chain(groups).min_by_key(|free| free.bytes)
}

/// The bytes in a line `NAME   N kB` of a file in `/proc`.
pub(crate) fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests;
