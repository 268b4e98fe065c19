//! Loads tensors onto a device one by one, and reports progress.

use std::{borrow::Cow, collections::VecDeque, path::Path};

use tutti_kernels::{
    Device, DeviceError, HostMatrix, INT4_GROUP, Quantize, WeightType, collective::GroupRank,
};
use tutti_runtime::gguf;

use super::{
    Dummy, GgufFile, Precision, SafetensorsDir, ShardRange, TensorSpec, Window,
    convert::{self, widen},
    quantised::Checked,
    read_ahead::ReadAhead,
    safetensors::Stored,
};
use crate::{LoadError, LoadFormat, LoadOptions, config::ConfigFile};

/// Progress of loading weights onto a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes loaded so far.
    pub done: u64,
    /// Bytes to load in total.
    pub total: u64,
}

/// A callback for progress.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(LoadProgress);

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
}

/// A window of a tensor in host memory. It is a part of the mapped file, or a converted copy.
struct HostWindow<'a> {
    bytes: Cow<'a, [u8]>,
    dtype: WeightType,
    rows: usize,
    columns: usize,
    stride: usize,
}

impl<'a> HostWindow<'a> {
    /// Wraps converted elements, which are all rows of a window, end to end.
    fn owned(bytes: Vec<u8>, dtype: WeightType, window: &Window) -> Self {
        let (rows, columns) = (window.rows.len(), window.columns.len());
        Self { bytes: bytes.into(), dtype, rows, columns, stride: columns }
    }

    /// Reads a window from `source`. Transposed matrices and tensors of another type are converted. All other windows
    /// are not copied, because the device reads them in place.
    fn read<D: Device>(
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

    fn view(&self) -> HostMatrix<'_> {
        let Self { ref bytes, dtype, rows, columns, stride } = *self;
        HostMatrix { bytes, dtype, rows, columns, stride }
    }
}

/// Refuses a rank's share of a tensor's inputs that cuts a group of weights in four bits: the ranks would hold other
/// numbers than a single device.
pub(crate) fn check_groups(spec: &TensorSpec, quantize: Quantize, rank: GroupRank) -> Result<(), LoadError> {
    let (share, inputs) = (spec.shard_range(rank).columns.len(), spec.dims.columns);
    let is_cut = share < inputs && !share.is_multiple_of(INT4_GROUP);
    if quantize != Quantize::Int4 || spec.precision != Precision::Configured || !is_cut {
        return Ok(());
    }
    let name = &spec.name;
    Err(DeviceError::Unsupported(format!(
        "quantize int4: a rank's {share} of {inputs} inputs of {name:?} cut a group of {INT4_GROUP}: take fewer ranks"
    ))
    .into())
}

/// Loads this rank's shard of a family's tensors from a source onto a device.
pub(crate) struct Loader<'a, D: Device> {
    source: Source,
    quantize: Quantize,
    device: &'a mut D,
    progress: Progress<'a>,
    state: LoadProgress,
    /// Bytes of the tensors loaded so far, as the device holds them.
    held: u64,
    /// The read-ahead; `None` if no tensor is read from a file.
    ahead: Option<ReadAhead>,
}

impl<'a, D: Device> Loader<'a, D> {
    /// Checks the presence, shape and type of every tensor of `specs` before any tensor is read, so that a bad
    /// checkpoint fails at once. Read-ahead follows the order of `specs`, which should be close to the order of
    /// loading.
    pub fn new<'s>(
        mut source: Source,
        quantize: Quantize,
        specs: impl Iterator<Item = &'s TensorSpec>,
        device: &'a mut D,
        progress: Progress<'a>,
    ) -> Result<Self, LoadError> {
        let (mut total, mut extents) = (0, VecDeque::new());
        for spec in specs {
            let range = spec.shard_range(device.group_rank());
            check_groups(spec, quantize, device.group_rank())?;
            total += (range.elements() * source.check_range(spec, &range)?.bytes()) as u64;
            match &mut source {
                Source::Files(files) => files.mark_used(&spec.name),
                Source::Gguf(file) => file.mark_used(&spec.name),
                Source::Dummy(_) => {}
            }
            if device.reads_weights() {
                for window in range.all_windows() {
                    match &source {
                        Source::Files(files) => extents.push_back(files.extent(spec, &window)?),
                        Source::Gguf(file) => extents.push_back(file.extent(spec, &window)?),
                        Source::Dummy(_) => {}
                    }
                }
            }
        }
        if let Source::Gguf(file) = &source {
            file.refuse_unused_layers()?;
        }
        let ahead = (!extents.is_empty()).then(|| ReadAhead::start(extents));
        let state = LoadProgress { done: 0, total };
        progress(state);
        Ok(Self { source, quantize, device, progress, state, held: 0, ahead })
    }

    /// Returns this rank and the size of its group.
    pub fn group_rank(&self) -> GroupRank {
        self.device.group_rank()
    }

    /// Returns the device, on which callers allocate buffers.
    pub fn device(&mut self) -> &mut D {
        self.device
    }

    /// Returns the stored type of a tensor.
    pub fn dtype(&self, spec: &TensorSpec) -> Result<WeightType, LoadError> {
        self.source.check(spec)
    }

    /// Loads several matrices as one matrix, one below another.
    pub fn matrix(&mut self, specs: &[&TensorSpec]) -> Result<D::Matrix, LoadError> {
        self.load_matrix(&self.windows(specs), |device, fused, quantize| device.matrix(fused, quantize))
    }

    /// Loads a table of embeddings.
    pub fn table(&mut self, spec: &TensorSpec) -> Result<D::Matrix, LoadError> {
        let take = |device: &mut D, fused: &[HostMatrix<'_>], quantize| device.table_matrix(fused, quantize);
        self.load_matrix(&self.windows(&[spec]), take)
    }

    /// Loads a table of embeddings that is also the LM head.
    pub fn tied(&mut self, spec: &TensorSpec) -> Result<D::Matrix, LoadError> {
        let take = |device: &mut D, fused: &[HostMatrix<'_>], quantize| device.tied_matrix(fused, quantize);
        self.load_matrix(&self.windows(&[spec]), take)
    }

    /// Loads an LM head.
    pub fn head(&mut self, spec: &TensorSpec) -> Result<D::Matrix, LoadError> {
        let take = |device: &mut D, fused: &[HostMatrix<'_>], quantize| device.head_matrix(fused, quantize);
        self.load_matrix(&self.windows(&[spec]), take)
    }

    /// Loads gate and up as one matrix.
    pub fn gate_up(&mut self, specs: [&TensorSpec; 2]) -> Result<D::Matrix, LoadError> {
        self.load_matrix(&self.windows(&specs), gate_up)
    }

    /// Loads the matrices of a stack that this rank holds, one by one. The parts of a matrix are fused end to end.
    pub fn matrices(&mut self, spec: &TensorSpec) -> Result<Vec<D::Matrix>, LoadError> {
        let range = spec.shard_range(self.group_rank());
        let load = |matrix| {
            let windows: Vec<_> = range.windows(matrix).map(|window| (spec, window)).collect();
            self.load_matrix(&windows, |device, fused, quantize| device.matrix(fused, quantize))
        };
        range.matrices.clone().map(load).collect()
    }

    /// Loads the matrices of a stack that this rank holds, one by one. The two parts of a matrix are gate and up.
    pub fn gate_ups(&mut self, spec: &TensorSpec) -> Result<Vec<D::Matrix>, LoadError> {
        let range = spec.shard_range(self.group_rank());
        let load = |matrix| {
            let windows: Vec<_> = range.windows(matrix).map(|window| (spec, window)).collect();
            self.load_matrix(&windows, gate_up)
        };
        range.matrices.clone().map(load).collect()
    }

    /// Returns the windows of these tensors that this rank holds, end to end.
    fn windows<'s>(&self, specs: &[&'s TensorSpec]) -> Vec<(&'s TensorSpec, Window)> {
        let windows = |&spec: &&'s TensorSpec| {
            let range = spec.shard_range(self.group_rank());
            range.all_windows().map(|window| (spec, window)).collect::<Vec<_>>()
        };
        specs.iter().flat_map(windows).collect()
    }

    fn load_matrix(
        &mut self,
        windows: &[(&TensorSpec, Window)],
        take: impl FnOnce(&mut D, &[HostMatrix<'_>], Quantize) -> Result<D::Matrix, DeviceError>,
    ) -> Result<D::Matrix, LoadError> {
        let Self { source, device, quantize, .. } = self;
        let mut held = Vec::with_capacity(windows.len());
        for (spec, window) in windows {
            held.push(HostWindow::read(source, *device, spec, window)?);
        }
        if let Source::Files(files) = &*source
            && let Some(other) = held.iter().position(|window| window.dtype != held[0].dtype)
        {
            return Err(files.differs(windows[other].0, windows[0].0)?);
        }
        let configured = windows.iter().all(|(spec, _)| spec.precision == Precision::Configured);
        let quantize = if configured { *quantize } else { Quantize::None };
        let views: Vec<_> = held.iter().map(HostWindow::view).collect();
        let matrix = take(device, &views, quantize)?;
        self.held += match quantize {
            // The count does not include padding in the device's layout.
            Quantize::None => {
                let of = |view: &HostMatrix<'_>| (view.rows * view.columns * view.dtype.bytes()) as u64;
                let beside = self.device.screen_bytes(&matrix) + self.device.corrections_bytes(&matrix);
                views.iter().map(of).sum::<u64>() + beside
            }
            Quantize::Int8 | Quantize::Int4 => self.device.matrix_bytes(&matrix),
        };
        drop(held);
        self.advance(windows)?;
        Ok(matrix)
    }

    /// Loads this rank's rows of a matrix as one f32 vector in column order.
    pub fn columns(&mut self, spec: &TensorSpec) -> Result<D::Vector, LoadError> {
        let (rows, width) = (self.widened(&[spec])?, spec.dims.columns);
        let count = rows.len().checked_div(width).unwrap_or(0);
        let values: Vec<f32> = (0..width)
            .flat_map(|column| (0..count).map(move |row| (row, column)))
            .map(|(row, column)| rows[row * width + column])
            .collect();
        Ok(self.device.vector(&values)?)
    }

    /// Loads several vectors as one f32 vector, end to end.
    pub fn vector(&mut self, specs: &[&TensorSpec]) -> Result<D::Vector, LoadError> {
        let values = self.widened(specs)?;
        Ok(self.device.vector(&values)?)
    }

    /// Reads this rank's share of tensors, row by row and end to end. Each element is converted to the value that the
    /// device holds.
    fn widened(&mut self, specs: &[&TensorSpec]) -> Result<Vec<f32>, LoadError> {
        let windows = self.windows(specs);
        let (mut values, mut held) = (Vec::new(), 0);
        for (spec, window) in &windows {
            let host = HostWindow::read(&self.source, self.device, spec, window)?;
            let first = values.len();
            if host.stride == host.columns {
                widen(&host.bytes, host.dtype, &mut values);
            } else {
                (0..host.rows).for_each(|row| widen(host.view().row(row), host.dtype, &mut values));
            }
            values[first..].iter_mut().for_each(|x| *x = spec.values.of(*x));
            held += (window.elements() * host.dtype.bytes()) as u64;
        }
        self.held += held;
        self.advance(&windows)?;
        Ok(values)
    }

    /// Warns of the checkpoint's tensors that the model does not use, once per group.
    pub fn report_unused(&self) {
        let unused = match &self.source {
            Source::Files(files) => files.describe_unused(self.group_rank()),
            Source::Gguf(file) => file.describe_unused(),
            Source::Dummy(_) => None,
        };
        if let (Some(unused), true) = (unused, self.group_rank().is_leader()) {
            tracing::warn!("{unused}");
        }
    }

    /// Returns the bytes of the loaded tensors on the device.
    pub fn finish(self) -> u64 {
        self.held
    }

    /// Bytes of the tensors loaded so far, as the device holds them.
    #[cfg(test)]
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Releases these windows and adds their bytes, in the stored type, to the progress.
    fn advance(&mut self, windows: &[(&TensorSpec, Window)]) -> Result<(), LoadError> {
        for (spec, window) in windows {
            match &self.source {
                Source::Files(files) => files.release(spec, window)?,
                Source::Gguf(file) => file.release(spec, window)?,
                Source::Dummy(_) => {}
            }
            self.state.done += (window.elements() * self.source.check(spec)?.bytes()) as u64;
        }
        if let Some(ahead) = &mut self.ahead {
            ahead.advance(self.state.done);
        }
        (self.progress)(self.state);
        Ok(())
    }
}

/// Loads gate and up as one matrix.
fn gate_up<D: Device>(
    device: &mut D,
    fused: &[HostMatrix<'_>],
    quantize: Quantize,
) -> Result<D::Matrix, DeviceError> {
    match *fused {
        [gate, up] => device.gate_up_matrix([gate, up], quantize),
        _ => Err(DeviceError::Misuse(format!("{} matrices in place of gate and up", fused.len()))),
    }
}
