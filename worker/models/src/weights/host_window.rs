//! Windows of tensors in host memory, as elements of a type.

use std::borrow::Cow;

use tutti_kernels::{Device, HostMatrix, WeightType};

use super::{Precision, Source, TensorSpec, Window, convert, quantised::Checked, safetensors::Stored};
use crate::LoadError;

/// A window of a tensor in host memory. It is a part of the mapped file, or a converted copy.
pub(super) struct HostWindow<'a> {
    pub bytes: Cow<'a, [u8]>,
    pub dtype: WeightType,
    pub rows: usize,
    pub columns: usize,
    pub stride: usize,
}

impl<'a> HostWindow<'a> {
    /// Wraps converted elements, which are all rows of a window, end to end.
    fn owned(bytes: Vec<u8>, dtype: WeightType, window: &Window) -> Self {
        let (rows, columns) = (window.rows.len(), window.columns.len());
        Self { bytes: bytes.into(), dtype, rows, columns, stride: columns }
    }

    /// Reads a window from `source`. Transposed matrices and tensors of another type are converted. All other windows
    /// are not copied, because the device reads them in place.
    pub fn read<D: Device>(
        source: &'a Source,
        device: &mut D,
        spec: &TensorSpec,
        window: &Window,
    ) -> Result<Self, LoadError> {
        let files = match source {
            Source::Files(files) => files,
            Source::Gguf(file) => {
                let held = match spec.precision {
                    Precision::Type(held) => held,
                    Precision::Configured | Precision::Stored => file.check(spec)?,
                };
                return Ok(Self::owned(file.read(device, spec, window, held)?, held, window));
            }
            Source::Dummy(dummy) => {
                return Ok(Self::owned(dummy.bytes(device, spec, window)?, dummy.dtype(spec), window));
            }
        };
        if let Stored::Quantised(Checked { layout, .. }, dtype) = files.stored(spec)? {
            let held = match spec.precision {
                Precision::Type(held) => held,
                Precision::Configured | Precision::Stored => dtype,
            };
            let bytes = convert::dequantise(device, &*layout, window, held)?;
            return Ok(Self::owned(bytes, held, window));
        }
        let stored = files.window(spec, window)?;
        let held = match spec.precision {
            Precision::Type(dtype) => dtype,
            Precision::Configured | Precision::Stored => stored.dtype,
        };
        if held != stored.dtype || spec.dims.transposed {
            let bytes = convert::copy(device, stored, held, spec.dims.transposed)?;
            return Ok(Self::owned(bytes, held, window));
        }
        let HostMatrix { bytes, dtype, rows, columns, stride } = stored;
        Ok(Self { bytes: bytes.into(), dtype, rows, columns, stride })
    }

    pub fn view(&self) -> HostMatrix<'_> {
        let Self { ref bytes, dtype, rows, columns, stride } = *self;
        HostMatrix { bytes, dtype, rows, columns, stride }
    }
}
