//! compressed-tensors' `int-quantized`: one byte per element.

use std::ops::Range;

use safetensors::tensor::Dtype;

use super::{
    Checked, Element, GroupScales, HeldForm, Layout, ModuleTensors, OffsetKind, Offsets, Quantised,
    QuantizedType, RawTensor, StoredCodes,
    float8::{ScaleGrid, window},
};
use crate::{LoadError, config::quantisation::Scales};

pub(super) struct Int8<'a> {
    weight: RawTensor<'a>,
    scales: ScaleGrid<'a>,
    /// Zero points, as the scales are arranged.
    zeros: Option<RawTensor<'a>>,
    columns: usize,
}

impl<'a> Int8<'a> {
    pub fn check(
        tensors: &ModuleTensors<'a>,
        scales: Scales,
        symmetric: bool,
    ) -> Result<Checked<'a>, LoadError> {
        let weight = tensors.need("weight", &[Dtype::I8], &[&[tensors.rows, tensors.columns]])?;
        let grid = ScaleGrid::check(tensors, "weight_scale", scales)?;
        let zeros = match symmetric {
            true => {
                // Older writers keep zero points that are all zero.
                let stored = tensors.get("weight_zero_point");
                if let Some(zeros) = stored.filter(|zeros| zeros.bytes.iter().any(|&byte| byte != 0)) {
                    return Err(zeros.fault("has zero points, but config.json says symmetric".to_owned()));
                }
                None
            }
            false => Some(tensors.need("weight_zero_point", &[Dtype::I8], &[grid.shape()])?),
        };
        let layout = Box::new(Self { weight, scales: grid, zeros, columns: tensors.columns });
        Ok(Checked { layout, codes: weight.name })
    }
}

impl Layout for Int8<'_> {
    fn read(&self, rows: Range<usize>, columns: Range<usize>) -> Quantised {
        let codes = window(self.weight.bytes, self.columns, &rows, &columns);
        Quantised { element: Element::Int8, codes, scales: self.read_scales(rows, columns) }
    }

    fn read_scales(&self, rows: Range<usize>, columns: Range<usize>) -> GroupScales {
        let (groups, scales) = self.scales.read(&rows, &columns);
        let offsets = match &self.zeros {
            None => Offsets::None,
            Some(zeros) => Offsets::ZeroPoints(
                self.scales.indices(&rows, &columns).map(|index| zeros.bytes[index]).collect(),
            ),
        };
        GroupScales { groups, scales, offsets }
    }

    fn form(&self) -> Option<HeldForm> {
        let offsets = if self.zeros.is_some() { OffsetKind::ZeroPoints } else { OffsetKind::None };
        self.scales.form(QuantizedType::Int8, offsets, self.columns)
    }

    fn stored_codes(&self) -> Option<StoredCodes<'_>> {
        Some(StoredCodes { bytes: self.weight.bytes, stride: self.columns })
    }

    fn column_group(&self) -> usize {
        self.scales.column_group()
    }

    fn extent(&self, rows: Range<usize>) -> Range<usize> {
        rows.start * self.columns..rows.end * self.columns
    }
}
