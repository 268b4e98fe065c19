//! sglang-router, another project's router, before backends that only stream: its own program, from PyPI, at a version that
//! does not change.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use tutti_load::client::Target;

use crate::{
    backends::{Backends, MODEL, TIMEOUT},
    cluster::free_port,
};

pub const PACKAGE: &str = "sglang-router==0.3.2";
/// Takes turns, which costs least of what it can do.
pub const POLICY: &str = "round_robin";
const START_LIMIT: Duration = Duration::from_secs(60);

pub struct Rival {
    router: Child,
    pub backends: Backends,
    pub target: Target,
}

impl Rival {
    /// Installs it where that has not been done yet.
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
        let rival = Self { router, backends, target };
        // It takes requests before it has found its servers, and fails them.
        let since = Instant::now();
        let body = rival.target.body("a", 1, 0);
        while let Some(why) = rival.target.send(body.clone(), 1, |_| {}).await.failure {
            if since.elapsed() > START_LIMIT {
                return Err(format!("sglang-router does not serve after {START_LIMIT:?}: {why}"));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(rival)
    }

    /// Its process id.
    pub fn router(&self) -> u32 {
        self.router.id()
    }
}

impl Drop for Rival {
    fn drop(&mut self) {
        let _ = self.router.kill();
        let _ = self.router.wait();
    }
}

/// Its program.
fn installed() -> Result<PathBuf, String> {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(PACKAGE);
    let program = place.join("bin/smg");
    if program.is_file() {
        return Ok(program);
    }
    eprintln!("installing {PACKAGE} in {}", place.display());
    // What an earlier try has left may be half of it.
    let _ = fs::remove_dir_all(&place);
    run(Command::new("python3").args(["-m", "venv"]).arg(&place))?;
    run(Command::new(place.join("bin/pip")).args(["install", "--quiet", PACKAGE]))?;
    Ok(program)
}

fn run(command: &mut Command) -> Result<(), String> {
    match command.stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{command:?}: {status}")),
        Err(e) => Err(format!("{command:?}: {e}")),
    }
}
