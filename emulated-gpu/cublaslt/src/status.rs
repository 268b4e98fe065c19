//! Status codes (`cublasStatus_t`).

use std::ffi::CStr;

/// A `cublasStatus_t` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub i32);

impl Status {
    /// The library found no emulated driver.
    pub const NOT_INITIALIZED: Status = Status(1);
    /// A null pointer, a wrong size or sizes that do not match.
    pub const INVALID_VALUE: Status = Status(7);
    /// The driver refused to enqueue the work.
    pub const EXECUTION_FAILED: Status = Status(13);
    /// A combination of types or layouts that has no kernel.
    pub const NOT_SUPPORTED: Status = Status(15);
}

/// Name of a status.
pub fn name(code: i32) -> &'static CStr {
    match code {
        0 => c"CUBLAS_STATUS_SUCCESS",
        1 => c"CUBLAS_STATUS_NOT_INITIALIZED",
        7 => c"CUBLAS_STATUS_INVALID_VALUE",
        13 => c"CUBLAS_STATUS_EXECUTION_FAILED",
        15 => c"CUBLAS_STATUS_NOT_SUPPORTED",
        _ => c"CUBLAS_STATUS_UNKNOWN",
    }
}
