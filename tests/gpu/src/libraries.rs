//! Finds the folders with CUDA libraries on this machine, for the loader's search path.

use std::fs;
use std::path::{Path, PathBuf};

/// File names of CUDA libraries. The search path takes folders with at least one of them.
const LIBRARIES: [&str; 4] = ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13", "libnccl.so.2"];
/// Folders of CUDA toolkits, and of drivers in containers.
const PLACES: [&str; 4] = [
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
];

/// Returns the caller's `LD_LIBRARY_PATH`, followed by folders of this machine that hold CUDA libraries.
pub fn search_path() -> String {
    let own = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let found = PLACES.iter().map(PathBuf::from).chain(python_folders());
    let found = found.filter(|folder| LIBRARIES.iter().any(|library| folder.join(library).exists()));
    let folders = own.split(':').filter(|folder| !folder.is_empty()).map(str::to_owned);
    folders.chain(found.map(|folder| folder.display().to_string())).collect::<Vec<_>>().join(":")
}

/// Returns the folders of NVIDIA's Python packages, in virtual environments below `/opt` and in the system's Python.
fn python_folders() -> impl Iterator<Item = PathBuf> {
    let environments = below(Path::new("/opt")).into_iter().flat_map(|folder| [folder.join(".venv"), folder]);
    let roots = environments.chain(["/usr".into(), "/usr/local".into()]);
    roots
        .flat_map(|root| below(&root.join("lib")))
        .filter(|folder| folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3")))
        .flat_map(|python| {
            ["site-packages", "dist-packages"].map(|packages| python.join(packages).join("nvidia"))
        })
        .flat_map(|packages| below(&packages))
        .map(|package| package.join("lib"))
}

fn below(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    folders
}
