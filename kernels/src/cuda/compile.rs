//! Compilation of the kernels' sources by NVRTC, and the cache of its output.
//!
//! The output is PTX for the GPU's architecture, which the driver translates further. The name of a file in the cache
//! is a hash of the source, the options and the driver's version, so that no file is ever stale. The name of a file
//! that was compiled ahead of time is a hash of the source and the options only, because the machine that compiles may
//! have no driver.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::sys;

use super::sources::{SOURCES, Source};
use crate::DeviceError;

/// Options of every compilation, besides the architecture.
const OPTIONS: &[&str] = &["--std=c++17", "--fmad=false", "-lineinfo"];

/// Compiles a source for an architecture such as `compute_90`. Returns the PTX and the compiler's log, which is empty
/// without warnings. An error holds the log.
pub fn compile(source: &Source, architecture: &str) -> Result<(String, String), String> {
    // SAFETY: the call has no preconditions; it tries to open the library.
    if !unsafe { sys::is_culib_present() } {
        return Err("libnvrtc.so.13 is missing".to_owned());
    }
    let failed = |what: &str, error: NvrtcError| format!("{}: {what}: {error}", source.name);
    let text = CString::new(source.text()).map_err(|error| format!("{}: {error}", source.name))?;
    let name = CString::new(source.name).map_err(|error| error.to_string())?;
    let program = result::create_program(&text, Some(&name)).map_err(|error| failed("NVRTC", error))?;
    let mut options = vec![format!("--gpu-architecture={architecture}")];
    options.extend(OPTIONS.iter().map(|&option| option.to_owned()));
    // SAFETY: the program is valid until it is destroyed at the end of this block.
    unsafe {
        let compiled = result::compile_program(program, &options);
        let log = result::get_program_log(program).map(text_of).unwrap_or_default();
        let ptx = match compiled {
            Ok(()) => result::get_ptx(program).map(text_of).map_err(|error| failed("its PTX", error)),
            Err(error) => Err(format!("{}\n{log}", failed(architecture, error))),
        };
        let _ = result::destroy_program(program);
        ptx.map(|ptx| (ptx, log))
    }
}

/// The text before the first NUL.
fn text_of(bytes: Vec<std::ffi::c_char>) -> String {
    let bytes: Vec<u8> = bytes.into_iter().map(|byte| byte as u8).collect();
    CStr::from_bytes_until_nul(&bytes)
        .map(|text| text.to_string_lossy().trim().to_owned())
        .unwrap_or_default()
}

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct KernelCache {
    /// Folder of the cache. If it is `None`, the kernels are compiled at every start.
    dir: Option<PathBuf>,
    /// Folder that [`compile_all`] has filled. It is searched first. The cache never writes to it.
    compiled: Option<PathBuf>,
}

impl KernelCache {
    /// Uses the folder `dir`, which is created when the first file is written.
    pub fn new(dir: Option<PathBuf>) -> Self {
        Self { dir, compiled: None }
    }

    /// Also uses kernels from a folder that [`compile_all`] has filled. Kernels that this folder lacks come from the
    /// cache or the compiler.
    pub fn with_compiled(self, compiled: Option<PathBuf>) -> Self {
        Self { compiled, ..self }
    }

    /// Uses `tutti/kernels` in the user's cache folder, which is `XDG_CACHE_HOME`, or `.cache` in `HOME`.
    pub fn of_user() -> Self {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let caches = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
        Self::new(caches.map(|caches| caches.join("tutti/kernels")))
    }

    /// Returns the PTX of a source: compiled ahead of time, from the cache, or from the compiler. If the cache cannot
    /// be written, the next start compiles the source again.
    pub(super) fn ptx(
        &self,
        source: &Source,
        architecture: &str,
        driver: i32,
    ) -> Result<String, DeviceError> {
        let file = self.dir.as_ref().map(|dir| dir.join(file_name(source, architecture, Some(driver))));
        // Code for exactly this architecture (`a`) is preferred to code that also runs on later architectures.
        let ahead = [format!("{architecture}a"), architecture.to_owned()]
            .map(|name| self.compiled.as_ref().map(|dir| dir.join(file_name(source, &name, None))));
        let known = ahead.iter().chain([&file]).flatten().find_map(|file| fs::read_to_string(file).ok());
        if let Some(ptx) = known.filter(|ptx| !ptx.is_empty()) {
            return Ok(ptx);
        }
        let (ptx, _) = compile(source, architecture).map_err(|why| {
            DeviceError::Unsupported(match &self.compiled {
                Some(dir) => {
                    format!("{why}, and {} has no {} for {architecture}", dir.display(), source.name)
                }
                None => why,
            })
        })?;
        if let Some(file) = file {
            let _ = write(&file, &ptx);
        }
        Ok(ptx)
    }
}

/// Compiles all sources for an architecture such as `compute_90a` into `dir`, where
/// [`with_compiled`](KernelCache::with_compiled) finds them, and returns the number of files.
pub fn compile_all(dir: &Path, architecture: &str) -> Result<usize, String> {
    for source in SOURCES {
        let (ptx, _) = compile(source, architecture)?;
        let file = dir.join(file_name(source, architecture, None));
        write(&file, &ptx).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok(SOURCES.len())
}

/// Returns NVRTC's name for a GPU's architecture: `compute_90a` for `sm_90a`. Returns `None` if `name` has another
/// form.
pub fn virtual_architecture(name: &str) -> Option<String> {
    let number = name.strip_prefix("sm_")?;
    let digits = number.trim_end_matches(['a', 'f']);
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && number.len() <= digits.len() + 1).then(|| format!("compute_{number}"))
}

/// Returns the name of a file in the cache, or of a file compiled ahead of time if `driver` is `None`.
fn file_name(source: &Source, architecture: &str, driver: Option<i32>) -> String {
    let stem = source.name.trim_end_matches(".cu");
    let key = format!("{}\0{architecture}\0{OPTIONS:?}\0{driver:?}", source.text());
    format!("{stem}-{architecture}-{:032x}.ptx", fnv(key.as_bytes()))
}

/// Writes a file and then renames it, so that a worker that starts at the same time sees the whole file or none.
fn write(file: &Path, text: &str) -> io::Result<()> {
    let dir = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(dir)?;
    let part = dir.join(format!(
        ".{}-{}",
        std::process::id(),
        file.file_name().unwrap_or_default().to_string_lossy()
    ));
    fs::write(&part, text)?;
    fs::rename(&part, file).inspect_err(|_| drop(fs::remove_file(&part)))
}

/// FNV-1a of 128 bits (Fowler, Noll, Vo; RFC 9923). The hash need not resist attacks, because the files are the user's
/// own.
fn fnv(bytes: &[u8]) -> u128 {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    bytes.iter().fold(OFFSET, |hash, &byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests;
