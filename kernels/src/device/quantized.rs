//! Weights that a checkpoint stores quantised.

use half::f16;

use tutti_settings::Quantize;

use crate::DeviceError;

/// Number of inputs that share a scale of two bytes if weights are quantised as
/// [`Quantize::Int4`].
pub const INT4_GROUP: usize = 32;

/// Returns the quantisation of LM heads and of tables of embeddings: eight bits where other matrices have four.
pub fn quantize_of_head(quantize: Quantize) -> Quantize {
    match quantize {
        Quantize::None => Quantize::None,
        Quantize::Int8 | Quantize::Int4 => Quantize::Int8,
    }
}

/// The type of one quantised weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantizedType {
    /// An integer in 0 ..= 15. Its zero point is 8 unless the rows have zero points.
    Int4,
    /// An integer in -128 ..= 127. Its zero point is 0 unless the rows have zero points.
    Int8,
    /// A float of eight bits with four bits of exponent and no infinities (`float8_e4m3fn`).
    E4m3,
    /// A float of four bits with two bits of exponent.
    E2m1,
}

impl QuantizedType {
    /// Bits per weight.
    pub const fn bits(self) -> usize {
        match self {
            Self::Int4 | Self::E2m1 => 4,
            Self::Int8 | Self::E4m3 => 8,
        }
    }
}

/// The type in which a device holds scales and minima of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// IEEE 16-bit floats, for numbers that all are such floats.
    F16,
    /// f32.
    F32,
}

impl ScaleType {
    /// Bytes per scale.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// True if a number of this type has the value `x`, or if `x` is NaN.
    pub fn holds(self, x: f32) -> bool {
        self == Self::F32 || x.is_nan() || f16::from_f32(x).to_f32() == x
    }
}

/// The numbers that are subtracted in a group, in the shape of the scales.
#[derive(Clone, Copy, Debug)]
pub enum GroupOffsets<'a> {
    /// No numbers: codes have the zero point of their type.
    None,
    /// Zero points, in units of codes, for integers only. A zero point is a code: for [`QuantizedType::Int8`], a signed
    /// byte.
    ZeroPoints(&'a [u8]),
    /// Minima, in units of weights, for integers only. Codes then have the zero point 0.
    Minima(&'a [f32]),
}

/// The kind of [`GroupOffsets`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OffsetKind {
    /// [`GroupOffsets::None`].
    None,
    /// [`GroupOffsets::ZeroPoints`].
    ZeroPoints,
    /// [`GroupOffsets::Minima`].
    Minima,
}

impl GroupOffsets<'_> {
    /// The kind of numbers.
    pub fn kind(&self) -> OffsetKind {
        match self {
            Self::None => OffsetKind::None,
            Self::ZeroPoints(_) => OffsetKind::ZeroPoints,
            Self::Minima(_) => OffsetKind::Minima,
        }
    }
}

/// A quantised weight matrix in host memory, row major: `[rows, columns]` = `[outputs, inputs]`. The value of a weight
/// is `(code - zero point) * scale`, or `code * scale - minimum`.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedRows<'a> {
    /// The codes, from the first of the first row to the last of the last row. Each row starts at a whole byte. Of two
    /// codes of four bits in a byte, the one in the low bits comes first.
    pub codes: &'a [u8],
    /// Type of the codes.
    pub element: QuantizedType,
    /// Number of outputs.
    pub rows: usize,
    /// Number of inputs.
    pub columns: usize,
    /// Number of bytes from the start of a row to the start of the next.
    pub stride: usize,
    /// Number of inputs that share a scale: a multiple of 16, or at least `columns`. The last group of a row can be
    /// partial.
    pub group: usize,
    /// Number of outputs that share a scale: 1, or the height of a block.
    pub rows_per_scale: usize,
    /// The scales, `[rows / rows_per_scale, columns / group]`, both rounded up.
    pub scales: &'a [f32],
    /// The type in which the device holds `scales` and minima.
    pub scale_type: ScaleType,
    /// The numbers that are subtracted per group.
    pub offsets: GroupOffsets<'a>,
}

impl<'a> QuantizedRows<'a> {
    /// Number of bytes of the codes of one row.
    pub fn row_bytes(&self) -> usize {
        (self.columns * self.element.bits()).div_ceil(8)
    }

    /// The codes of row `index`, which must be below `rows`.
    pub fn row(&self, index: usize) -> &'a [u8] {
        &self.codes[index * self.stride..][..self.row_bytes()]
    }

    /// Number of groups of one row.
    pub fn groups(&self) -> usize {
        self.columns.div_ceil(self.group.max(1))
    }

    /// Index of the scale of `row` and `column` in `scales`.
    pub fn scale_index(&self, row: usize, column: usize) -> usize {
        row / self.rows_per_scale * self.groups() + column / self.group
    }

    /// Returns an error unless these matrices can be held as one: stacked one below another (q, k and v), or as a pair
    /// with the same number of rows (gate and up). Returns the first matrix.
    pub fn check_fused(matrices: &[Self], is_pair: bool) -> Result<&Self, DeviceError> {
        let first =
            matrices.first().ok_or_else(|| DeviceError::Misuse("no matrices to fuse into one".to_owned()))?;
        matrices.iter().try_for_each(Self::check)?;
        let form = |matrix: &Self| {
            let Self { element, columns, scale_type, .. } = matrix;
            (*element, *columns, *scale_type, matrix.offsets.kind())
        };
        if let Some(other) = matrices.iter().find(|other| form(other) != form(first)) {
            let describe = |matrix: &Self| {
                let (element, columns, scales, offsets) = form(matrix);
                format!("{element:?} of {columns} columns, scales {scales:?}, offsets {offsets:?}")
            };
            let (other, first) = (describe(other), describe(first));
            return Err(DeviceError::Unsupported(format!("{other}, fused with {first}")));
        }
        if is_pair && !(matrices.len() == 2 && matrices[1].rows == first.rows) {
            let rows: Vec<usize> = matrices.iter().map(|matrix| matrix.rows).collect();
            return Err(DeviceError::Misuse(format!("gate and up as matrices of {rows:?} rows")));
        }
        Ok(first)
    }

    /// Returns an error that names the first member that does not fit the others.
    pub fn check(&self) -> Result<(), DeviceError> {
        let Self {
            codes,
            element,
            rows,
            columns,
            stride,
            group,
            rows_per_scale,
            scales,
            scale_type,
            offsets,
        } = self;
        let misuse =
            |what: String| Err(DeviceError::Misuse(format!("{what} of {rows} x {columns} {element:?}")));
        if *group == 0 || *rows_per_scale == 0 || *rows == 0 || *columns == 0 {
            return misuse(format!("groups of {rows_per_scale} x {group} weights"));
        }
        if !group.is_multiple_of(16) && group < columns {
            return Err(DeviceError::Unsupported(format!(
                "groups of {group} inputs, which are not multiples of 16"
            )));
        }
        let bytes = (*rows - 1).checked_mul(*stride).and_then(|gaps| gaps.checked_add(self.row_bytes()));
        if *stride < self.row_bytes() || bytes != Some(codes.len()) {
            return misuse(format!("{} bytes of codes in rows of {stride} bytes", codes.len()));
        }
        let wanted = rows.div_ceil(*rows_per_scale).checked_mul(self.groups());
        if wanted != Some(scales.len()) {
            return misuse(format!("{} scales of groups of {rows_per_scale} x {group}", scales.len()));
        }
        let is_held = |x: &f32| scale_type.holds(*x);
        if !scales.iter().all(is_held) {
            return misuse(format!("scales that are no {scale_type:?}"));
        }
        let are_integers = matches!(element, QuantizedType::Int4 | QuantizedType::Int8);
        match offsets {
            GroupOffsets::None => Ok(()),
            GroupOffsets::ZeroPoints(zero_points) => {
                let is_code = |zero: &u8| *element == QuantizedType::Int8 || *zero < 16;
                let fit = wanted == Some(zero_points.len()) && zero_points.iter().all(is_code);
                if are_integers && fit {
                    Ok(())
                } else {
                    misuse(format!("{} zero points", zero_points.len()))
                }
            }
            GroupOffsets::Minima(minima) => {
                let fit = wanted == Some(minima.len()) && minima.iter().all(is_held);
                if are_integers && fit { Ok(()) } else { misuse(format!("{} minima", minima.len())) }
            }
        }
    }
}
