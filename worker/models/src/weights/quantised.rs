//! Quantised matrices of checkpoints. Each layout has a module that reads codes and scales of a window into one
//! description, [`Quantised`]. A device that has the [form](HeldForm) of a layout holds codes and scales, which
//! [`held`] prepares. For all others, they are dequantised here and nowhere else.

mod awq;
mod float8;
mod fp4;
mod gptq;
mod groups;
mod held;
mod int8;
mod module;
mod nf4;
mod packed;

use std::ops::Range;

use half::{bf16, f16};
use safetensors::tensor::Dtype;
use tutti_kernels::{OffsetKind, QuantizedType, ScaleType, WeightType, e4m3};

pub(super) use self::groups::Groups;
pub(crate) use self::held::HeldForm;
pub(super) use self::held::HeldRows;
pub(super) use self::module::{ModuleTensors, RawTensor};
use crate::{LoadError, config::quantisation::Scheme};

/// Suffixes of the tensors by which a module shows that it is quantised, beside a `weight` of another type.
pub(super) const MARKS: [&str; 6] =
    ["weight_packed", "qweight", "weight_scale_inv", "weight_scale", "weight.absmax", SCALE];
/// Suffix of scales in DeepSeek-V4.
const SCALE: &str = "scale";

/// Suffixes of all tensors that a quantised module may have. Those of activations are not read, because activations are
/// not quantised.
pub(super) const SUFFIXES: [&str; 23] = [
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "qweight",
    "qzeros",
    "scales",
    SCALE,
    "g_idx",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    "weight.quant_state.bitsandbytes__nf4",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
];

/// The values of floats of type e2m1, by their four bits (OCP Microscaling Formats, version 1.0).
const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Quantised elements of a window of a matrix. Element `x` of a group with scale `s` stands for `(x - zero) * s`, or
/// for `x * s - minimum`.
#[derive(Debug)]
pub(super) struct Quantised {
    pub element: Element,
    /// One code per element, row by row.
    pub codes: Vec<u8>,
    pub scales: GroupScales,
}

/// The scales of a window of a matrix.
#[derive(Debug)]
pub(super) struct GroupScales {
    pub groups: Groups,
    /// One scale per group, row by row.
    pub scales: Vec<f32>,
    pub offsets: Offsets,
}

/// Codes of a matrix that a file stores as [`QuantizedRows`](tutti_kernels::QuantizedRows) describes them.
#[derive(Clone, Copy)]
pub(super) struct StoredCodes<'a> {
    pub bytes: &'a [u8],
    /// Number of bytes from the start of a row to the start of the next.
    pub stride: usize,
}

/// The meaning of a code.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Element {
    /// An integer in 0 ..= 15. Its zero point is 8 unless there are offsets.
    Int4,
    /// A signed integer in two's complement.
    Int8,
    /// A float of type e4m3, without infinities (Micikevicius et al., arXiv:2209.05433).
    E4m3,
    /// A float of type e2m1.
    E2m1,
    /// The value at the code's index.
    Table([f32; 16]),
}

/// The number that is subtracted per group.
#[derive(Debug)]
pub(super) enum Offsets {
    None,
    /// Zero points. Each is a code.
    ZeroPoints(Vec<u8>),
    /// Minima, in units of values. Codes have the zero point 0.
    Minima(Vec<f32>),
}

/// A matrix in one of the layouts, whose tensors are checked.
pub(super) trait Layout: Sync {
    /// Reads the window of these rows and columns.
    fn read(&self, rows: Range<usize>, columns: Range<usize>) -> Quantised;

    /// Reads the scales of the window of these rows and columns.
    fn read_scales(&self, rows: Range<usize>, columns: Range<usize>) -> GroupScales {
        self.read(rows, columns).scales
    }

    /// Returns the form in which a device can hold the matrix; `None` if there is none.
    fn form(&self) -> Option<HeldForm> {
        None
    }

    /// Returns the codes of the whole matrix, if the file stores them in this form.
    fn stored_codes(&self) -> Option<StoredCodes<'_>> {
        None
    }

    /// Number of columns of a group; a rank's columns are a multiple of it. 1 if any columns can be read.
    fn column_group(&self) -> usize {
        1
    }

    /// Number of rows of a group; a rank's rows are a multiple of it. 1 if any rows can be read.
    fn row_group(&self) -> usize {
        1
    }

    /// The bytes of the codes of these rows in the tensor of all codes.
    fn extent(&self, rows: Range<usize>) -> Range<usize>;
}

/// A layout with the tensor of its codes.
pub(super) struct Checked<'a> {
    pub layout: Box<dyn Layout + 'a>,
    /// Name in the files of the tensor of all codes.
    pub codes: &'a str,
}

/// Checks the presence, the types and the shapes of a module's tensors. `mark` is the one of [`MARKS`] that the module
/// has.
pub(super) fn check<'a>(
    scheme: Scheme,
    mark: &str,
    parts: &ModuleTensors<'a>,
) -> Result<Checked<'a>, LoadError> {
    match scheme {
        // The config names one scheme for all matrices, and the type of a matrix tells if it has the other one.
        Scheme::Float8 { .. } if mark == SCALE && parts.holds("weight", Dtype::I8) => {
            fp4::Fp4::check_pairs(parts)
        }
        Scheme::Float8 { scales, .. } if mark == SCALE => float8::Float8::check(parts, SCALE, scales),
        Scheme::Float8 { scale, scales } => float8::Float8::check(parts, scale, scales),
        Scheme::Int8 { scales, symmetric } => int8::Int8::check(parts, scales, symmetric),
        Scheme::Packed { bits, scales, symmetric } => packed::Packed::check(parts, bits, scales, symmetric),
        Scheme::Mxfp4 => fp4::Fp4::check_mx(parts),
        Scheme::Nvfp4(maker) => fp4::Fp4::check_nv(parts, maker),
        Scheme::Awq { group } => awq::Awq::check(parts, group),
        Scheme::Gptq { bits, group, zero_offset, act_order } => {
            gptq::Gptq::check(parts, gptq::Form { bits, group, zero_offset, act_order })
        }
        Scheme::Nf4 => nf4::Nf4::check(parts),
    }
}

impl Quantised {
    /// Writes the values as elements of type `dtype`, row by row. Each is computed in f32 and rounded once.
    pub fn dequantise(&self, dtype: WeightType, out: &mut [u8]) {
        match dtype {
            WeightType::F32 => self.each(|x, out: &mut [u8; 4]| *out = x.to_le_bytes(), out),
            WeightType::F16 => self.each(|x, out: &mut [u8; 2]| *out = f16::from_f32(x).to_le_bytes(), out),
            WeightType::Bf16 => self.each(|x, out: &mut [u8; 2]| *out = bf16::from_f32(x).to_le_bytes(), out),
        }
    }

    fn each<const N: usize>(&self, store: impl Fn(f32, &mut [u8; N]), out: &mut [u8]) {
        let Self { element, codes, scales: GroupScales { groups, scales, offsets } } = self;
        let (columns, per_row) = (groups.columns(), groups.per_row());
        let values = element.values(matches!(offsets, Offsets::None));
        let rows = codes
            .chunks_exact(columns.max(1))
            .zip(out.as_chunks_mut::<N>().0.chunks_exact_mut(columns.max(1)));
        for (row, (codes, out)) in rows.enumerate() {
            for (column, (&code, out)) in codes.iter().zip(out).enumerate() {
                let group = row * per_row + groups.of_column(column);
                let value = match offsets {
                    Offsets::None => values[usize::from(code)] * scales[group],
                    Offsets::ZeroPoints(zeros) => {
                        (values[usize::from(code)] - values[usize::from(zeros[group])]) * scales[group]
                    }
                    Offsets::Minima(minima) => values[usize::from(code)] * scales[group] - minima[group],
                };
                store(value, out);
            }
        }
    }
}

impl Element {
    /// Returns the values of all codes. With `centred`, integers of four bits have the zero point 8.
    fn values(self, centred: bool) -> [f32; 256] {
        let zero = if centred { 8.0 } else { 0.0 };
        std::array::from_fn(|code| match self {
            Self::Int4 => f32::from(code as u8) - zero,
            Self::Int8 => f32::from(code as u8 as i8),
            Self::E4m3 => e4m3::value(code as u8),
            Self::E2m1 => E2M1[code & 15],
            Self::Table(values) => values[code & 15],
        })
    }
}

#[cfg(test)]
mod tests;
