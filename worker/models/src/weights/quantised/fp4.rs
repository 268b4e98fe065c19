//! Floats of type e2m1, two per byte, the even element in the low bits: MXFP4, with a power of two per 32 elements, and
//! NVFP4, with an e4m3 scale per 16 elements and one f32 scale for all.

use std::ops::Range;

use safetensors::tensor::Dtype;

use super::{
    Checked, Element, GroupScales, Groups, HeldForm, Layout, ModuleTensors, OffsetKind, Offsets, Quantised,
    QuantizedType, RawTensor, ScaleType, StoredCodes,
};
use crate::{LoadError, config::quantisation::Nvfp4};

pub(super) struct Fp4<'a> {
    weight: RawTensor<'a>,
    scale: RawTensor<'a>,
    kind: Kind,
    columns: usize,
}

enum Kind {
    /// Scales are exponents with bias 127.
    Mx,
    /// Scales are multiplied by this factor.
    NvTimes(f32),
    /// Scales are divided by this number.
    NvOver(f32),
}

impl<'a> Fp4<'a> {
    pub fn check_mx(tensors: &ModuleTensors<'a>) -> Result<Checked<'a>, LoadError> {
        Self::check(tensors, "weight_packed", ("weight_scale", Dtype::U8), 32, Kind::Mx)
    }

    /// Checks the tensors of a module in the names of DeepSeek-V4.
    pub fn check_pairs(tensors: &ModuleTensors<'a>) -> Result<Checked<'a>, LoadError> {
        Self::check(tensors, "weight", ("scale", Dtype::F8_E8M0), 32, Kind::Mx)
    }

    pub fn check_nv(tensors: &ModuleTensors<'a>, maker: Nvfp4) -> Result<Checked<'a>, LoadError> {
        let shapes: &[&[usize]] = &[&[1], &[]];
        let all = |name| Ok::<_, LoadError>(tensors.need(name, &[Dtype::F32], shapes)?.float(0));
        match maker {
            Nvfp4::CompressedTensors => {
                let kind = Kind::NvOver(all("weight_global_scale")?);
                Self::check(tensors, "weight_packed", ("weight_scale", Dtype::F8_E4M3), 16, kind)
            }
            Nvfp4::ModelOpt => {
                let kind = Kind::NvTimes(all("weight_scale_2")?);
                Self::check(tensors, "weight", ("weight_scale", Dtype::F8_E4M3), 16, kind)
            }
        }
    }

    fn check(
        tensors: &ModuleTensors<'a>,
        codes: &str,
        (scale, scale_type): (&str, Dtype),
        size: usize,
        kind: Kind,
    ) -> Result<Checked<'a>, LoadError> {
        let ModuleTensors { rows, columns, .. } = *tensors;
        if !columns.is_multiple_of(size) {
            let path = tensors.dir.into();
            let problem = format!("has {columns} inputs, which are not a multiple of a group of {size}");
            return Err(LoadError::Tensor { path, name: format!("{}.{codes}", tensors.module), problem });
        }
        let weight = tensors.need(codes, &[Dtype::U8, Dtype::I8], &[&[rows, columns / 2]])?;
        let scale = tensors.need(scale, &[scale_type], &[&[rows, columns / size]])?;
        Ok(Checked { layout: Box::new(Self { weight, scale, kind, columns }), codes: weight.name })
    }

    fn group(&self) -> usize {
        if matches!(self.kind, Kind::Mx) { 32 } else { 16 }
    }
}

/// Returns two to the power of a biased exponent; 255 is NaN.
pub(super) fn e8m0(exponent: u8) -> f32 {
    match exponent {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

impl Layout for Fp4<'_> {
    fn read(&self, rows: Range<usize>, columns: Range<usize>) -> Quantised {
        let scales = self.read_scales(rows.clone(), columns.clone());
        let code = |row: usize, column: usize| {
            self.weight.bytes[(row * self.columns + column) / 2] >> (4 * (column % 2)) & 15
        };
        let codes = rows.flat_map(|row| columns.clone().map(move |column| code(row, column))).collect();
        Quantised { element: Element::E2m1, codes, scales }
    }

    fn read_scales(&self, rows: Range<usize>, columns: Range<usize>) -> GroupScales {
        let (groups, indices) = Groups::runs(&columns, self.group());
        let per_row = self.columns / self.group();
        let scale = |index: usize| match self.kind {
            Kind::Mx => e8m0(self.scale.bytes[index]),
            Kind::NvTimes(factor) => self.scale.float(index) * factor,
            Kind::NvOver(divisor) => self.scale.float(index) / divisor,
        };
        let scales = rows.flat_map(|row| indices.clone().map(move |group| scale(row * per_row + group)));
        GroupScales { groups, scales: scales.collect(), offsets: Offsets::None }
    }

    fn form(&self) -> Option<HeldForm> {
        let (offsets, scales) = (OffsetKind::None, ScaleType::F32);
        HeldForm { element: QuantizedType::E2m1, offsets, scales, group: self.group() }
            .of_columns(self.columns)
    }

    fn stored_codes(&self) -> Option<StoredCodes<'_>> {
        Some(StoredCodes { bytes: self.weight.bytes, stride: self.columns / 2 })
    }

    fn column_group(&self) -> usize {
        self.group()
    }

    fn extent(&self, rows: Range<usize>) -> Range<usize> {
        rows.start * self.columns / 2..rows.end * self.columns / 2
    }
}
