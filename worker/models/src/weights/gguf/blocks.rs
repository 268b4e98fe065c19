//! The blocks of quantised elements in GGUF files (ggml's `ggml-common.h`). All begin or end with scales in f16.

use std::ops::Range;

use half::f16;
use tutti_kernels::{OffsetKind, QuantizedType, ScaleType};
use tutti_runtime::gguf::TensorType;

use crate::weights::quantised::{Element, GroupScales, Groups, HeldForm, Layout, Offsets, Quantised};

/// A matrix of blocks.
pub(in crate::weights) struct Blocks<'a> {
    pub bytes: &'a [u8],
    pub dtype: TensorType,
    /// Elements per row.
    pub columns: usize,
    pub order: RowOrder,
}

/// The order of a matrix's rows in the file.
#[derive(Clone, Copy)]
pub(in crate::weights) struct RowOrder {
    /// Index of the first row of the matrix in the file's tensor.
    pub first: usize,
    /// Number of rows of the matrix.
    pub rows: usize,
    /// The number of heads whose rows are in the file's order.
    pub heads: Option<usize>,
}

impl RowOrder {
    /// Returns the index in the file's tensor of a row of the checkpoint's matrix. llama.cpp turns each head of q and k
    /// of Llama, so that the two halves that RoPE rotates together alternate.
    pub fn row(&self, row: usize) -> usize {
        let Self { first, rows, heads } = *self;
        match heads {
            None => first + row,
            Some(heads) => {
                let height = rows / heads;
                let (head, within) = (row / height, row % height);
                let (half, index) = (within / (height / 2), within % (height / 2));
                first + head * height + 2 * index + half
            }
        }
    }
}

impl Blocks<'_> {
    /// Number of elements that share a scale.
    fn group(&self) -> usize {
        if self.dtype == TensorType::Q6K { 16 } else { 32 }
    }

    fn is_int4(&self) -> bool {
        matches!(self.dtype, TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q4K)
    }
}

/// The elements of one block: codes, and per group a scale and a minimum.
#[derive(Default)]
struct Block {
    codes: Vec<u8>,
    scales: Vec<f32>,
    minima: Vec<f32>,
}

impl Block {
    fn clear(&mut self) {
        self.codes.clear();
        self.scales.clear();
        self.minima.clear();
    }
}

impl Layout for Blocks<'_> {
    fn read(&self, rows: Range<usize>, columns: Range<usize>) -> Quantised {
        let (elements, bytes) = (self.dtype.block_elements() as usize, self.dtype.block_bytes() as usize);
        let group = self.group();
        let per_row = self.columns / elements;
        let (groups, wanted) = Groups::runs(&columns, group);
        let blocks = columns.start / elements..columns.end.div_ceil(elements);
        let mut codes = Vec::with_capacity(rows.len() * columns.len());
        let (mut scales, mut minima) = (Vec::new(), Vec::new());
        let first = blocks.start * elements;
        let mut of_row = Block::default();
        for row in rows {
            of_row.clear();
            for block in blocks.clone() {
                let at = (self.order.row(row) * per_row + block) * bytes;
                read(self.dtype, &self.bytes[at..at + bytes], &mut of_row);
            }
            codes.extend(&of_row.codes[columns.start - first..columns.end - first]);
            let of_groups = wanted.start - first / group..wanted.end - first / group;
            scales.extend(&of_row.scales[of_groups.clone()]);
            minima.extend(of_row.minima.get(of_groups).unwrap_or_default());
        }
        let offsets = if minima.is_empty() { Offsets::None } else { Offsets::Minima(minima) };
        let element = if self.is_int4() { Element::Int4 } else { Element::Int8 };
        Quantised { element, codes, scales: GroupScales { groups, scales, offsets } }
    }

    fn form(&self) -> Option<HeldForm> {
        let offsets = match self.dtype {
            TensorType::Q4_1 | TensorType::Q4K | TensorType::Q5K => OffsetKind::Minima,
            _ => OffsetKind::None,
        };
        // The product of two levels of scales has more bits than f16.
        let scales = match self.dtype {
            TensorType::Q4K | TensorType::Q5K | TensorType::Q6K => ScaleType::F32,
            _ => ScaleType::F16,
        };
        let element = if self.is_int4() { QuantizedType::Int4 } else { QuantizedType::Int8 };
        HeldForm { element, offsets, scales, group: self.group() }.of_columns(self.columns)
    }

    fn extent(&self, rows: Range<usize>) -> Range<usize> {
        let row = self.columns / self.dtype.block_elements() as usize * self.dtype.block_bytes() as usize;
        rows.start * row..rows.end * row
    }
}

/// Reads the f16 at an index of bytes.
fn half(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Returns the nibbles of bytes: the low ones, then the high ones.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    bytes.iter().map(|byte| byte & 15).chain(bytes.iter().map(|byte| byte >> 4))
}

/// Appends the elements of a block.
fn read(dtype: TensorType, bytes: &[u8], out: &mut Block) {
    match dtype {
        TensorType::Q8_0 => {
            out.scales.push(half(bytes, 0));
            out.codes.extend(&bytes[2..]);
        }
        TensorType::Q4_0 => {
            out.scales.push(half(bytes, 0));
            out.codes.extend(nibbles(&bytes[2..]));
        }
        TensorType::Q4_1 => {
            out.scales.push(half(bytes, 0));
            out.minima.push(-half(bytes, 2));
            out.codes.extend(nibbles(&bytes[4..]));
        }
        TensorType::Q5_0 => {
            out.scales.push(half(bytes, 0));
            let high = u32::from_le_bytes([bytes[2], bytes[3], bytes[4], bytes[5]]);
            let code = |(index, low): (usize, u8)| (low | ((high >> index & 1) as u8 * 16)).wrapping_sub(16);
            out.codes.extend(nibbles(&bytes[6..]).enumerate().map(code));
        }
        TensorType::Q4K | TensorType::Q5K => {
            let (scale, minimum) = (half(bytes, 0), half(bytes, 2));
            let packed = &bytes[4..16];
            for group in 0..8 {
                let (s, m) = two_levels(packed, group);
                out.scales.push(scale * f32::from(s));
                out.minima.push(minimum * f32::from(m));
            }
            let (high, low) = bytes[16..].split_at(if dtype == TensorType::Q5K { 32 } else { 0 });
            for (pair, low) in low.chunks_exact(32).enumerate() {
                let code = |(index, low): (usize, u8)| match high.get(index % 32) {
                    None => low,
                    Some(high) => low | (high >> (2 * pair + index / 32) & 1) << 4,
                };
                out.codes.extend(nibbles(low).enumerate().map(code));
            }
        }
        TensorType::Q6K => {
            let scale = half(bytes, 208);
            out.scales.extend(bytes[192..208].iter().map(|&byte| scale * f32::from(byte as i8)));
            for part in 0..2 {
                let (low, high) =
                    (&bytes[64 * part..64 * part + 64], &bytes[128 + 32 * part..160 + 32 * part]);
                let code = |(index, low): (usize, u8)| {
                    let high = high[index % 32] >> (2 * (index / 32)) & 3;
                    (low | high << 4).wrapping_sub(32)
                };
                out.codes.extend(nibbles(low).enumerate().map(code));
            }
        }
        // Elements of these types have no blocks.
        TensorType::F32 | TensorType::F16 | TensorType::Bf16 => {}
    }
}

/// Returns the scale and the minimum, of six bits each, of a group of a K-block.
fn two_levels(packed: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        return (packed[group] & 63, packed[group + 4] & 63);
    }
    let scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4;
    (scale, packed[group + 4] >> 4 | packed[group] >> 6 << 4)
}
