//! The source of a model's tensors.

use std::path::Path;

use tutti_kernels::{Quantize, WeightType};
use tutti_runtime::gguf;

use super::{
    Dummy, GgufFile, Precision, SafetensorsDir, ShardRange, TensorSpec, Window,
    quantised::{Checked, HeldForm, Layout},
    read_ahead::Extent,
    safetensors::Stored,
};
use crate::{LoadError, LoadFormat, LoadOptions, config::ConfigFile};

/// The source of tensors.
pub(crate) enum Source {
    /// A checkpoint's files.
    Files(SafetensorsDir),
    /// A GGUF file.
    Gguf(GgufFile),
    /// Random numbers from a seed.
    Dummy(Dummy),
}

impl Source {
    /// Opens the source that the options name. Dummy weights have the type `dtype`.
    pub fn open(dir: &Path, options: &LoadOptions, dtype: WeightType) -> Result<Self, LoadError> {
        Ok(match options.load_format {
            LoadFormat::Auto if gguf::is_file(dir) => Self::Gguf(GgufFile::open(dir)?),
            LoadFormat::Auto => {
                let quantisation = ConfigFile::read(dir)?.quantisation()?;
                Self::Files(SafetensorsDir::open(dir)?.with_quantisation(quantisation))
            }
            LoadFormat::Dummy => Self::Dummy(Dummy { seed: options.seed, dtype }),
        })
    }

    /// Returns the stored type of a tensor. Fails if the tensor is missing, has another shape, or an unsupported type.
    pub fn check(&self, spec: &TensorSpec) -> Result<WeightType, LoadError> {
        match self {
            Self::Files(files) => files.check(spec),
            Self::Gguf(file) => file.check(spec),
            Self::Dummy(dummy) => Ok(dummy.dtype(spec)),
        }
    }

    /// Returns the stored type of a tensor of which a rank loads `range`. Fails as [`Self::check`] does, or if the
    /// range cannot be read.
    pub fn check_range(&self, spec: &TensorSpec, range: &ShardRange) -> Result<WeightType, LoadError> {
        match self {
            Self::Files(files) => files.check_range(spec, range)?,
            Self::Gguf(file) => file.check_range(spec, range)?,
            Self::Dummy(_) => {}
        }
        self.check(spec)
    }

    /// Returns the layout of a quantised matrix; `None` for other tensors. Fails as [`Self::check`] does.
    pub(super) fn layout(&self, spec: &TensorSpec) -> Result<Option<Box<dyn Layout + '_>>, LoadError> {
        Ok(match self {
            Self::Files(files) => match files.stored(spec)? {
                Stored::Quantised(Checked { layout, .. }, _) => Some(layout),
                Stored::Plain(_) | Stored::Indices => None,
            },
            Self::Gguf(file) => file.blocks(spec)?.map(|blocks| Box::new(blocks) as Box<dyn Layout>),
            Self::Dummy(_) => None,
        })
    }

    /// Returns the form in which a device that holds quantised matrices holds a tensor; `None` if it holds elements of
    /// a type. `quantize` is the quantisation of the load options.
    pub fn form(&self, spec: &TensorSpec, quantize: Quantize) -> Result<Option<HeldForm>, LoadError> {
        let is_asked = match spec.precision {
            Precision::Configured => quantize == Quantize::None,
            Precision::Stored => true,
            Precision::Type(_) => false,
        };
        if !is_asked || spec.dims.columns <= 1 {
            return Ok(None);
        }
        Ok(self.layout(spec)?.and_then(|layout| layout.form()))
    }

    /// Notes that the model uses a tensor.
    pub fn mark_used(&mut self, name: &str) {
        match self {
            Self::Files(files) => files.mark_used(name),
            Self::Gguf(file) => file.mark_used(name),
            Self::Dummy(_) => {}
        }
    }

    /// Returns the part of a file that holds a window; `None` if no file holds it.
    pub(super) fn extent(&self, spec: &TensorSpec, window: &Window) -> Result<Option<Extent>, LoadError> {
        Ok(match self {
            Self::Files(files) => Some(files.extent(spec, window)?),
            Self::Gguf(file) => Some(file.extent(spec, window)?),
            Self::Dummy(_) => None,
        })
    }

    /// Releases the mapped pages of a window that the device has copied.
    pub(super) fn release(&self, spec: &TensorSpec, window: &Window) -> Result<(), LoadError> {
        match self {
            Self::Files(files) => files.release(spec, window),
            Self::Gguf(file) => file.release(spec, window),
            Self::Dummy(_) => Ok(()),
        }
    }
}
