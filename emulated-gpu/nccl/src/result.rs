//! Results of calls (`ncclResult_t`).

use std::ffi::CStr;

/// A `ncclResult_t` other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Error(pub i32);

/// Result of a call.
pub type Outcome<T = ()> = Result<T, Error>;

impl Error {
    /// A driver call failed.
    pub const UNHANDLED_CUDA_ERROR: Error = Error(1);
    /// An operating system call failed.
    pub const SYSTEM_ERROR: Error = Error(2);
    /// A pointer, a count or a type is wrong.
    pub const INVALID_ARGUMENT: Error = Error(4);
    /// The communicator cannot do this now, or the ranks' calls differ.
    pub const INVALID_USAGE: Error = Error(5);
    /// Another rank is gone.
    pub const REMOTE_ERROR: Error = Error(6);
    /// The call continues in the background.
    pub const IN_PROGRESS: Error = Error(7);
}

/// The `ncclResult_t` of an outcome.
pub fn code(outcome: Outcome) -> i32 {
    outcome.err().map_or(0, |error| error.0)
}

/// Description of a `ncclResult_t`.
pub fn describe(code: i32) -> &'static CStr {
    match code {
        0 => c"no error",
        1 => c"unhandled cuda error",
        2 => c"unhandled system error",
        3 => c"internal error",
        4 => c"invalid argument",
        5 => c"invalid usage",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    }
}
