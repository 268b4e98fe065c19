//! Storage formats: the layout of elements in panels, and their conversion to lanes of f32.
//!
//! A *panel* holds sixteen outputs (columns of the transposed weights, or sixteen keys) for all inputs. It consists of
//! `[inputs / 2]` *steps* of two inputs by sixteen outputs. f32 and f16 store a step as the sixteen elements of its
//! even input and then the sixteen of its odd input. bfloat16 stores a step as sixteen pairs of an even and an odd
//! input, the operand of a dot-product instruction. If the number of inputs is odd, zeros pad the last step.

use half::f16;

use crate::WeightType;
use crate::cpu::memory::Element;
use crate::cpu::simd::{F16_PER_E4M3, LANES, Simd, from_bf16, to_bf16};

/// Number of elements per step: two inputs by sixteen outputs.
pub(in crate::cpu) const STEP: usize = 2 * LANES;

/// Elements to which those of fp8 (e4m3) are converted, exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) enum FromFp8 {
    /// The numbers themselves.
    Bf16,
    /// The numbers, divided by [`F16_PER_E4M3`].
    F16,
}

impl FromFp8 {
    /// The number of an element in fp8, divided by that of the converted element.
    pub(in crate::cpu) const fn factor(self) -> f32 {
        match self {
            Self::Bf16 => 1.0,
            Self::F16 => F16_PER_E4M3,
        }
    }
}

/// A storage type of weights, keys and values.
pub(in crate::cpu) trait Format: Copy + Send + Sync + 'static {
    /// The type of one element in memory.
    type Raw: Element;
    /// The elements of a buffer; `None` if they are in another format.
    fn elements(stored: &Stored) -> Option<&[Self::Raw]>;
    /// True if a product adds the odd input of each pair first, as the dot-product instruction does.
    const ODD_FIRST: bool;
    /// Elements to which those of fp8 are converted for arithmetic over this format; `None` if they are not.
    const FROM_FP8: Option<FromFp8> = None;

    /// Returns the index, within a step, of the element for output `lane` and the step's even input (`parity` 0) or odd
    /// input (`parity` 1).
    fn index_in_step(parity: usize, lane: usize) -> usize;
    /// Loads the sixteen elements of a step's odd input if `ODD` is true, or of its even input otherwise.
    ///
    /// # Safety
    ///
    /// [`STEP`] elements are readable at `step`.
    unsafe fn load_step<S: Simd, const ODD: bool>(s: S, step: *const Self::Raw) -> S::F;
    /// Loads sixteen consecutive elements.
    ///
    /// # Safety
    ///
    /// Sixteen elements are readable at `from`.
    unsafe fn load_row<S: Simd>(s: S, from: *const Self::Raw) -> S::F;
    /// Rounds to the nearest number of this format, ties to even.
    fn narrow(x: f32) -> Self::Raw;
    /// Converts to f32, exactly.
    fn widen(x: Self::Raw) -> f32;
    /// Reads the element at `index` from little-endian bytes.
    fn read(bytes: &[u8], index: usize) -> Self::Raw;
}

/// The format of 32-bit floats.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct F32;

impl Format for F32 {
    type Raw = f32;
    const ODD_FIRST: bool = false;

    fn elements(stored: &Stored) -> Option<&[f32]> {
        let Stored::F32(data) = stored else { return None };
        Some(data)
    }
    #[inline(always)]
    fn index_in_step(parity: usize, lane: usize) -> usize {
        parity * LANES + lane
    }
    #[inline(always)]
    unsafe fn load_step<S: Simd, const ODD: bool>(s: S, step: *const f32) -> S::F {
        // SAFETY: by the caller's contract, `STEP` elements are readable at `step`.
        unsafe { s.load(step.add(if ODD { LANES } else { 0 })) }
    }
    #[inline(always)]
    unsafe fn load_row<S: Simd>(s: S, from: *const f32) -> S::F {
        // SAFETY: by the caller's contract, sixteen elements are readable at `from`.
        unsafe { s.load(from) }
    }
    #[inline(always)]
    fn narrow(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn widen(x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn read(bytes: &[u8], index: usize) -> f32 {
        let at = 4 * index;
        f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
    }
}

/// The format of IEEE 16-bit floats.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct F16;

impl Format for F16 {
    type Raw = u16;
    const ODD_FIRST: bool = false;

    fn elements(stored: &Stored) -> Option<&[u16]> {
        let Stored::F16(data) = stored else { return None };
        Some(data)
    }
    #[inline(always)]
    fn index_in_step(parity: usize, lane: usize) -> usize {
        parity * LANES + lane
    }
    #[inline(always)]
    unsafe fn load_step<S: Simd, const ODD: bool>(s: S, step: *const u16) -> S::F {
        // SAFETY: by the caller's contract, `STEP` elements are readable at `step`.
        unsafe { s.load_f16(step.add(if ODD { LANES } else { 0 })) }
    }
    #[inline(always)]
    unsafe fn load_row<S: Simd>(s: S, from: *const u16) -> S::F {
        // SAFETY: by the caller's contract, sixteen elements are readable at `from`.
        unsafe { s.load_f16(from) }
    }
    #[inline(always)]
    fn narrow(x: f32) -> u16 {
        f16::from_f32(x).to_bits()
    }
    #[inline(always)]
    fn widen(x: u16) -> f32 {
        f16::from_bits(x).to_f32()
    }
    #[inline(always)]
    fn read(bytes: &[u8], index: usize) -> u16 {
        u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])
    }
}

/// f16 to which elements of fp8 are converted. Sums have the order of bfloat16, so that pages in fp8 give the same bits
/// whichever elements they are converted to.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct F16FromFp8;

impl Format for F16FromFp8 {
    type Raw = u16;
    const ODD_FIRST: bool = Bf16::ODD_FIRST;
    const FROM_FP8: Option<FromFp8> = Some(FromFp8::F16);

    fn elements(stored: &Stored) -> Option<&[u16]> {
        F16::elements(stored)
    }
    #[inline(always)]
    fn index_in_step(parity: usize, lane: usize) -> usize {
        F16::index_in_step(parity, lane)
    }
    #[inline(always)]
    unsafe fn load_step<S: Simd, const ODD: bool>(s: S, step: *const u16) -> S::F {
        // SAFETY: by the caller's contract.
        unsafe { F16::load_step::<S, ODD>(s, step) }
    }
    #[inline(always)]
    unsafe fn load_row<S: Simd>(s: S, from: *const u16) -> S::F {
        // SAFETY: by the caller's contract.
        unsafe { F16::load_row(s, from) }
    }
    #[inline(always)]
    fn narrow(x: f32) -> u16 {
        F16::narrow(x)
    }
    #[inline(always)]
    fn widen(x: u16) -> f32 {
        F16::widen(x)
    }
    #[inline(always)]
    fn read(bytes: &[u8], index: usize) -> u16 {
        F16::read(bytes, index)
    }
}

/// The format of bfloat16.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Bf16;

impl Format for Bf16 {
    type Raw = u16;
    const ODD_FIRST: bool = true;
    const FROM_FP8: Option<FromFp8> = Some(FromFp8::Bf16);

    fn elements(stored: &Stored) -> Option<&[u16]> {
        let Stored::Bf16(data) = stored else { return None };
        Some(data)
    }
    #[inline(always)]
    fn index_in_step(parity: usize, lane: usize) -> usize {
        2 * lane + parity
    }
    #[inline(always)]
    unsafe fn load_step<S: Simd, const ODD: bool>(s: S, step: *const u16) -> S::F {
        // SAFETY: by the caller's contract, `STEP` elements are readable at `step`.
        unsafe { if ODD { s.load_bf16_odd(step) } else { s.load_bf16_even(step) } }
    }
    #[inline(always)]
    unsafe fn load_row<S: Simd>(s: S, from: *const u16) -> S::F {
        // SAFETY: by the caller's contract, sixteen elements are readable at `from`.
        unsafe { s.load_bf16(from) }
    }
    #[inline(always)]
    fn narrow(x: f32) -> u16 {
        to_bf16(x)
    }
    #[inline(always)]
    fn widen(x: u16) -> f32 {
        from_bf16(x)
    }
    #[inline(always)]
    fn read(bytes: &[u8], index: usize) -> u16 {
        u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])
    }
}

/// A buffer whose elements are in one of the formats.
pub(in crate::cpu) enum Stored {
    F32(crate::cpu::memory::Buffer<f32>),
    F16(crate::cpu::memory::Buffer<u16>),
    Bf16(crate::cpu::memory::Buffer<u16>),
}

/// Runs `$body` with `$format` standing for the buffer's format and `$data` for its elements.
macro_rules! with_format {
    ($stored:expr, $format:ident, $data:ident => $body:expr) => {
        match $stored {
            $crate::cpu::memory::format::Stored::F32($data) => {
                type $format = $crate::cpu::memory::format::F32;
                $body
            }
            $crate::cpu::memory::format::Stored::F16($data) => {
                type $format = $crate::cpu::memory::format::F16;
                $body
            }
            $crate::cpu::memory::format::Stored::Bf16($data) => {
                type $format = $crate::cpu::memory::format::Bf16;
                $body
            }
        }
    };
}
pub(in crate::cpu) use with_format;

impl Stored {
    pub(in crate::cpu) fn zeroed(
        dtype: WeightType,
        len: Option<usize>,
        what: &'static str,
    ) -> Result<Self, crate::DeviceError> {
        use crate::cpu::memory::Buffer;
        Ok(match dtype {
            WeightType::F32 => Self::F32(Buffer::zeroed(len, what)?),
            WeightType::F16 => Self::F16(Buffer::zeroed(len, what)?),
            WeightType::Bf16 => Self::Bf16(Buffer::zeroed(len, what)?),
        })
    }

    /// Takes all memory from the operating system at once: see
    /// [`Buffer::make_resident`](crate::cpu::memory::Buffer::make_resident).
    pub(in crate::cpu) fn make_resident(
        &mut self,
        pool: &mut crate::cpu::threads::ThreadPool,
        what: &'static str,
    ) -> Result<(), crate::DeviceError> {
        match self {
            Self::F32(data) => data.make_resident(pool, what),
            Self::F16(data) | Self::Bf16(data) => data.make_resident(pool, what),
        }
    }

    /// The elements as bytes.
    pub(in crate::cpu) fn bytes(&self) -> &[u8] {
        match self {
            Self::F32(data) => data.bytes(),
            Self::F16(data) | Self::Bf16(data) => data.bytes(),
        }
    }

    /// The elements as bytes, for writing.
    pub(in crate::cpu) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::F32(data) => data.bytes_mut(),
            Self::F16(data) | Self::Bf16(data) => data.bytes_mut(),
        }
    }
}
