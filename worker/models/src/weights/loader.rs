//! Loads tensors onto a device one by one, and reports progress.

use std::collections::VecDeque;

use tutti_kernels::{
    Device, DeviceError, HostMatrix, INT4_GROUP, Quantize, QuantizedRows, collective::GroupRank,
};

use super::{
    Precision, Source, TensorSpec, Window,
    convert::widen,
    host_window::HostWindow,
    quantised::{HeldForm, HeldRows},
    read_ahead::ReadAhead,
};
use crate::LoadError;

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
    /// True if the device holds a matrix that the checkpoint stores quantised.
    holds_quantised: bool,
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
            source.mark_used(&spec.name);
            if device.reads_weights() {
                for window in range.all_windows() {
                    extents.extend(source.extent(spec, &window)?);
                }
            }
        }
        if let Source::Gguf(file) = &source {
            file.refuse_unused_layers()?;
        }
        let ahead = (!extents.is_empty()).then(|| ReadAhead::start(extents));
        let state = LoadProgress { done: 0, total };
        progress(state);
        Ok(Self { source, quantize, device, progress, state, held: 0, holds_quantised: false, ahead })
    }

    /// Returns this rank and the size of its group.
    pub fn group_rank(&self) -> GroupRank {
        self.device.group_rank()
    }

    /// Returns the device, on which callers allocate buffers.
    pub fn device(&mut self) -> &mut D {
        self.device
    }

    /// Loads several matrices as one matrix, one below another.
    pub fn matrix(&mut self, specs: &[&TensorSpec]) -> Result<D::Matrix, LoadError> {
        self.load_matrix(&self.windows(specs), Use::Matrix)
    }

    /// Loads a table of embeddings.
    pub fn table(&mut self, spec: &TensorSpec) -> Result<D::Matrix, LoadError> {
        self.load_matrix(&self.windows(&[spec]), Use::Table)
    }

    /// Loads a table of embeddings that is also the LM head.
    pub fn tied(&mut self, spec: &TensorSpec) -> Result<D::Matrix, LoadError> {
        self.load_matrix(&self.windows(&[spec]), Use::Tied)
    }

    /// Loads an LM head.
    pub fn head(&mut self, spec: &TensorSpec) -> Result<D::Matrix, LoadError> {
        self.load_matrix(&self.windows(&[spec]), Use::Head)
    }

    /// Loads gate and up as one matrix.
    pub fn gate_up(&mut self, specs: [&TensorSpec; 2]) -> Result<D::Matrix, LoadError> {
        self.load_matrix(&self.windows(&specs), Use::GateUp)
    }

    /// Loads the matrices of a stack that this rank holds, one by one. The parts of a matrix are fused end to end.
    pub fn matrices(&mut self, spec: &TensorSpec) -> Result<Vec<D::Matrix>, LoadError> {
        let range = spec.shard_range(self.group_rank());
        let load = |matrix| {
            let windows: Vec<_> = range.windows(matrix).map(|window| (spec, window)).collect();
            self.load_matrix(&windows, Use::Matrix)
        };
        range.matrices.clone().map(load).collect()
    }

    /// Loads the matrices of a stack that this rank holds, one by one. The two parts of a matrix are gate and up.
    pub fn gate_ups(&mut self, spec: &TensorSpec) -> Result<Vec<D::Matrix>, LoadError> {
        let range = spec.shard_range(self.group_rank());
        let load = |matrix| {
            let windows: Vec<_> = range.windows(matrix).map(|window| (spec, window)).collect();
            self.load_matrix(&windows, Use::GateUp)
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

    /// Loads windows of matrices as one matrix, one below another. Quantised ones stay quantised if the device holds
    /// their common form.
    fn load_matrix(
        &mut self,
        windows: &[(&TensorSpec, Window)],
        use_as: Use,
    ) -> Result<D::Matrix, LoadError> {
        let matrix = match self.held_form(windows)? {
            Some(form) => self.load_quantised(windows, form, use_as)?,
            None => self.load_plain(windows, use_as)?,
        };
        self.advance(windows)?;
        Ok(matrix)
    }

    /// Returns the form in which the device holds all of these windows; `None` if it holds elements of a type.
    fn held_form(&self, windows: &[(&TensorSpec, Window)]) -> Result<Option<HeldForm>, LoadError> {
        let mut common: Option<HeldForm> = None;
        for (spec, _) in windows.iter().filter(|_| self.device.holds_quantized()) {
            let Some(form) = self.source.form(spec, self.quantize)? else { return Ok(None) };
            common = common.map_or(Some(form), |common| common.fused(form));
            if common.is_none() {
                return Ok(None);
            }
        }
        Ok(common)
    }

    fn load_quantised(
        &mut self,
        windows: &[(&TensorSpec, Window)],
        form: HeldForm,
        use_as: Use,
    ) -> Result<D::Matrix, LoadError> {
        let Self { source, device, held, .. } = self;
        let layouts = windows.iter().map(|(spec, _)| source.layout(spec)).collect::<Result<Vec<_>, _>>()?;
        let mut rows = Vec::with_capacity(windows.len());
        for (layout, (spec, window)) in layouts.iter().flatten().zip(windows) {
            let read = HeldRows::read(*device, &**layout, window, form)?;
            // While the device packs it, a matrix is not in the mapped file, too: an LM head is a large part of a
            // model.
            if read.is_copied() {
                source.release(spec, window)?;
            }
            rows.push(read);
        }
        let views: Vec<_> = rows.iter().map(HeldRows::view).collect();
        let matrix = use_as.load_quantised(*device, &views)?;
        *held += device.matrix_bytes(&matrix);
        self.holds_quantised = true;
        Ok(matrix)
    }

    fn load_plain(&mut self, windows: &[(&TensorSpec, Window)], use_as: Use) -> Result<D::Matrix, LoadError> {
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
        let matrix = use_as.load(*device, &views, quantize)?;
        self.held += match quantize {
            // The count does not include padding in the device's layout.
            Quantize::None => {
                let of = |view: &HostMatrix<'_>| (view.rows * view.columns * view.dtype.bytes()) as u64;
                let beside = self.device.screen_bytes(&matrix) + self.device.corrections_bytes(&matrix);
                views.iter().map(of).sum::<u64>() + beside
            }
            Quantize::Int8 | Quantize::Int4 => self.device.matrix_bytes(&matrix),
        };
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

    /// Reads this rank's share of a tensor as f32, row by row, for a use on the host.
    pub fn host(&mut self, spec: &TensorSpec) -> Result<Vec<f32>, LoadError> {
        self.widened(&[spec])
    }

    /// Loads several vectors as one f32 vector, end to end.
    pub fn vector(&mut self, specs: &[&TensorSpec]) -> Result<D::Vector, LoadError> {
        let values = self.widened(specs)?;
        Ok(self.device.vector(&values)?)
    }

    /// Loads a table of indices below `limit`, which is replicated, as f32. Dummy weights name consecutive indices.
    pub fn indices(&mut self, spec: &TensorSpec, limit: usize) -> Result<D::Vector, LoadError> {
        let (count, limit) = (spec.dims.matrix_elements(), limit.max(1));
        let values = match &self.source {
            Source::Files(files) => files.indices(spec, limit)?,
            Source::Dummy(_) => (0..count).map(|index| (index % limit) as f32).collect(),
            Source::Gguf(_) => {
                let problem = format!("{}: tables of indices in a GGUF file", spec.name);
                return Err(DeviceError::Unsupported(problem).into());
            }
        };
        self.held += (values.len() * size_of::<f32>()) as u64;
        self.advance(&self.windows(&[spec]))?;
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

    /// True if the device holds a matrix that the checkpoint stores quantised.
    pub fn holds_quantised(&self) -> bool {
        self.holds_quantised
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
            self.source.release(spec, window)?;
            self.state.done += (window.elements() * self.source.check(spec)?.bytes()) as u64;
        }
        if let Some(ahead) = &mut self.ahead {
            ahead.advance(self.state.done);
        }
        (self.progress)(self.state);
        Ok(())
    }
}

/// The use of a matrix on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Matrix,
    Table,
    Tied,
    Head,
    GateUp,
}

impl Use {
    fn load<D: Device>(
        self,
        device: &mut D,
        fused: &[HostMatrix<'_>],
        quantize: Quantize,
    ) -> Result<D::Matrix, DeviceError> {
        match self {
            Self::Matrix => device.matrix(fused, quantize),
            Self::Table => device.table_matrix(fused, quantize),
            Self::Tied => device.tied_matrix(fused, quantize),
            Self::Head => device.head_matrix(fused, quantize),
            Self::GateUp => device.gate_up_matrix(pair(fused)?, quantize),
        }
    }

    fn load_quantised<D: Device>(
        self,
        device: &mut D,
        fused: &[QuantizedRows<'_>],
    ) -> Result<D::Matrix, DeviceError> {
        match self {
            Self::Matrix | Self::Table | Self::Tied | Self::Head => device.quantized_matrix(fused),
            Self::GateUp => device.quantized_gate_up(pair(fused)?),
        }
    }
}

/// Returns gate and up.
fn pair<T: Copy>(fused: &[T]) -> Result<[T; 2], DeviceError> {
    let count = fused.len();
    fused.try_into().map_err(|_| DeviceError::Misuse(format!("{count} matrices in place of gate and up")))
}
