//! The libraries of CUDA, which are opened at run time. cudarc panics if a program calls a library that is absent, so
//! the functions here check for it first.

use std::env;
use std::ffi::OsString;

use cudarc::driver::result;

/// The library or device that is missing, and where it was searched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    /// A library that the loader does not find.
    #[error("{library} is missing: {purpose}. It was looked for in {searched}")]
    Library {
        /// File name of the library.
        library: &'static str,
        /// The library's purpose, and the package that contains it.
        purpose: &'static str,
        /// Searched folders, in order.
        searched: String,
    },
    /// A library that lacks a needed function, because it is too old.
    #[error("{library} is here, and it lacks {symbol}: it is too old")]
    Symbol {
        /// File name of the library.
        library: &'static str,
        /// Name of the function.
        symbol: &'static str,
    },
    /// A driver that finds no GPU.
    #[error("libcuda.so.1 is here, and it finds no GPU: {0}")]
    Gpu(String),
}

/// File name of the driver's library.
const DRIVER: &str = "libcuda.so.1";

impl Missing {
    /// True if the machine has no NVIDIA driver. Most machines without a GPU have none.
    pub fn is_driver(&self) -> bool {
        matches!(self, Self::Library { library: DRIVER, .. })
    }
}

/// Returns the number of GPUs, at least 1. Opens the libraries that a [`CudaDevice`](super::CudaDevice) needs.
pub fn gpus() -> Result<usize, Missing> {
    let count = gpus_without_compiler()?;
    // SAFETY: opening the library runs its initialisers. It is NVIDIA's own.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err(library("libnvrtc.so.13", "it compiles the kernels and comes with CUDA 13"));
    }
    Ok(count)
}

/// Like [`gpus`], but without the compiler, for a worker whose kernels are compiled ahead of time.
pub fn gpus_without_compiler() -> Result<usize, Missing> {
    // SAFETY: opening the library runs its initialisers. It is NVIDIA's own, or an emulation of it.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(library(DRIVER, "it comes with the NVIDIA driver"));
    }
    let no_gpu = |error: result::DriverError| Missing::Gpu(format!("{error}"));
    result::init().map_err(no_gpu)?;
    let count = result::device::get_count().map_err(no_gpu)?;
    let count = usize::try_from(count).unwrap_or(0);
    if count == 0 {
        return Err(Missing::Gpu("it counts 0; CUDA_VISIBLE_DEVICES may hide them".to_owned()));
    }
    // SAFETY: opening the library runs its initialisers. It is NVIDIA's own, or an emulation of it.
    if !unsafe { cudarc::cublaslt::sys::is_culib_present() } {
        return Err(library("libcublasLt.so.13", "it multiplies matrices and comes with CUDA 13"));
    }
    Ok(count)
}

fn library(library: &'static str, purpose: &'static str) -> Missing {
    Missing::Library { library, purpose, searched: searched() }
}

/// Returns the folders that the loader searches, in order.
pub(super) fn searched() -> String {
    folders(env::var_os("LD_LIBRARY_PATH"))
}

fn folders(path: Option<OsString>) -> String {
    let own = match path.filter(|path| !path.is_empty()) {
        Some(path) => format!("LD_LIBRARY_PATH ({})", path.to_string_lossy()),
        None => "LD_LIBRARY_PATH (empty)".to_owned(),
    };
    format!("{own}, the loader's cache (ldconfig -p), /lib and /usr/lib")
}

#[cfg(test)]
mod tests;
