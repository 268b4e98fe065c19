//! A conductor and its workers, started from the release build and observed from the outside.
#![allow(dead_code, reason = "each bench uses some of it")]

use std::{
    ffi::OsStr,
    fs,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use tutti_load::client::Target;

const START_LIMIT: Duration = Duration::from_secs(300);
/// Unit of CPU times in /proc. It is a hundredth of a second on every Linux.
const TICKS_PER_SECOND: f64 = 100.0;

pub struct Cluster {
    conductor: Child,
    spawned: Instant,
    url: String,
    pub target: Target,
}

/// Times of a start.
#[derive(Serialize)]
pub struct Start {
    /// Seconds from the start of the process until it is ready.
    ready_s: f64,
    /// Seconds from the start of the process to the first token of a request that is sent when the process is ready.
    first_token_s: f64,
}

impl Cluster {
    /// Starts a conductor and waits until it is ready.
    pub async fn start(args: &[impl AsRef<OsStr>]) -> Result<Self, String> {
        let (http, grpc) = (free_port()?, free_port()?);
        let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("conductor-{http}.log"));
        let log = fs::File::create(&log).map_err(|e| format!("{}: {e}", log.display()))?;
        let spawned = Instant::now();
        let conductor = Command::new(env!("CARGO_BIN_EXE_conductor"))
            .args(args)
            .args([format!("--http=127.0.0.1:{http}"), format!("--grpc=127.0.0.1:{grpc}")])
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .map_err(|e| format!("the conductor does not start: {e}"))?;
        let url = format!("http://127.0.0.1:{http}");
        let target = wait_until_ready(&url, spawned).await?;
        Ok(Self { conductor, spawned, url, target })
    }

    /// Measures the time to the first token. Call it right after [`Cluster::start`].
    pub async fn first_token(&self) -> Result<Start, String> {
        let ready_s = self.spawned.elapsed().as_secs_f64();
        let record = self.target.generate(&[1; 16], 1, 0).await;
        match record.failure {
            Some(why) => Err(format!("{}: {why}", self.url)),
            None => Ok(Start { ready_s, first_token_s: self.spawned.elapsed().as_secs_f64() }),
        }
    }

    /// The conductor's process id.
    pub fn conductor(&self) -> u32 {
        self.conductor.id()
    }

    /// Process id of one worker.
    pub fn worker(&self) -> Result<u32, String> {
        self.workers()?.first().copied().ok_or_else(|| "the conductor has no worker".to_owned())
    }

    /// Process ids of all workers.
    pub fn workers(&self) -> Result<Vec<u32>, String> {
        children(self.conductor.id())
    }

    /// Sends SIGINT to the conductor and waits until the process has ended.
    pub fn stop(mut self) -> Result<(), String> {
        let pid = Pid::from_raw(self.conductor.id() as i32).ok_or("no process id")?;
        kill_process(pid, Signal::INT).map_err(|e| format!("Ctrl-C: {e}"))?;
        match self.conductor.wait() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("the conductor ended with {status}")),
            Err(e) => Err(format!("the conductor cannot be waited for: {e}")),
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // No process may outlive a failed bench. Workers die with their conductor. Errors are ignored, because `kill`
        // fails if the conductor has already ended.
        let _ = self.conductor.kill();
        let _ = self.conductor.wait();
    }
}

/// Waits until a server lists its models and is ready.
pub async fn wait_until_ready(url: &str, since: Instant) -> Result<Target, String> {
    loop {
        // To list its models, the server needs one worker that has described its model. To be ready, it needs all
        // workers.
        let target = Target::new(url, None, Duration::from_secs(600)).await;
        match target {
            Ok(target) if target.ready().await => return Ok(target),
            _ if since.elapsed() > START_LIMIT => {
                return Err(format!("{url} is not ready after {START_LIMIT:?}"));
            }
            _ => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Returns a free port.
pub fn free_port() -> Result<u16, String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|e| format!("no free port: {e}"))?;
    listener.local_addr().map(|address| address.port()).map_err(|e| format!("no free port: {e}"))
}

/// Process ids of the children of a process.
pub fn children(parent: u32) -> Result<Vec<u32>, String> {
    let parent = parent.to_string();
    let processes = fs::read_dir("/proc").map_err(|e| format!("/proc: {e}"))?;
    Ok(processes
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| stat(*pid).is_ok_and(|fields| fields[1] == parent))
        .collect())
}

/// Fields of /proc/PID/stat that follow the command name: first the state, then the parent. The command name may
/// contain spaces.
fn stat(pid: u32) -> Result<Vec<String>, String> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).map_err(|e| format!("process {pid}: {e}"))?;
    let (_, fields) = text.rsplit_once(')').ok_or_else(|| format!("process {pid}: no stat"))?;
    Ok(fields.split_whitespace().map(str::to_owned).collect())
}

/// CPU time of a process in user and kernel mode, in seconds.
pub fn cpu_seconds(pid: u32) -> Result<f64, String> {
    let fields = stat(pid)?;
    let ticks = |index: usize| fields.get(index).and_then(|f| f.parse::<f64>().ok()).unwrap_or(0.0);
    Ok((ticks(11) + ticks(12)) / TICKS_PER_SECOND)
}

/// Peak resident memory of a process, in bytes.
pub fn peak_memory(pid: u32) -> Result<u64, String> {
    let text =
        fs::read_to_string(format!("/proc/{pid}/status")).map_err(|e| format!("process {pid}: {e}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| format!("process {pid}: no VmHWM"))
}
