//! Configuration files and values: of checkpoints, clusters and operators.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use serde::{Serialize, de::DeserializeOwned};
use tutti_settings::{ByteSize, ClusterAddress, ConductorSettings, RouterProcessSettings};

/// Runs one input. Its first byte selects the file or value to read.
pub fn run(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    let directory = Directory::shared();
    match kind % 8 {
        0 => {
            let mut parts = rest.split(|byte| *byte == 0);
            directory.write("config.json", parts.next().unwrap_or_default());
            if let Some(generation) = parts.next() {
                directory.write("generation_config.json", generation);
            }
            tutti_models::fuzzing::config(directory.dir());
        }
        1 => settings::<ConductorSettings>(&directory.write("c.toml", rest), |s| s.validate().is_ok()),
        2 => settings::<ConductorSettings>(&directory.write("c.yaml", rest), |s| s.validate().is_ok()),
        3 => settings::<RouterProcessSettings>(&directory.write("r.toml", rest), |_| true),
        4 => tutti_conductor::fuzzing::topology(&directory.write("t.toml", rest)),
        5 => tutti_conductor::fuzzing::topology(&directory.write("t.yaml", rest)),
        6 => tutti_router::fuzzing::files(rest),
        _ => values(&String::from_utf8_lossy(rest)),
    }
    directory.clear();
}

/// Reads a file of settings. Checks that printed settings are read back unchanged.
fn settings<S>(path: &Path, validate: impl Fn(&S) -> bool)
where
    S: Default + Serialize + DeserializeOwned,
{
    let Ok(read) = tutti_runtime::config::layered::<S>(Some(path), &()) else { return };
    let valid = validate(&read);
    let printed = tutti_runtime::config::print(&read).expect("settings are printed");
    let again: S = serde_json::from_str(&printed).expect("what is printed is read");
    assert_eq!(tutti_runtime::config::print(&again).ok(), Some(printed));
    assert_eq!(validate(&again), valid);
}

/// Parses single values. Checks that displayed values are parsed back unchanged.
fn values(text: &str) {
    if let Ok(size) = text.parse::<ByteSize>() {
        assert_eq!(size.to_string().parse(), Ok(size));
    }
    if let Ok(address) = text.parse::<ClusterAddress>() {
        assert_eq!(address.to_string().parse(), Ok(address));
    }
}

/// Removes the files that this process's inputs have left, and their directory.
pub fn remove_files() {
    fs::remove_dir_all(Directory::shared().dir()).expect("a directory");
}

/// A directory in memory for the files of an input.
pub struct Directory(PathBuf);

impl Directory {
    /// Returns the directory of this process.
    pub fn shared() -> &'static Self {
        static SHARED: LazyLock<Directory> = LazyLock::new(|| {
            let base = Path::new("/dev/shm");
            let base = if base.is_dir() { base.to_owned() } else { std::env::temp_dir() };
            let path = base.join(format!("tutti-fuzz-{}", std::process::id()));
            Directory(path)
        });
        // Missing before the first input, and after `remove_files`.
        fs::create_dir_all(&SHARED.0).expect("a directory");
        &SHARED
    }

    /// Returns the directory's path.
    pub fn dir(&self) -> &Path {
        &self.0
    }

    /// Returns the path of a file in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Writes a file into the directory. Returns the path.
    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, bytes).expect("a file");
        path
    }

    /// Removes all files of the directory.
    pub fn clear(&self) {
        let mut files = fs::read_dir(&self.0).expect("a directory");
        let removed: io::Result<()> = files.try_for_each(|file| fs::remove_file(file?.path()));
        removed.expect("files");
    }
}
