//! The layout of quantised weights in groups: panels of chunks of lines.
//!
//! A chunk of a panel holds [`CHUNK`] inputs of sixteen outputs. It begins with a header, which is padded to whole
//! lines of 64 bytes: for each group of the chunk sixteen scales, then for each group sixteen zero points or minima if
//! there are any. Lines of codes follow. A line holds four bytes of each output: four codes of eight bits, or eight
//! codes of four bits. Byte `i` of an output's eight codes holds code `i` in its low bits and code `i + 4` in its high
//! bits, so that the low and the high halves of all bytes are the operands of two dot products of bytes. The last chunk
//! has only the lines of whole [`BLOCK`]s that its inputs need.

use std::fs::File;

use half::f16;

use crate::DeviceError;
use crate::cpu::memory::Buffer;
use crate::cpu::memory::fused_matrices::Shape;
use crate::cpu::quant::product::CHUNK;
use crate::cpu::simd::{LANES, Simd, e4m3};
use crate::device::{INT4_GROUP, OffsetKind, QuantizedType, ScaleType};

/// Number of inputs per block: the smallest group of a product with dot products, and the unit to which inputs are
/// padded.
pub(super) const BLOCK: usize = 32;
/// Bytes per line: four bytes of sixteen outputs.
pub(super) const LINE: usize = 4 * LANES;

/// The layout of a matrix's panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) struct GroupLayout {
    pub(super) codes: QuantizedType,
    /// Number of inputs that share a scale: 16, 32, 64 or 128.
    pub(super) group: usize,
    /// Type of scales and minima.
    pub(super) scales: ScaleType,
    pub(super) offsets: OffsetKind,
}

impl GroupLayout {
    /// The layout of weights that are quantised to four bits when they are loaded.
    pub(in crate::cpu) const INT4: Self = Self {
        codes: QuantizedType::Int4,
        group: INT4_GROUP,
        scales: ScaleType::F16,
        offsets: OffsetKind::None,
    };

    /// True if products can use dot products of integers.
    pub(super) fn has_dots(self) -> bool {
        self.codes == QuantizedType::Int4 && self.group >= BLOCK
    }

    /// Number of groups per chunk.
    pub(super) const fn groups(self) -> usize {
        CHUNK / self.group
    }

    /// Offset in bytes of the scales of a group within its chunk.
    pub(super) const fn scales_at(self, group: usize) -> usize {
        group * LANES * self.scales.bytes()
    }

    /// Offset in bytes of the zero points of a group within its chunk.
    pub(super) const fn zeros_at(self, group: usize) -> usize {
        self.scales_at(self.groups()) + group * LANES
    }

    /// Offset in bytes of the minima of a group within its chunk.
    const fn minima_at(self, group: usize) -> usize {
        self.scales_at(self.groups() + group)
    }

    /// Size in bytes of a chunk's header.
    pub(super) const fn header(self) -> usize {
        let groups = self.groups();
        let bytes = match self.offsets {
            OffsetKind::None => self.scales_at(groups),
            OffsetKind::ZeroPoints => self.zeros_at(groups),
            OffsetKind::Minima => self.minima_at(groups),
        };
        bytes.next_multiple_of(LINE)
    }

    /// Number of inputs per line.
    pub(super) const fn line_inputs(self) -> usize {
        32 / self.codes.bits()
    }

    /// Size in bytes of a whole chunk.
    pub(super) const fn chunk_bytes(self) -> usize {
        self.header() + CHUNK / self.line_inputs() * LINE
    }

    /// Size in bytes of the first `inputs` inputs of a panel: whole chunks, or all inputs.
    pub(super) const fn panel_bytes(self, inputs: usize) -> usize {
        let padded = inputs.next_multiple_of(BLOCK);
        inputs.div_ceil(CHUNK) * self.header() + padded / self.line_inputs() * LINE
    }

    /// Loads the scales of a group.
    ///
    /// # Safety
    ///
    /// `chunk` points to a chunk in this layout.
    #[inline(always)]
    pub(super) unsafe fn load_scales<S: Simd>(self, s: S, chunk: *const u8, group: usize) -> S::F {
        // SAFETY: by the caller's contract, the chunk's header is readable.
        unsafe { self.load_floats(s, chunk.add(self.scales_at(group))) }
    }

    /// Loads the minima of a group.
    ///
    /// # Safety
    ///
    /// `chunk` points to a chunk in this layout, which has minima.
    #[inline(always)]
    pub(super) unsafe fn load_minima<S: Simd>(self, s: S, chunk: *const u8, group: usize) -> S::F {
        // SAFETY: by the caller's contract, the chunk's header is readable.
        unsafe { self.load_floats(s, chunk.add(self.minima_at(group))) }
    }

    /// Loads sixteen numbers in the type of scales.
    ///
    /// # Safety
    ///
    /// Sixteen numbers are readable at `from`.
    #[inline(always)]
    unsafe fn load_floats<S: Simd>(self, s: S, from: *const u8) -> S::F {
        // SAFETY: by the caller's contract, the numbers are readable.
        unsafe {
            match self.scales {
                ScaleType::F16 => s.load_f16(from.cast()),
                ScaleType::F32 => s.load(from.cast()),
            }
        }
    }

    /// Index, within a chunk's lines, of the byte that holds the code of an input, and the number of bits below the
    /// code.
    pub(super) const fn code_at(self, input: usize, lane: usize) -> (usize, usize) {
        let (line, index) = (input / self.line_inputs(), input % self.line_inputs());
        (line * LINE + lane * 4 + index % 4, index / 4 * 4)
    }

    /// Stores a scale in a chunk's header.
    pub(super) fn store_scale(self, chunk: &mut [u8], group: usize, lane: usize, scale: f32) {
        self.store_float(&mut chunk[self.scales_at(group)..], lane, scale);
    }

    /// Stores a minimum in a chunk's header.
    pub(super) fn store_minimum(self, chunk: &mut [u8], group: usize, lane: usize, minimum: f32) {
        self.store_float(&mut chunk[self.minima_at(group)..], lane, minimum);
    }

    fn store_float(self, floats: &mut [u8], lane: usize, x: f32) {
        let at = lane * self.scales.bytes();
        match self.scales {
            ScaleType::F16 => floats[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes()),
            ScaleType::F32 => floats[at..at + 4].copy_from_slice(&x.to_le_bytes()),
        }
    }

    /// Reads one of sixteen numbers in the type of scales.
    fn float(self, floats: &[u8], lane: usize) -> f32 {
        let at = lane * self.scales.bytes();
        let floats = &floats[at..at + self.scales.bytes()];
        match *floats {
            [a, b] => f16::from_le_bytes([a, b]).to_f32(),
            [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
            _ => f32::NAN,
        }
    }

    /// The zero point of a group, as a number.
    fn zero(self, chunk: &[u8], group: usize, lane: usize) -> f32 {
        match (self.offsets, self.codes) {
            (OffsetKind::ZeroPoints, QuantizedType::Int8) => {
                f32::from(chunk[self.zeros_at(group) + lane].cast_signed())
            }
            (OffsetKind::ZeroPoints, _) => f32::from(chunk[self.zeros_at(group) + lane]),
            (OffsetKind::None, QuantizedType::Int4) => 8.0,
            (OffsetKind::None | OffsetKind::Minima, _) => 0.0,
        }
    }

    /// The minimum of a group; 0 if there are none.
    fn minimum(self, chunk: &[u8], group: usize, lane: usize) -> f32 {
        match self.offsets {
            OffsetKind::Minima => self.float(&chunk[self.minima_at(group)..], lane),
            OffsetKind::None | OffsetKind::ZeroPoints => 0.0,
        }
    }
}

/// The numbers of e2m1 codes.
pub(super) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// A matrix of quantised weights in groups, `[outputs, inputs]`.
pub struct GroupedMatrix {
    pub(in crate::cpu) shape: Shape,
    pub(in crate::cpu) layout: GroupLayout,
    /// `[outputs / 16]` panels of [`GroupLayout::panel_bytes`] each. Outputs that pad the last panel are zeros.
    pub(in crate::cpu) data: Buffer<u8>,
}

impl GroupedMatrix {
    /// Size in bytes of a matrix; `None` if it overflows.
    pub(in crate::cpu) fn len(shape: Shape, layout: GroupLayout) -> Option<usize> {
        shape.inputs.checked_mul(LINE)?;
        shape.panels().checked_mul(layout.panel_bytes(shape.inputs))
    }

    /// Maps a packed matrix: the [`Self::len`] bytes of `file` from `from` on.
    pub(in crate::cpu) fn mapped(
        file: &File,
        from: u64,
        shape: Shape,
        layout: GroupLayout,
    ) -> Result<Self, DeviceError> {
        let data = Buffer::mapped(file, from, Self::len(shape, layout), "a packed weight matrix")?;
        Ok(Self { shape, layout, data })
    }

    /// Dequantises the weights of one output. `out` receives one weight per input, in the order of the inputs.
    pub(in crate::cpu) fn read_row(&self, output: usize, out: &mut [f32]) {
        let Self { layout, shape, data } = self;
        let bytes = layout.panel_bytes(shape.inputs);
        let panel = &data[output / LANES * bytes..][..bytes];
        let lane = output % LANES;
        for (out, chunk) in out.chunks_mut(CHUNK).zip(panel.chunks(layout.chunk_bytes())) {
            for (group, out) in out.chunks_mut(layout.group).enumerate() {
                let scale = layout.float(&chunk[layout.scales_at(group)..], lane);
                let (zero, minimum) = (layout.zero(chunk, group, lane), layout.minimum(chunk, group, lane));
                for (index, out) in out.iter_mut().enumerate() {
                    let (at, low) = layout.code_at(group * layout.group + index, lane);
                    let code = chunk[layout.header() + at] >> low;
                    let number = match layout.codes {
                        QuantizedType::Int4 => f32::from(code & 15) - zero,
                        QuantizedType::Int8 => f32::from(code.cast_signed()) - zero,
                        QuantizedType::E2m1 => E2M1[usize::from(code & 15)],
                        QuantizedType::E4m3 => e4m3(code),
                    };
                    *out = number * scale;
                    if layout.offsets == OffsetKind::Minima {
                        *out -= minimum;
                    }
                }
            }
        }
    }
}
