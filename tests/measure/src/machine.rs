//! A description of the machine that figures were measured on.

use std::fs;

use serde::Serialize;

/// The machine of a run.
#[derive(Debug, Serialize)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Machine {
    pub cpu: String,
    pub threads: usize,
    pub memory_gib: f64,
    pub kernel: String,
    /// Mean number of runnable processes over the last minute. If it is well above 0 at the start of a run, other
    /// programs kept the machine busy.
    pub load_1m: f64,
}

impl Machine {
    /// Describes this machine as Linux reports it.
    pub fn this() -> Self {
        let field = |file: &str, key: &str| {
            let text = fs::read_to_string(file).unwrap_or_default();
            let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default().to_owned();
            line.split_once(':').map_or(String::new(), |(_, value)| value.trim().to_owned())
        };
        let memory = field("/proc/meminfo", "MemTotal");
        let kib: f64 = memory.trim_end_matches(" kB").parse().unwrap_or(0.0);
        let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
        Self {
            load_1m: load.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0),
            cpu: field("/proc/cpuinfo", "model name"),
            threads: std::thread::available_parallelism().map_or(0, usize::from),
            memory_gib: (kib / 1024.0 / 1024.0 * 10.0).round() / 10.0,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
        }
    }
}
