//! C functions that return the names and descriptions of errors.

use std::ffi::c_char;

use super::{Out, calls};
use crate::error::{Error, describe};

calls! {
    fn cuGetErrorName(code: i32, name: Out<*const c_char>) {
        match describe(code) {
            Some((text, _)) => name.set(text.as_ptr()),
            None => name.set(std::ptr::null()).and(Err(Error::INVALID_VALUE)),
        }
    }
    fn cuGetErrorString(code: i32, description: Out<*const c_char>) {
        match describe(code) {
            Some((_, text)) => description.set(text.as_ptr()),
            None => description.set(std::ptr::null()).and(Err(Error::INVALID_VALUE)),
        }
    }
}
