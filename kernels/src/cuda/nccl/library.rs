//! `libnccl.so.2`, opened at run time.
//!
//! Types and constants come from cudarc. cudarc's functions are not used: they do not look for the file name that
//! NVIDIA's packages install, and they panic if a symbol is absent.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use cudarc::nccl::sys;

use crate::cuda::library::{Missing, searched};

/// File name of the library.
const LIBRARY: &str = "libnccl.so.2";

/// Result of a successful call.
pub(super) const SUCCESS: u32 = sys::ncclResult_t::ncclSuccess as u32;
/// Result of a call that NCCL does not support in this way, such as two ranks on one GPU.
pub(super) const INVALID_USAGE: u32 = sys::ncclResult_t::ncclInvalidUsage as u32;
/// Result of a call that continues in the background.
pub(super) const IN_PROGRESS: u32 = sys::ncclResult_t::ncclInProgress as u32;

macro_rules! functions {
    ($($name:ident($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions of the library. Results are plain numbers, because a newer library may return results that
        /// cudarc's enum does not have.
        #[allow(non_snake_case, reason = "the names of NCCL")]
        pub(super) struct Nccl {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Nccl {
            fn load(library: &libloading::Library) -> Result<Self, Missing> {
                Ok(Self {
                    $($name: {
                        let symbol = stringify!($name);
                        // SAFETY: the signature is that of `nccl.h`. The library is never closed.
                        let found = unsafe { library.get(symbol) };
                        *found.map_err(|_| Missing::Symbol { library: LIBRARY, symbol })?
                    },)*
                })
            }
        }
    };
}

functions! {
    ncclGetUniqueId(*mut sys::ncclUniqueId) -> u32;
    ncclCommInitRankConfig(*mut sys::ncclComm_t, c_int, sys::ncclUniqueId, c_int, *mut sys::ncclConfig_t) -> u32;
    ncclCommGetAsyncError(sys::ncclComm_t, *mut u32) -> u32;
    ncclCommAbort(sys::ncclComm_t) -> u32;
    ncclAllReduce(*const c_void, *mut c_void, usize, u32, u32, sys::ncclComm_t, *mut c_void) -> u32;
    ncclSend(*const c_void, usize, u32, c_int, sys::ncclComm_t, *mut c_void) -> u32;
    ncclRecv(*mut c_void, usize, u32, c_int, sys::ncclComm_t, *mut c_void) -> u32;
    ncclGroupStart() -> u32;
    ncclGroupEnd() -> u32;
    ncclGetErrorString(u32) -> *const c_char;
    ncclGetLastError(sys::ncclComm_t) -> *const c_char;
}

impl Nccl {
    /// Describes a result other than success. Includes NCCL's message about the last error.
    pub(super) fn describe(&self, code: u32, handle: Option<sys::ncclComm_t>) -> String {
        // SAFETY: the function takes any number.
        let kind = text(unsafe { (self.ncclGetErrorString)(code) });
        // SAFETY: the function takes null or a live communicator.
        let last = text(unsafe { (self.ncclGetLastError)(handle.unwrap_or(std::ptr::null_mut())) });
        if last.is_empty() { kind } else { format!("{kind} ({last})") }
    }
}

fn text(string: *const c_char) -> String {
    if string.is_null() {
        return String::new();
    }
    // SAFETY: the library's strings end with a NUL and live until the next error.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().trim().to_owned()
}

/// Opens the library, once per process. It is never closed.
pub(super) fn open() -> Result<&'static Nccl, Missing> {
    static NCCL: OnceLock<Result<Nccl, Missing>> = OnceLock::new();
    let opened = NCCL.get_or_init(|| {
        // SAFETY: opening the library runs its initialisers. It is NVIDIA's own, or an emulation of it.
        let library = unsafe { libloading::Library::new(LIBRARY) }.map_err(|_| Missing::Library {
            library: LIBRARY,
            purpose: "it carries the collectives of --tp and comes with NCCL",
            searched: searched(),
        })?;
        Nccl::load(Box::leak(Box::new(library)))
    });
    opened.as_ref().map_err(Missing::clone)
}

/// Opens the library of collectives. Only a device in a group needs it.
pub fn collectives() -> Result<(), Missing> {
    open().map(|_| ())
}
