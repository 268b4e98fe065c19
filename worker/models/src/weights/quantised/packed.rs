//! compressed-tensors' `pack-quantized`: integers in words of 32 bits along the inputs, the first element in the lowest
//! bits. A stored number is the integer plus half of the range. Zero points are packed along the outputs.

use std::ops::Range;

use safetensors::tensor::Dtype;

use super::{
    Checked, Element, GroupScales, Groups, HeldForm, Layout, ModuleTensors, OffsetKind, Offsets, Quantised,
    QuantizedType, RawTensor, StoredCodes, float8::ScaleGrid,
};
use crate::{LoadError, config::quantisation::Scales};

pub(super) struct Packed<'a> {
    weight: RawTensor<'a>,
    scales: ScaleGrid<'a>,
    zeros: Option<RawTensor<'a>>,
    /// The group of each column, in files with act order.
    of_columns: Option<RawTensor<'a>>,
    bits: usize,
    /// Words per row.
    words: usize,
    columns: usize,
}

/// Returns the field of `bits` bits with this index in a row of words. `bits` divides 32.
pub(super) fn field(word: u32, index: usize, bits: usize) -> u8 {
    (word >> (index * bits % 32) & ((1 << bits) - 1)) as u8
}

impl<'a> Packed<'a> {
    pub fn check(
        tensors: &ModuleTensors<'a>,
        bits: usize,
        scales: Scales,
        symmetric: bool,
    ) -> Result<Checked<'a>, LoadError> {
        let ModuleTensors { rows, columns, .. } = *tensors;
        let words = (columns * bits).div_ceil(32);
        let weight = tensors.need("weight_packed", &[Dtype::I32], &[&[rows, words]])?;
        let shape = tensors.need("weight_shape", &[Dtype::I64], &[&[2]])?;
        let found = [shape.long(0), shape.long(1)];
        if found != [rows, columns].map(|n| n as i64) {
            return Err(
                shape.fault(format!("says {found:?}, but config.json asks for {:?}", [rows, columns]))
            );
        }
        let scales = ScaleGrid::check(tensors, "weight_scale", scales)?;
        let groups = columns.div_ceil(scales.block[1]);
        let zeros = match (symmetric, scales.block[0]) {
            (true, _) => None,
            (false, 1) => {
                let packed = (rows * bits).div_ceil(32);
                Some(tensors.need("weight_zero_point", &[Dtype::I32], &[&[packed, groups]])?)
            }
            (false, _) => {
                let problem = "has one zero point for all rows, which is not supported";
                return Err(weight.fault(problem));
            }
        };
        let of_columns = match tensors.get("weight_g_idx") {
            None => None,
            Some(_) => {
                let of_columns = tensors.need("weight_g_idx", &[Dtype::I32], &[&[columns]])?;
                // A list of -1 stands for no list.
                let is_used = columns > 0 && of_columns.word(0) != u32::MAX;
                if is_used {
                    check_groups(&of_columns, groups)?;
                }
                is_used.then_some(of_columns)
            }
        };
        let layout = Box::new(Self { weight, scales, zeros, of_columns, bits, words, columns });
        Ok(Checked { layout, codes: weight.name })
    }
}

/// Refuses a list of columns' groups with a group that does not exist.
pub(super) fn check_groups(of_columns: &RawTensor<'_>, groups: usize) -> Result<(), LoadError> {
    let count = of_columns.bytes.len() / 4;
    match (0..count).map(|column| of_columns.word(column)).find(|&group| group as usize >= groups) {
        None => Ok(()),
        Some(group) => Err(of_columns.fault(format!("names group {}, but there are {groups}", group as i32))),
    }
}

impl Packed<'_> {
    /// The number that is added to a stored number, so that 8 bits are signed, and fewer have the zero point 8.
    fn shift(&self) -> u8 {
        if self.bits == 8 { 128 } else { 8 - (1 << (self.bits - 1)) }
    }
}

impl Layout for Packed<'_> {
    fn read(&self, rows: Range<usize>, columns: Range<usize>) -> Quantised {
        let Self { bits, words, .. } = *self;
        let code = |row: usize, column: usize| {
            let word = self.weight.word(row * words + column * bits / 32);
            field(word, column, bits).wrapping_add(self.shift())
        };
        let codes = rows.clone().flat_map(|row| columns.clone().map(move |column| code(row, column)));
        let (codes, element) = (codes.collect(), if bits == 8 { Element::Int8 } else { Element::Int4 });
        Quantised { element, codes, scales: self.read_scales(rows, columns) }
    }

    fn read_scales(&self, rows: Range<usize>, columns: Range<usize>) -> GroupScales {
        let bits = self.bits;
        // With act order, a row's columns may belong to any group.
        let grouped = if self.of_columns.is_some() { 0..self.columns } else { columns.clone() };
        let (mut groups, scales) = self.scales.read(&rows, &grouped);
        if let Some(of_columns) = &self.of_columns {
            groups =
                Groups::listed(columns.map(|column| of_columns.word(column)).collect(), groups.per_row());
        }
        let per_row = self.columns.div_ceil(self.scales.block[1]).max(1);
        let offsets = match &self.zeros {
            None => Offsets::None,
            Some(zeros) => {
                let zero = |index: usize| {
                    let (row, group) = (index / per_row, index % per_row);
                    let word = zeros.word(row * bits / 32 * per_row + group);
                    field(word, row, bits).wrapping_add(self.shift())
                };
                Offsets::ZeroPoints(self.scales.indices(&rows, &grouped).map(zero).collect())
            }
        };
        GroupScales { groups, scales, offsets }
    }

    fn form(&self) -> Option<HeldForm> {
        let element = if self.bits == 8 { QuantizedType::Int8 } else { QuantizedType::Int4 };
        let offsets = if self.zeros.is_some() { OffsetKind::ZeroPoints } else { OffsetKind::None };
        self.scales.form(element, offsets, self.columns).filter(|_| self.of_columns.is_none())
    }

    fn stored_codes(&self) -> Option<StoredCodes<'_>> {
        // The bytes of a word come in the order of its bits.
        let codes = StoredCodes { bytes: self.weight.bytes, stride: 4 * self.words };
        (self.bits == 4).then_some(codes)
    }

    fn column_group(&self) -> usize {
        if self.of_columns.is_some() { 1 } else { self.scales.column_group() }
    }

    fn extent(&self, rows: Range<usize>) -> Range<usize> {
        rows.start * self.words * 4..rows.end * self.words * 4
    }
}
