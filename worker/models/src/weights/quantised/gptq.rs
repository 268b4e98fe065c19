//! GPTQ (Frantar et al., arXiv:2210.17323) as AutoGPTQ and GPTQModel write it: transposed, packed along the inputs,
//! with zero points packed along the outputs. With act order, a list gives the group of each input.

use std::ops::Range;

use safetensors::tensor::Dtype;

use super::{
    Checked, Element, GroupScales, Groups, HeldForm, Layout, ModuleTensors, OffsetKind, Offsets, Quantised,
    QuantizedType, RawTensor,
    float8::FLOATS,
    packed::{check_groups, field},
};
use crate::LoadError;

/// The layout, as the config describes it.
#[derive(Clone, Copy)]
pub(super) struct Form {
    pub bits: usize,
    /// Inputs per group; `None`: all.
    pub group: Option<usize>,
    /// The number that is added to a stored zero point.
    pub zero_offset: i16,
    pub act_order: bool,
}

pub(super) struct Gptq<'a> {
    weight: RawTensor<'a>,
    zeros: RawTensor<'a>,
    scales: RawTensor<'a>,
    /// The group of each input; `None` if groups are runs.
    of_inputs: Option<RawTensor<'a>>,
    form: Form,
    group: usize,
    groups: usize,
    rows: usize,
    columns: usize,
}

impl<'a> Gptq<'a> {
    pub fn check(tensors: &ModuleTensors<'a>, form: Form) -> Result<Checked<'a>, LoadError> {
        let ModuleTensors { rows, columns, .. } = *tensors;
        let Form { bits, .. } = form;
        let group = form.group.unwrap_or(columns).max(1);
        let groups = columns.div_ceil(group);
        let packed = |n: usize| (n * bits).div_ceil(32);
        let weight = tensors.need("qweight", &[Dtype::I32], &[&[packed(columns), rows]])?;
        let zeros = tensors.need("qzeros", &[Dtype::I32], &[&[groups, packed(rows)]])?;
        let scales = tensors.need("scales", &FLOATS, &[&[groups, rows]])?;
        let listed = match tensors.get("g_idx") {
            None if !form.act_order => None,
            _ => Some(tensors.need("g_idx", &[Dtype::I32], &[&[columns]])?),
        };
        if let Some(listed) = &listed {
            check_groups(listed, groups)?;
        }
        let is_run = |listed: &RawTensor<'_>| (0..columns).all(|i| listed.word(i) as usize == i / group);
        let of_inputs = listed.filter(|listed| !is_run(listed));
        let layout = Self { weight, zeros, scales, of_inputs, form, group, groups, rows, columns };
        Ok(Checked { layout: Box::new(layout), codes: weight.name })
    }
}

impl Layout for Gptq<'_> {
    fn read(&self, rows: Range<usize>, columns: Range<usize>) -> Quantised {
        let Form { bits, zero_offset, .. } = self.form;
        let (groups, indices) = match &self.of_inputs {
            None => Groups::runs(&columns, self.group),
            Some(listed) => {
                let of_columns = columns.clone().map(|column| listed.word(column)).collect();
                (Groups::listed(of_columns, self.groups), 0..self.groups)
            }
        };
        // Codes are signed bytes, so numbers of eight bits move down by half of the range.
        let shift = if bits == 8 { 128 } else { 0 };
        let mut codes = vec![0; rows.len() * columns.len()];
        for (index, column) in columns.clone().enumerate() {
            let first = column * bits / 32 * self.rows;
            for (row, output) in rows.clone().enumerate() {
                let code = field(self.weight.word(first + output), column, bits);
                codes[row * columns.len() + index] = code.wrapping_sub(shift);
            }
        }
        let words = (self.rows * bits).div_ceil(32);
        // Version 1 stores zero points less 1. As in GPTQModel, 1 is added to each of a word's fields in one sum, so
        // that a stored number of all ones, which stands for 0, carries into the next field as it borrowed from it.
        let added = match (zero_offset, bits) {
            (0, _) => 0,
            (_, 2) => 0x5555_5555,
            (_, 4) => 0x1111_1111,
            (_, _) => 0x0101_0101,
        };
        let of_groups = || rows.clone().flat_map(|row| indices.clone().map(move |group| (group, row)));
        let zero = |(group, row): (usize, usize)| {
            let word = self.zeros.word(group * words + row * bits / 32);
            field(word.wrapping_add(added), row, bits).wrapping_sub(shift)
        };
        let zeros = of_groups().map(zero).collect();
        let scales = of_groups().map(|(group, row)| self.scales.float(group * self.rows + row)).collect();
        let element = if bits == 8 { Element::Int8 } else { Element::Int4 };
        let scales = GroupScales { groups, scales, offsets: Offsets::ZeroPoints(zeros) };
        Quantised { element, codes, scales }
    }

    fn form(&self) -> Option<HeldForm> {
        let element = if self.form.bits == 8 { QuantizedType::Int8 } else { QuantizedType::Int4 };
        let scales = self.scales.scale_type();
        let form = HeldForm { element, offsets: OffsetKind::ZeroPoints, scales, group: self.group };
        form.of_columns(self.columns).filter(|_| self.of_inputs.is_none())
    }

    fn column_group(&self) -> usize {
        if self.of_inputs.is_none() && self.group < self.columns { self.group } else { 1 }
    }

    fn extent(&self, _: Range<usize>) -> Range<usize> {
        0..self.weight.bytes.len()
    }
}
