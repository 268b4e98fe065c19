//! Media of requests in canonical forms, which encoders take whatever format a client has sent.
//!
//! The canonical form of a picture is its pixels, `[height, width, 3]` in bytes, at a size that is a whole number of
//! tokens; that of a video is its frames as such pictures, one behind the other; that of a recording is its samples,
//! one channel at 16 kHz. A router must know these before it sends a request, because the number of tokens follows
//! from them.
//!
//! The bytes come from strangers. All memory is taken from a [`Budget`] before it is allocated, and time is bounded.
//! Decoders are memory-safe code without files, network and native libraries.

mod audio;
mod budget;
mod frames;
mod orientation;
mod picture;
mod resample;
mod resize;

pub use audio::{SAMPLE_RATE, Samples, decode_audio};
pub use budget::{Budget, MediaError, Memory, Unlimited};
pub use frames::{Frames, decode_frames};
pub use picture::{Picture, decode_picture};
pub use resample::Resampler;
pub use resize::{MAX_ASPECT, Pixels, SizeError, SizeLimits, resize};

/// Runs a decoder. A panic, which only a fault of a decoder can cause, becomes an error of the item.
fn guarded<T>(decode: impl FnOnce() -> Result<T, MediaError>) -> Result<T, MediaError> {
    // A panic leaves no invalid state: the decoder's values are dropped, and a budget counts what it has given.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(decode)).unwrap_or(Err(MediaError::Failed))
}
