//! 8-bit floats with a scale per tensor, row, group or block: DeepSeek's and Qwen's FP8, and compressed-tensors'
//! `float-quantized`. A scale multiplies, even if its name says inverse.

use std::ops::Range;

use safetensors::tensor::Dtype;

use super::{
    Checked, Element, GroupScales, Groups, HeldForm, Layout, ModuleTensors, OffsetKind, Offsets, Quantised,
    QuantizedType, RawTensor, StoredCodes,
};
use crate::{LoadError, config::quantisation::Scales};

/// Types of scales.
pub(super) const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// The scales of a matrix, in any of their arrangements.
pub(super) struct ScaleGrid<'a> {
    scale: RawTensor<'a>,
    /// Rows and columns that share a scale.
    pub block: [usize; 2],
    /// Scales per row of the tensor of scales.
    per_row: usize,
}

impl<'a> ScaleGrid<'a> {
    pub fn check(tensors: &ModuleTensors<'a>, name: &str, scales: Scales) -> Result<Self, LoadError> {
        let ModuleTensors { rows, columns, .. } = *tensors;
        let block = match scales {
            Scales::Tensor => [rows, columns],
            Scales::Channel => [1, columns],
            Scales::Group(size) => [1, size],
            Scales::Block(block) => block,
        }
        .map(|size| size.max(1));
        let grid = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
        let shapes: &[&[usize]] = match scales {
            Scales::Tensor => &[&[1], &[], &[1, 1]],
            Scales::Channel => &[&grid, &grid[..1]],
            Scales::Group(_) | Scales::Block(_) => &[&grid],
        };
        let [f32, f16, bf16] = FLOATS;
        let scale = tensors.need(name, &[f32, f16, bf16, Dtype::F8_E8M0], shapes)?;
        Ok(Self { scale, block, per_row: grid[1] })
    }

    /// Returns the division of columns, and the scales of a window.
    pub fn read(&self, rows: &Range<usize>, columns: &Range<usize>) -> (Groups, Vec<f32>) {
        let scales = self.indices(rows, columns).map(|index| self.scale.float(index)).collect();
        (Groups::runs(columns, self.block[1]).0, scales)
    }

    /// Returns the indices of the scales of a window in the tensor of scales.
    pub fn indices(&self, rows: &Range<usize>, columns: &Range<usize>) -> impl Iterator<Item = usize> {
        let (_, groups) = Groups::runs(columns, self.block[1]);
        let (height, per_row) = (self.block[0], self.per_row);
        rows.clone().flat_map(move |row| groups.clone().map(move |group| row / height * per_row + group))
    }

    /// Returns the shape of the tensor of scales.
    pub fn shape(&self) -> &'a [usize] {
        self.scale.shape
    }

    /// Returns the form in which a device holds codes with these scales.
    pub fn form(&self, element: QuantizedType, offsets: OffsetKind, columns: usize) -> Option<HeldForm> {
        let scales = self.scale.scale_type();
        HeldForm { element, offsets, scales, group: self.block[1] }.of_columns(columns)
    }

    /// Number of columns of a group; 1 if a group is a whole row.
    pub fn column_group(&self) -> usize {
        if self.per_row > 1 { self.block[1] } else { 1 }
    }
}

pub(super) struct Float8<'a> {
    weight: RawTensor<'a>,
    scales: ScaleGrid<'a>,
    columns: usize,
}

impl<'a> Float8<'a> {
    pub fn check(tensors: &ModuleTensors<'a>, scale: &str, scales: Scales) -> Result<Checked<'a>, LoadError> {
        let weight = tensors.need("weight", &[Dtype::F8_E4M3], &[&[tensors.rows, tensors.columns]])?;
        let scales = ScaleGrid::check(tensors, scale, scales)?;
        let layout = Box::new(Self { weight, scales, columns: tensors.columns });
        Ok(Checked { layout, codes: weight.name })
    }
}

/// Copies a window of codes of one byte.
pub(super) fn window(bytes: &[u8], stride: usize, rows: &Range<usize>, columns: &Range<usize>) -> Vec<u8> {
    let of_row = |row: usize| &bytes[row * stride + columns.start..row * stride + columns.end];
    rows.clone().flat_map(of_row).copied().collect()
}

impl Layout for Float8<'_> {
    fn read(&self, rows: Range<usize>, columns: Range<usize>) -> Quantised {
        let codes = window(self.weight.bytes, self.columns, &rows, &columns);
        Quantised { element: Element::E4m3, codes, scales: self.read_scales(rows, columns) }
    }

    fn read_scales(&self, rows: Range<usize>, columns: Range<usize>) -> GroupScales {
        let (groups, scales) = self.scales.read(&rows, &columns);
        GroupScales { groups, scales, offsets: Offsets::None }
    }

    fn form(&self) -> Option<HeldForm> {
        self.scales.form(QuantizedType::E4m3, OffsetKind::None, self.columns)
    }

    fn stored_codes(&self) -> Option<StoredCodes<'_>> {
        Some(StoredCodes { bytes: self.weight.bytes, stride: self.columns })
    }

    fn column_group(&self) -> usize {
        self.scales.column_group()
    }

    fn row_group(&self) -> usize {
        // A scale of all rows is the same on every rank.
        let [rows, _] = self.scales.block;
        if rows * self.columns < self.weight.bytes.len() { rows } else { 1 }
    }

    fn extent(&self, rows: Range<usize>) -> Range<usize> {
        rows.start * self.columns..rows.end * self.columns
    }
}
