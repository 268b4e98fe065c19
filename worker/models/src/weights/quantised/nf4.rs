//! NF4 of bitsandbytes (Dettmers et al., arXiv:2305.14314): the flattened matrix in blocks, two codes per byte, the
//! even element in the high bits, and scales that may be quantised themselves.

use std::ops::Range;

use safetensors::tensor::Dtype;
use serde::Deserialize;

use super::{Checked, Element, GroupScales, Groups, Layout, ModuleTensors, Offsets, Quantised, RawTensor};
use crate::LoadError;

/// The JSON object that the tensor of the quantisation's state holds.
#[derive(Deserialize)]
struct State {
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

pub(super) struct Nf4<'a> {
    weight: RawTensor<'a>,
    absmax: RawTensor<'a>,
    nested: Option<Nested<'a>>,
    values: [f32; 16],
    block: usize,
    columns: usize,
}

/// The scales of scales.
struct Nested<'a> {
    absmax: RawTensor<'a>,
    values: RawTensor<'a>,
    block: usize,
    offset: f32,
}

impl<'a> Nf4<'a> {
    pub fn check(tensors: &ModuleTensors<'a>) -> Result<Checked<'a>, LoadError> {
        let ModuleTensors { rows, columns, .. } = *tensors;
        let elements = rows * columns;
        let name = "weight.quant_state.bitsandbytes__nf4";
        let state = tensors.get(name);
        let length = state.map_or(0, |state| state.bytes.len());
        let state = tensors.need(name, &[Dtype::U8], &[&[length]])?;
        let State { blocksize: block, shape, nested_blocksize, nested_offset } =
            serde_json::from_slice(state.bytes)
                .map_err(|error| state.fault(format!("is malformed: {error}")))?;
        if shape != [rows, columns] {
            return Err(
                state.fault(format!("says shape {shape:?}, but config.json asks for [{rows}, {columns}]"))
            );
        }
        if block == 0 {
            return Err(state.fault("says blocksize 0"));
        }
        let weight = tensors.need("weight", &[Dtype::U8], &[&[elements.div_ceil(2), 1]])?;
        let blocks = elements.div_ceil(block);
        let map = tensors.need("weight.quant_map", &[Dtype::F32], &[&[16]])?;
        let absmax = tensors.need("weight.absmax", &[Dtype::U8, Dtype::F32], &[&[blocks]])?;
        let nested = match absmax.dtype {
            Dtype::F32 => None,
            _ => {
                let block = nested_blocksize.filter(|&block| block > 0);
                let (Some(block), Some(offset)) = (block, nested_offset) else {
                    return Err(state.fault("says no nested_blocksize and nested_offset"));
                };
                let groups = blocks.div_ceil(block);
                let absmax = tensors.need("weight.nested_absmax", &[Dtype::F32], &[&[groups]])?;
                let values = tensors.need("weight.nested_quant_map", &[Dtype::F32], &[&[256]])?;
                Some(Nested { absmax, values, block, offset })
            }
        };
        let values = std::array::from_fn(|code| map.float(code));
        let layout = Box::new(Self { weight, absmax, nested, values, block, columns });
        Ok(Checked { layout, codes: weight.name })
    }

    fn scale(&self, block: usize) -> f32 {
        match &self.nested {
            None => self.absmax.float(block),
            Some(nested) => {
                let value = nested.values.float(usize::from(self.absmax.bytes[block]));
                value * nested.absmax.float(block / nested.block) + nested.offset
            }
        }
    }
}

/// Returns the greatest common divisor.
fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

impl Layout for Nf4<'_> {
    fn read(&self, rows: Range<usize>, columns: Range<usize>) -> Quantised {
        // Blocks run on over the ends of rows, so a row is divided into runs that no block's border divides.
        let run = common_divisor(self.columns, self.block).max(1);
        let (groups, indices) = Groups::runs(&columns, run);
        let scale = |row: usize, group: usize| self.scale((row * self.columns + group * run) / self.block);
        let scales =
            rows.clone().flat_map(|row| indices.clone().map(move |group| scale(row, group))).collect();
        let code = |row: usize, column: usize| {
            let element = row * self.columns + column;
            self.weight.bytes[element / 2] >> (4 * (1 - element % 2)) & 15
        };
        let codes = rows.flat_map(|row| columns.clone().map(move |column| code(row, column))).collect();
        let scales = GroupScales { groups, scales, offsets: Offsets::None };
        Quantised { element: Element::Table(self.values), codes, scales }
    }

    fn extent(&self, rows: Range<usize>) -> Range<usize> {
        rows.start * self.columns / 2..(rows.end * self.columns).div_ceil(2)
    }
}
