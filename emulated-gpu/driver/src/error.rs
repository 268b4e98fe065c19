//! Error codes of the driver, by the names and values of `cuda.h`.

use std::ffi::CStr;

/// A `CUresult` other than `CUDA_SUCCESS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error(pub i32);

/// Result of a driver call.
pub type Outcome<T = ()> = Result<T, Error>;

macro_rules! errors {
    ($($constant:ident = $code:literal $name:literal $text:literal)*) => {
        impl Error {
            $(pub const $constant: Error = Error($code);)*
        }

        /// Name and description of each error.
        const TABLE: &[(Error, &CStr, &CStr)] = &[$((Error($code), $name, $text)),*];
    };
}

errors! {
    INVALID_VALUE = 1 c"CUDA_ERROR_INVALID_VALUE" c"invalid argument"
    OUT_OF_MEMORY = 2 c"CUDA_ERROR_OUT_OF_MEMORY" c"out of memory"
    NOT_INITIALIZED = 3 c"CUDA_ERROR_NOT_INITIALIZED" c"initialization error"
    NO_DEVICE = 100 c"CUDA_ERROR_NO_DEVICE" c"no CUDA-capable device is detected"
    INVALID_DEVICE = 101 c"CUDA_ERROR_INVALID_DEVICE" c"invalid device ordinal"
    INVALID_IMAGE = 200 c"CUDA_ERROR_INVALID_IMAGE" c"device kernel image is invalid"
    INVALID_CONTEXT = 201 c"CUDA_ERROR_INVALID_CONTEXT" c"invalid device context"
    NO_BINARY_FOR_GPU = 209 c"CUDA_ERROR_NO_BINARY_FOR_GPU" c"no kernel image is available for execution on the device"
    ECC_UNCORRECTABLE = 214 c"CUDA_ERROR_ECC_UNCORRECTABLE" c"uncorrectable ECC error encountered"
    UNSUPPORTED_LIMIT = 215 c"CUDA_ERROR_UNSUPPORTED_LIMIT" c"limit is not supported on this architecture"
    INVALID_PTX = 218 c"CUDA_ERROR_INVALID_PTX" c"a PTX JIT compilation failed"
    FILE_NOT_FOUND = 301 c"CUDA_ERROR_FILE_NOT_FOUND" c"file not found"
    OPERATING_SYSTEM = 304 c"CUDA_ERROR_OPERATING_SYSTEM" c"OS call failed or operation not supported on this OS"
    INVALID_HANDLE = 400 c"CUDA_ERROR_INVALID_HANDLE" c"invalid resource handle"
    NOT_FOUND = 500 c"CUDA_ERROR_NOT_FOUND" c"named symbol not found"
    NOT_READY = 600 c"CUDA_ERROR_NOT_READY" c"device not ready"
    ILLEGAL_ADDRESS = 700 c"CUDA_ERROR_ILLEGAL_ADDRESS" c"an illegal memory access was encountered"
    LAUNCH_OUT_OF_RESOURCES = 701 c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" c"too many resources requested for launch"
    LAUNCH_TIMEOUT = 702 c"CUDA_ERROR_LAUNCH_TIMEOUT" c"the launch timed out and was terminated"
    CONTEXT_IS_DESTROYED = 709 c"CUDA_ERROR_CONTEXT_IS_DESTROYED" c"context is destroyed"
    ASSERT = 710 c"CUDA_ERROR_ASSERT" c"device-side assert triggered"
    MISALIGNED_ADDRESS = 716 c"CUDA_ERROR_MISALIGNED_ADDRESS" c"misaligned address"
    LAUNCH_FAILED = 719 c"CUDA_ERROR_LAUNCH_FAILED" c"unspecified launch failure"
    NOT_SUPPORTED = 801 c"CUDA_ERROR_NOT_SUPPORTED" c"operation not supported"
}

/// Returns the name and the description of a `CUresult`; none if the code is unknown.
pub fn describe(code: i32) -> Option<(&'static CStr, &'static CStr)> {
    if code == 0 {
        return Some((c"CUDA_SUCCESS", c"no error"));
    }
    TABLE.iter().find(|(error, ..)| error.0 == code).map(|&(_, name, text)| (name, text))
}

/// The `CUresult` of an outcome.
pub fn code(outcome: Outcome) -> i32 {
    outcome.err().map_or(0, |error| error.0)
}
