//! The C functions of `cuda.h`, one module per kind of object, and the types of their arguments.
//!
//! Where `cuda.h` renames a function (`cuMemAlloc` to `cuMemAlloc_v2`), only the new name exists here.

mod context;
mod device;
mod errors;
mod event;
mod memory;
mod module;
mod occupancy;
mod refused;
mod stream;

use std::ffi::{CStr, c_char};

use crate::error::{Error, Outcome};

/// Defines C functions. A function returns the `CUresult` of its body.
macro_rules! calls {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {$(
        $(#[$meta])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $kind),*) -> i32 {
            let call = || -> crate::error::Outcome { $body };
            crate::error::code(call())
        }
    )*};
}
use calls;

/// A pointer that a C caller passes for a result: null, or valid for a write of a `T`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Stores a result.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if the pointer is null.
    pub fn set(self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: only C callers make an `Out`, with a pointer that is null or valid for a write.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Stores a result unless the pointer is null.
    pub fn set_if_wanted(self, value: T) {
        let _ = self.set(value);
    }
}

/// A string that a C caller passes: null, or ended by a zero byte.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Text(*const c_char);

impl Text {
    /// Returns the text.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if the pointer is null.
    pub fn get<'a>(self) -> Outcome<&'a CStr> {
        if self.0.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: only C callers make a `Text`, with a pointer that is null or a text that lives through the call.
        Ok(unsafe { CStr::from_ptr(self.0) })
    }
}
