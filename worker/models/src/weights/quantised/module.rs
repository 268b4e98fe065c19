//! The tensors of a quantised module in a checkpoint's files.

use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::Dtype;
use tutti_kernels::{ScaleType, e4m3};

use super::fp4::e8m0;
use crate::LoadError;

/// A tensor of a file, in its stored type.
#[derive(Clone, Copy)]
pub(in crate::weights) struct RawTensor<'a> {
    pub name: &'a str,
    pub path: &'a Path,
    pub dtype: Dtype,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
}

/// A look-up of a tensor by its name.
type Find<'a> = Box<dyn Fn(&str) -> Option<RawTensor<'a>> + 'a>;

/// The tensors of a module with a matrix of `rows` x `columns`.
pub(in crate::weights) struct ModuleTensors<'a> {
    /// Name of the module.
    pub module: &'a str,
    /// Directory of the files.
    pub dir: &'a Path,
    pub rows: usize,
    pub columns: usize,
    /// Finds a tensor by its name.
    pub find: Find<'a>,
}

impl<'a> ModuleTensors<'a> {
    /// Returns the module's tensor with a suffix.
    pub fn get(&self, suffix: &str) -> Option<RawTensor<'a>> {
        (self.find)(&format!("{}.{suffix}", self.module))
    }

    /// True if the module has a tensor with this suffix and of this type.
    pub fn holds(&self, suffix: &str, dtype: Dtype) -> bool {
        self.get(suffix).is_some_and(|tensor| tensor.dtype == dtype)
    }

    /// Returns the module's tensor with a suffix. Refuses it if it is missing, of a type that is not in `dtypes`, or of
    /// a shape that is not in `shapes`.
    pub fn need(
        &self,
        suffix: &str,
        dtypes: &[Dtype],
        shapes: &[&[usize]],
    ) -> Result<RawTensor<'a>, LoadError> {
        let Some(tensor) = self.get(suffix) else {
            let shape = shapes.first().copied().unwrap_or_default();
            return Err(LoadError::Tensor {
                path: self.dir.into(),
                name: format!("{}.{suffix}", self.module),
                problem: format!("of shape {shape:?} is missing, but quantization_config asks for it"),
            });
        };
        if !dtypes.contains(&tensor.dtype) {
            let supported: Vec<_> = dtypes.iter().map(Dtype::to_string).collect();
            let problem = format!("is of type {}; supported: {}", tensor.dtype, supported.join(", "));
            return Err(tensor.fault(problem));
        }
        if !shapes.contains(&tensor.shape) {
            let expected: Vec<_> = shapes.iter().map(|shape| format!("{shape:?}")).collect();
            let (found, expected) = (tensor.shape, expected.join(" or "));
            let problem = format!("has shape {found:?}, but config.json asks for {expected}");
            return Err(tensor.fault(problem));
        }
        Ok(tensor)
    }
}

impl RawTensor<'_> {
    /// Returns an error about the tensor.
    pub fn fault(&self, problem: impl Into<String>) -> LoadError {
        LoadError::Tensor { path: self.path.into(), name: self.name.into(), problem: problem.into() }
    }

    /// Reads an element of a tensor of floats.
    pub fn float(&self, index: usize) -> f32 {
        let pair = |index: usize| [self.bytes[2 * index], self.bytes[2 * index + 1]];
        match self.dtype {
            Dtype::F32 => f32::from_bits(self.word(index)),
            Dtype::F16 => f16::from_le_bytes(pair(index)).to_f32(),
            Dtype::BF16 => bf16::from_le_bytes(pair(index)).to_f32(),
            Dtype::F8_E4M3 => e4m3::value(self.bytes[index]),
            Dtype::F8_E8M0 => e8m0(self.bytes[index]),
            _ => f32::NAN,
        }
    }

    /// The type in which a device holds this tensor as scales.
    pub fn scale_type(&self) -> ScaleType {
        if self.dtype == Dtype::F16 { ScaleType::F16 } else { ScaleType::F32 }
    }

    /// Reads an element of four bytes.
    pub fn word(&self, index: usize) -> u32 {
        self.bytes.as_chunks::<4>().0.get(index).map_or(0, |word| u32::from_le_bytes(*word))
    }

    /// Reads an element of eight bytes.
    pub fn long(&self, index: usize) -> i64 {
        self.bytes.as_chunks::<8>().0.get(index).map_or(0, |word| i64::from_le_bytes(*word))
    }
}
