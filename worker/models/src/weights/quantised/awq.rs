//! The GEMM layout of AWQ (Lin et al., arXiv:2306.00978): transposed, 4 bits, eight outputs per word in the order of
//! AutoAWQ's kernels.

use std::ops::Range;

use safetensors::tensor::Dtype;

use super::{
    Checked, Element, GroupScales, Groups, HeldForm, Layout, ModuleTensors, OffsetKind, Offsets, Quantised,
    QuantizedType, RawTensor, packed::field,
};
use crate::LoadError;

/// The nibble of each of eight outputs.
const NIBBLES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

pub(super) struct Awq<'a> {
    weight: RawTensor<'a>,
    zeros: RawTensor<'a>,
    scales: RawTensor<'a>,
    group: usize,
    rows: usize,
    columns: usize,
}

impl<'a> Awq<'a> {
    pub fn check(tensors: &ModuleTensors<'a>, group: Option<usize>) -> Result<Checked<'a>, LoadError> {
        let ModuleTensors { rows, columns, .. } = *tensors;
        let group = group.unwrap_or(columns).max(1);
        let groups = columns.div_ceil(group);
        let weight = tensors.need("qweight", &[Dtype::I32], &[&[columns, rows.div_ceil(8)]])?;
        let zeros = tensors.need("qzeros", &[Dtype::I32], &[&[groups, rows.div_ceil(8)]])?;
        let scales = tensors.need("scales", &super::float8::FLOATS, &[&[groups, rows]])?;
        let layout = Box::new(Self { weight, zeros, scales, group, rows, columns });
        Ok(Checked { layout, codes: weight.name })
    }

    /// Reads the number of an output in a row of words.
    fn nibble(&self, tensor: &RawTensor<'_>, line: usize, output: usize) -> u8 {
        field(tensor.word(line * self.rows.div_ceil(8) + output / 8), NIBBLES[output % 8], 4)
    }
}

impl Layout for Awq<'_> {
    fn read(&self, rows: Range<usize>, columns: Range<usize>) -> Quantised {
        let (groups, indices) = Groups::runs(&columns, self.group);
        let mut codes = vec![0; rows.len() * columns.len()];
        // The words of an input lie together, so inputs are the outer loop.
        for (index, column) in columns.clone().enumerate() {
            for (row, output) in rows.clone().enumerate() {
                codes[row * columns.len() + index] = self.nibble(&self.weight, column, output);
            }
        }
        let of_groups = || rows.clone().flat_map(|row| indices.clone().map(move |group| (group, row)));
        let scales = of_groups().map(|(group, row)| self.scales.float(group * self.rows + row)).collect();
        let zeros = of_groups().map(|(group, row)| self.nibble(&self.zeros, group, row)).collect();
        let scales = GroupScales { groups, scales, offsets: Offsets::ZeroPoints(zeros) };
        Quantised { element: Element::Int4, codes, scales }
    }

    fn form(&self) -> Option<HeldForm> {
        HeldForm {
            element: QuantizedType::Int4,
            offsets: OffsetKind::ZeroPoints,
            scales: self.scales.scale_type(),
            group: self.group,
        }
        .of_columns(self.columns)
    }

    fn column_group(&self) -> usize {
        if self.group < self.columns { self.group } else { 1 }
    }

    fn extent(&self, _: Range<usize>) -> Range<usize> {
        0..self.weight.bytes.len()
    }
}
