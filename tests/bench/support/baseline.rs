//! The baseline: sglang-router from PyPI, at a pinned version, in front of backends that only stream.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use tutti_load::client::Target;

use super::{
    backends::{Backends, MODEL, TIMEOUT},
    cluster::free_port,
};

pub const PACKAGE: &str = "sglang-router==0.3.2";
/// The cheapest policy of the router.
pub const POLICY: &str = "round_robin";
const START_LIMIT: Duration = Duration::from_secs(60);

pub struct Baseline {
    router: Child,
    pub backends: Backends,
    pub target: Target,
}

impl Baseline {
    /// Starts the router in front of `backends`. Installs it first if it is missing.
    pub async fn start(backends: Backends) -> Result<Self, String> {
        let program = installed()?;
        let (port, metrics) = (free_port()?, free_port()?);
        let log = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sglang-router.log");
        let log = File::create(&log).map_err(|e| format!("{}: {e}", log.display()))?;
        let errors = log.try_clone().map_err(|e| format!("its log: {e}"))?;
        let router = Command::new(program)
            .args(["launch", "--host=127.0.0.1", &format!("--port={port}")])
            .args([&format!("--policy={POLICY}"), "--log-level=warn", "--prometheus-host=127.0.0.1"])
            .args([&format!("--prometheus-port={metrics}"), "--worker-urls"])
            .args(&backends.urls)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(errors)
            .spawn()
            .map_err(|e| format!("sglang-router does not start: {e}"))?;
        let target = Target::named(&format!("http://127.0.0.1:{port}"), MODEL, TIMEOUT)?;
        let baseline = Self { router, backends, target };
        // The router fails requests until it has found its servers, so the bench sends requests until one succeeds.
        let since = Instant::now();
        let body = baseline.target.body("a", 1, 0);
        while let Some(why) = baseline.target.send(body.clone(), 1, |_| {}).await.failure {
            if since.elapsed() > START_LIMIT {
                return Err(format!("sglang-router does not serve after {START_LIMIT:?}: {why}"));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(baseline)
    }

    /// Process id of the router.
    pub fn router(&self) -> u32 {
        self.router.id()
    }
}

impl Drop for Baseline {
    fn drop(&mut self) {
        let _ = self.router.kill();
        let _ = self.router.wait();
    }
}

/// Returns the path of the router's program. Installs it if it is missing.
fn installed() -> Result<PathBuf, String> {
    let venv = Path::new(env!("CARGO_TARGET_TMPDIR")).join(PACKAGE);
    let program = venv.join("bin/smg");
    if program.is_file() {
        return Ok(program);
    }
    eprintln!("installing {PACKAGE} in {}", venv.display());
    // An earlier try may have left an incomplete installation.
    let _ = fs::remove_dir_all(&venv);
    run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    run(Command::new(venv.join("bin/pip")).args(["install", "--quiet", PACKAGE]))?;
    Ok(program)
}

fn run(command: &mut Command) -> Result<(), String> {
    match command.stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{command:?}: {status}")),
        Err(e) => Err(format!("{command:?}: {e}")),
    }
}
