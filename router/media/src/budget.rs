//! The cost that an item may have until it is in canonical form: memory, pixels or samples, and time.

use std::time::Instant;

use crate::SizeError;

/// Memory that decoders take before they allocate it.
pub trait Memory {
    /// Takes bytes. Returns false, and takes none, if there are not as many.
    fn take(&mut self, bytes: usize) -> bool;
    /// Gives bytes back that were taken.
    fn give(&mut self, bytes: usize);
}

/// Memory without a limit, for tests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unlimited;

impl Memory for Unlimited {
    fn take(&mut self, _: usize) -> bool {
        true
    }

    fn give(&mut self, _: usize) {}
}

/// The limits of one item.
pub struct Budget<'a> {
    /// The memory. The bytes of the canonical form stay taken; those of decoding are given back.
    pub memory: &'a mut dyn Memory,
    /// Maximum number of pixels of a picture or frame, before it is resized.
    pub pixels: u64,
    /// Maximum number of samples of a recording, at 16 kHz.
    pub samples: usize,
    /// Time at which decoding stops.
    pub deadline: Instant,
}

/// The reason why an item has no canonical form. The text continues the item's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MediaError {
    /// The bytes are no picture of a known format.
    #[error("is neither a JPEG, a PNG nor a WebP picture")]
    NoPicture,
    /// The bytes are no sound of a known format.
    #[error("is neither a WAV, an MP3 nor a FLAC recording")]
    NoAudio,
    /// A decoder refuses the bytes.
    #[error("cannot be decoded: {0}")]
    Damaged(String),
    /// A picture has more pixels than it may have.
    #[error("has {width} times {height} pixels, more than the limit of {limit}")]
    TooManyPixels {
        /// Width in pixels.
        width: u64,
        /// Height in pixels.
        height: u64,
        /// Maximum number of pixels.
        limit: u64,
    },
    /// A recording is longer than it may be.
    #[error("is longer than {seconds} seconds")]
    TooLong {
        /// Maximum length in seconds.
        seconds: u64,
    },
    /// A recording has a rate that is not resampled.
    #[error("has {0} samples per second, but must have a usual rate, such as 16000, 24000, 44100 or 48000")]
    Rate(u32),
    /// A recording has no samples.
    #[error("has no samples")]
    Silent,
    /// A sample is infinite or not a number.
    #[error("has a sample that is not a finite number")]
    NotFinite,
    /// A video has no frames.
    #[error("has no frames")]
    NoFrames,
    /// A frame has another size than the first.
    #[error("frame {index} has another size than frame 0")]
    OtherSize {
        /// Index of the frame.
        index: usize,
    },
    /// A frame of a video has no canonical form.
    #[error("frame {index} {error}")]
    Frame {
        /// Index of the frame.
        index: usize,
        /// The reason.
        error: Box<MediaError>,
    },
    /// The size does not fit the model.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// The canonical form has more bytes than are left to the request.
    #[error(
        "has at least {bytes} bytes once it is decoded and resized, more than the {left} that are left to the request"
    )]
    TooLarge {
        /// Bytes of the canonical form, or of the part of it that was decoded.
        bytes: usize,
        /// Bytes that are left.
        left: usize,
    },
    /// Decoding takes too long.
    #[error("takes too long to decode")]
    TooSlow,
    /// There is no memory for it now.
    #[error("needs {0} bytes of memory to decode, which are not free now")]
    NoMemory(usize),
    /// A decoder has failed.
    #[error("cannot be decoded: its decoder fails on it")]
    Failed,
}

impl Budget<'_> {
    /// Refuses to go on after the deadline.
    pub(crate) fn check_time(&self) -> Result<(), MediaError> {
        if self.is_late() { Err(MediaError::TooSlow) } else { Ok(()) }
    }

    pub(crate) fn is_late(&self) -> bool {
        Instant::now() >= self.deadline
    }

    /// Takes memory for bytes that are about to be allocated.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<(), MediaError> {
        if self.memory.take(bytes) { Ok(()) } else { Err(MediaError::NoMemory(bytes)) }
    }

    /// Runs `work` while `bytes` bytes are taken.
    pub(crate) fn holding<T>(
        &mut self,
        bytes: usize,
        work: impl FnOnce(&mut Self) -> Result<T, MediaError>,
    ) -> Result<T, MediaError> {
        self.take(bytes)?;
        let done = work(self);
        self.memory.give(bytes);
        done
    }
}

/// Bytes as a product. A product beyond what can be counted is as many as can be, which no memory has.
pub(crate) fn bytes(factors: &[usize]) -> usize {
    factors.iter().fold(1, |product: usize, factor| product.saturating_mul(*factor))
}
