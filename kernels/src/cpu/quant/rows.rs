//! Quantisation of a checkpoint's weights to rows of codes, for devices that hold such rows. Codes and scales are the
//! numbers that a CPU holds.

use std::marker::PhantomData;

use super::{grouped, int8};
use crate::cpu::memory::format::{Bf16, F16, F32, Format};
use crate::cpu::memory::fused_matrices::FusedMatrices;
use crate::cpu::simd::isa::{Isa, Path};
use crate::cpu::simd::{Op, Simd};
use crate::{DeviceError, HostMatrix, INT4_GROUP, Quantize, QuantizedType, ScaleType, WeightType};

/// Quantises the rows of matrices that a device holds as one.
pub(crate) struct RowQuantiser<'a> {
    matrices: &'a [HostMatrix<'a>],
    /// Number of rows of all matrices, and of inputs.
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    /// True if the matrices are gate and up.
    pub(crate) is_pair: bool,
    /// Type of the codes: integers without zero points.
    pub(crate) element: QuantizedType,
    pub(crate) scale_type: ScaleType,
    /// Number of inputs that share a scale. The last group of a row can be partial.
    pub(crate) group: usize,
    dtype: WeightType,
    path: Path,
}

impl<'a> RowQuantiser<'a> {
    /// Checks the matrices. Returns `None` if they are not to be quantised.
    pub(crate) fn new(
        matrices: &'a [HostMatrix<'a>],
        is_pair: bool,
        quantize: Quantize,
    ) -> Result<Option<Self>, DeviceError> {
        let source = FusedMatrices::new(matrices, is_pair)?;
        let (element, scale_type, group) = match quantize {
            Quantize::None => return Ok(None),
            Quantize::Int8 => (QuantizedType::Int8, ScaleType::F32, int8::GROUP),
            Quantize::Int4 => {
                grouped::check_groups(source)?;
                (QuantizedType::Int4, ScaleType::F16, INT4_GROUP)
            }
        };
        let FusedMatrices { shape, dtype, .. } = source;
        let (outputs, inputs, path) = (shape.outputs, shape.inputs, Path::new(Isa::detect())?);
        Ok(Some(Self { matrices, outputs, inputs, is_pair, element, scale_type, group, dtype, path }))
    }

    /// The rows in the checkpoint's type.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &'a [u8]> {
        self.matrices.iter().flat_map(|matrix| (0..matrix.rows).map(move |row| matrix.row(row)))
    }

    /// Quantises one of the [`rows`](Self::rows). `scales` receives a number per group. Of two codes of four bits in a
    /// byte of `codes`, the one in the low bits comes first.
    pub(crate) fn quantise(&self, row: &[u8], codes: &mut [u8], scales: &mut [f32]) {
        match self.dtype {
            WeightType::F32 => self.quantise_as::<F32>(row, codes, scales),
            WeightType::F16 => self.quantise_as::<F16>(row, codes, scales),
            WeightType::Bf16 => self.quantise_as::<Bf16>(row, codes, scales),
        }
    }

    fn quantise_as<W: Format>(&self, row: &[u8], codes: &mut [u8], scales: &mut [f32]) {
        let row = Row::<W> { row, inputs: self.inputs, codes, scales, format: PhantomData };
        if self.element == QuantizedType::Int4 {
            self.path.run(Int4Row(row));
        } else {
            self.path.run(Int8Row(row));
        }
    }
}

struct Row<'a, W> {
    row: &'a [u8],
    inputs: usize,
    codes: &'a mut [u8],
    scales: &'a mut [f32],
    format: PhantomData<W>,
}

/// Quantises a row to integers of eight bits.
struct Int8Row<'a, W>(Row<'a, W>);

impl<W: Format> Op for Int8Row<'_, W> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Row { row, inputs, codes, scales, .. } = self.0;
        let groups = codes[..inputs].chunks_mut(int8::GROUP).zip(scales);
        for (group, (codes, scale)) in groups.enumerate() {
            let (mut x, mut numbers) = ([0.0; int8::GROUP], [0; int8::GROUP]);
            let x = &mut x[..codes.len()];
            int8::widen::<S, W>(s, row, group * int8::GROUP, x);
            *scale = int8::quantise::quantise(s, x, &mut numbers);
            codes.iter_mut().zip(numbers).for_each(|(code, number)| *code = number.cast_unsigned());
        }
    }
}

/// Quantises a row to integers of four bits.
struct Int4Row<'a, W>(Row<'a, W>);

impl<W: Format> Op for Int4Row<'_, W> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Row { row, inputs, codes, scales, .. } = self.0;
        let groups = codes[..inputs.div_ceil(2)].chunks_mut(INT4_GROUP / 2).zip(scales);
        for (group, (codes, scale)) in groups.enumerate() {
            let (mut x, first) = ([0.0; INT4_GROUP], group * INT4_GROUP);
            int8::widen::<S, W>(s, row, first, &mut x[..(inputs - first).min(INT4_GROUP)]);
            let (of_group, numbers) = grouped::quantise_group(s, &x);
            *scale = of_group;
            for (code, [low, high]) in codes.iter_mut().zip(numbers.as_chunks::<2>().0) {
                *code = low | high << 4;
            }
        }
    }
}
