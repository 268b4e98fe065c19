//! Runs the body of a test in a process of its own, on emulated GPUs.
//!
//! A process opens the libraries on the loader's path once, and reads the settings from the environment once. So a test
//! starts its own executable again with the right path and settings, and runs its body in the new process.

#![allow(clippy::print_stdout)]

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// Environment variable with the name of the test that a child process runs.
const TEST: &str = "EMULATED_TEST";
/// Environment variable with a child process's rank.
const RANK: &str = "EMULATED_TEST_RANK";
/// Environment variable with the folder that the child processes of a test share.
const FOLDER: &str = "EMULATED_TEST_FOLDER";
/// Line that a child process prints after its body has returned.
const WELL: &str = "the body of the test returned";

/// For each library, the name that programs open and the file that Cargo builds.
const LIBRARIES: &[(&str, &str)] = &[
    ("libcuda.so.1", "libtutti_emulated_driver.so"),
    ("libcuda.so", "libtutti_emulated_driver.so"),
    ("libcublasLt.so.13", "libtutti_emulated_cublaslt.so"),
    ("libcublasLt.so", "libtutti_emulated_cublaslt.so"),
    ("libnccl.so.2", "libtutti_emulated_nccl.so"),
    ("libnccl.so", "libtutti_emulated_nccl.so"),
];

/// One process of a test.
#[derive(Debug)]
pub struct Process {
    /// Index among the processes of the test, from 0.
    pub rank: usize,
    /// A folder that the processes of the test share.
    pub folder: PathBuf,
}

impl Process {
    /// Ends the process as successful, without dropping any value.
    pub fn end(&self) -> ! {
        println!("{WELL}");
        std::process::exit(0)
    }
}

/// The outcome of a process.
#[derive(Debug)]
pub struct Ended {
    /// True if the body returned, or called [`Process::end`].
    pub well: bool,
    /// Text that the process printed, with errors and reports.
    pub text: String,
}

/// Emulated GPUs for a test.
#[derive(Debug)]
pub struct Gpus {
    count: usize,
    variables: Vec<(String, String)>,
}

impl Gpus {
    /// Returns `count` devices with default settings.
    pub fn new(count: usize) -> Self {
        Gpus { count, variables: Vec::new() }
    }

    /// Sets a variable of the environment.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.variables.push((name.to_owned(), value.to_string()));
        self
    }

    /// Runs `body` in a process of its own, and fails unless the body returns. `test` is the name of the calling test.
    /// Returns the text that the process printed. Inside the new process, this function does not return.
    pub fn run(self, test: &str, body: impl FnOnce(&Process)) -> String {
        let ended = self.processes(test, 1, body).remove(0);
        assert!(ended.well, "{test} failed on the emulated GPU:\n{}", ended.text);
        ended.text
    }

    /// Runs `body` in `count` processes at once and returns the outcome of each.
    pub fn processes(self, test: &str, count: usize, body: impl FnOnce(&Process)) -> Vec<Ended> {
        if std::env::var(TEST).is_ok_and(|name| name == test) {
            let rank = std::env::var(RANK).ok().and_then(|rank| rank.parse().ok());
            let folder = std::env::var_os(FOLDER).map(PathBuf::from);
            let (Some(rank), Some(folder)) = (rank, folder) else { panic!("{RANK} or {FOLDER} is missing") };
            let process = Process { rank, folder };
            body(&process);
            process.end()
        }
        let folder = match tempfile::tempdir() {
            Ok(folder) => folder,
            Err(error) => panic!("no temporary folder: {error}"),
        };
        link_libraries(folder.path());
        let children: Vec<Child> = (0..count).map(|rank| self.start(test, rank, folder.path())).collect();
        children.into_iter().map(ended).collect()
    }

    fn start(&self, test: &str, rank: usize, folder: &Path) -> Child {
        let executable = std::env::current_exe().unwrap_or_default();
        let mut path = folder.as_os_str().to_owned();
        for more in
            [nvrtc().map(PathBuf::into_os_string), std::env::var_os("LD_LIBRARY_PATH")].into_iter().flatten()
        {
            path.push(":");
            path.push(more);
        }
        let child = Command::new(executable)
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env("LD_LIBRARY_PATH", path)
            .env("EMULATED_GPUS", self.count.to_string())
            .env(TEST, test)
            .env(RANK, rank.to_string())
            .env(FOLDER, folder)
            .envs(self.variables.iter().cloned())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        match child {
            Ok(child) => child,
            Err(error) => panic!("the test does not start itself again: {error}"),
        }
    }
}

fn ended(child: Child) -> Ended {
    match child.wait_with_output() {
        Ok(Output { status, stdout, stderr }) => {
            let text = [stdout, stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
            // The exit status alone proves nothing: a child process that runs no test succeeds, too.
            Ended { well: status.success() && text.contains(WELL), text }
        }
        Err(error) => Ended { well: false, text: error.to_string() },
    }
}

/// Makes links to the libraries in a folder, under the names that programs open. Cargo builds the libraries in the
/// folder of the test's executable.
fn link_libraries(folder: &Path) {
    let executable = std::env::current_exe().unwrap_or_default();
    let built = executable.parent().unwrap_or(Path::new("."));
    for (name, file) in LIBRARIES {
        let library = built.join(file);
        if let Err(error) = symlink(&library, folder.join(name)) {
            panic!("no link to {}: {error}", library.display());
        }
    }
}

/// Returns the folder of NVIDIA's NVRTC, if it is installed: `NVRTC_LIB`, or the folder to which `tests/tools/nvrtc`
/// installs it.
pub fn nvrtc() -> Option<PathBuf> {
    let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/nvrtc/lib");
    let named = std::env::var_os("NVRTC_LIB").map(PathBuf::from);
    named.into_iter().chain([installed]).find(|folder| folder.join("libnvrtc.so.13").exists())
}
