//! Media of requests in canonical forms, which encoders take whatever format a client has sent.
//!
//! The canonical form of a picture is its pixels, `[height, width, 3]` in bytes, at a size that is a whole number of
//! tokens. A router must know this size before it sends a request, because the number of tokens follows from it.

mod resize;

pub use resize::{MAX_ASPECT, Pixels, SizeError, SizeLimits, resize};
