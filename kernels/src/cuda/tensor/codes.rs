//! Weight matrices that are held as codes with scales of groups: as a checkpoint stores them, or quantised at load.

use std::iter;
use std::sync::{Arc, Mutex, PoisonError};

use half::f16;

use super::{CHUNK, Matrix, WeightLoader};
use crate::cpu::RowQuantiser;
use crate::cuda::context::Gpu;
use crate::cuda::host_threads::HostThreads;
use crate::cuda::memory::{DeviceBuffer, DevicePointer};
use crate::{DeviceError, GroupOffsets, OffsetKind, QuantizedRows, QuantizedType, ScaleType, WeightType};

/// Rows of codes, scales and offsets begin at multiples of this number of bytes, which a kernel copies at once.
const ALIGNMENT: usize = 16;
/// Numbers of inputs that share a scale on the GPU. The largest one that divides a matrix's groups is taken.
const GROUPS: [usize; 4] = [128, 64, 32, 16];
/// `WHOLE_ROWS` in `sources/codes.cuh`: the shift of a matrix whose rows have one scale each.
const WHOLE_ROWS: u32 = 31;
/// Number of weights that a task quantises. A task takes far longer than handing it to another thread.
const TASK_WEIGHTS: usize = 1 << 18;

/// The layout of a matrix of codes. A matrix is one allocation: the codes, then the scales, then the offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct CodesLayout {
    pub(in crate::cuda) element: QuantizedType,
    scales: ScaleType,
    offsets: OffsetKind,
    /// Bytes from the start of a row's codes to the start of the next.
    pub(in crate::cuda) stride: usize,
    /// Number of groups of a row.
    pub(in crate::cuda) groups: usize,
    /// Binary logarithm of the number of inputs of a group, or [`WHOLE_ROWS`].
    pub(in crate::cuda) shift: u32,
    /// Offsets of the scales and of the offsets in the allocation, in bytes.
    pub(in crate::cuda) scales_at: usize,
    pub(in crate::cuda) offsets_at: usize,
    bytes: usize,
}

/// The size and the types of a matrix of codes.
struct Form {
    element: QuantizedType,
    scales: ScaleType,
    offsets: OffsetKind,
    rows: usize,
    columns: usize,
    /// Number of inputs that share a scale: one of [`GROUPS`], or `None` for whole rows.
    group: Option<usize>,
}

impl Form {
    fn of(matrices: &[QuantizedRows<'_>]) -> Option<Self> {
        let first = matrices.first()?;
        let is_whole = |matrix: &QuantizedRows<'_>| matrix.group >= matrix.columns;
        let divides = |group: &usize| matrices.iter().all(|m| is_whole(m) || m.group.is_multiple_of(*group));
        let group =
            if matrices.iter().all(is_whole) { None } else { Some(GROUPS.into_iter().find(divides)?) };
        Some(Self {
            element: first.element,
            scales: first.scale_type,
            offsets: first.offsets.kind(),
            rows: matrices.iter().try_fold(0usize, |sum, matrix| sum.checked_add(matrix.rows))?,
            columns: first.columns,
            group,
        })
    }
}

impl CodesLayout {
    /// Returns the layout of a matrix; `None` if its size overflows.
    fn new(form: Form) -> Option<Self> {
        let Form { element, scales, offsets, rows, columns, group } = form;
        let stride = columns.checked_mul(element.bits())?.div_ceil(8).next_multiple_of(ALIGNMENT);
        let (groups, shift) = match group {
            None => (1, WHOLE_ROWS),
            Some(group) => (columns.div_ceil(group), group.ilog2()),
        };
        let of_offset = match offsets {
            OffsetKind::None => 0,
            OffsetKind::ZeroPoints => 1,
            OffsetKind::Minima => scales.bytes(),
        };
        let scales_at = rows.checked_mul(stride)?;
        let count = rows.checked_mul(groups)?;
        let offsets_at =
            scales_at.checked_add(count.checked_mul(scales.bytes())?)?.checked_next_multiple_of(ALIGNMENT)?;
        let bytes = offsets_at.checked_add(count.checked_mul(of_offset)?)?;
        Some(Self { element, scales, offsets, stride, groups, shift, scales_at, offsets_at, bytes })
    }

    /// The flags `F16_SCALES`, `ZERO_POINTS` and `MINIMA` in `sources/codes.cuh`.
    pub(in crate::cuda) fn kinds(&self) -> u32 {
        let of_offsets = match self.offsets {
            OffsetKind::None => 0,
            OffsetKind::ZeroPoints => 2,
            OffsetKind::Minima => 4,
        };
        u32::from(self.scales == ScaleType::F16) | of_offsets
    }

    /// Addresses of a matrix's codes, scales and offsets.
    pub(in crate::cuda) fn addresses(&self, matrix: &Matrix) -> [DevicePointer<u8>; 3] {
        [0, self.scales_at, self.offsets_at].map(|bytes| matrix.at().add_bytes(bytes))
    }

    /// Index in a source's scales of each scale of a matrix, row by row. Scales of larger groups are repeated.
    fn indices<'a>(&self, matrix: &'a QuantizedRows<'_>) -> impl Iterator<Item = usize> + 'a {
        let Self { groups, shift, .. } = *self;
        let of_row = move |row: usize| {
            (0..groups).map(move |group| {
                matrix.scale_index(row, if shift == WHOLE_ROWS { 0 } else { group << shift })
            })
        };
        (0..matrix.rows).flat_map(of_row)
    }

    /// The scales of all matrices in the device's type, and the gap behind them.
    fn scale_bytes(&self, matrices: &[QuantizedRows<'_>]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.offsets_at - self.scales_at);
        for matrix in matrices {
            self.indices(matrix).for_each(|index| self.put(matrix.scales[index], &mut bytes));
        }
        bytes.resize(self.offsets_at - self.scales_at, 0);
        bytes
    }

    fn offset_bytes(&self, matrices: &[QuantizedRows<'_>]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.bytes - self.offsets_at);
        for matrix in matrices {
            match matrix.offsets {
                GroupOffsets::None => {}
                GroupOffsets::ZeroPoints(zeros) => {
                    bytes.extend(self.indices(matrix).map(|index| zeros[index]));
                }
                GroupOffsets::Minima(minima) => {
                    self.indices(matrix).for_each(|index| self.put(minima[index], &mut bytes));
                }
            }
        }
        bytes
    }

    fn put(&self, value: f32, to: &mut Vec<u8>) {
        match self.scales {
            ScaleType::F16 => to.extend(f16::from_f32(value).to_ne_bytes()),
            ScaleType::F32 => to.extend(value.to_ne_bytes()),
        }
    }
}

impl Matrix {
    /// Loads matrices of codes one after another. Their products round inputs and weights to bf16.
    pub(in crate::cuda) fn load_codes(
        gpu: &Arc<Gpu>,
        loader: &mut WeightLoader,
        matrices: &[QuantizedRows<'_>],
        is_pair: bool,
    ) -> Result<Self, DeviceError> {
        QuantizedRows::check_fused(matrices, is_pair)?;
        let layout = Form::of(matrices).and_then(CodesLayout::new).ok_or_else(without_size)?;
        let data = DeviceBuffer::new(gpu, layout.bytes, "a weight matrix")?;
        let (scales, offsets) = (layout.scale_bytes(matrices), layout.offset_bytes(matrices));
        let gap = &[0; ALIGNMENT][..layout.stride - matrices[0].row_bytes()];
        let rows = matrices.iter().flat_map(|matrix| (0..matrix.rows).map(move |row| matrix.row(row)));
        let codes = rows.flat_map(|row| [row, gap]);
        loader.load(&data, 0, codes.chain(iter::once(&scales[..])).chain(iter::once(&offsets[..])))?;
        Ok(Self {
            outputs: matrices.iter().map(|matrix| matrix.rows).sum(),
            inputs: matrices[0].columns,
            is_pair,
            dtype: WeightType::Bf16,
            codes: Some(layout),
            data,
        })
    }

    /// Quantises matrices on threads of the host, and loads the codes. Apart from the scales, the host holds only as
    /// many codes at a time as are copied at once.
    pub(in crate::cuda) fn quantise(
        gpu: &Arc<Gpu>,
        loader: &mut WeightLoader,
        source: &RowQuantiser<'_>,
        threads: HostThreads,
    ) -> Result<Self, DeviceError> {
        let RowQuantiser { outputs, inputs, is_pair, element, scale_type, group, .. } = *source;
        let (offsets, rows, columns) = (OffsetKind::None, outputs, inputs);
        let form = Form { element, scales: scale_type, offsets, rows, columns, group: Some(group) };
        let layout = CodesLayout::new(form).ok_or_else(without_size)?;
        let CodesLayout { stride, groups, scales_at, offsets_at, .. } = layout;
        let data = DeviceBuffer::new(gpu, layout.bytes, "a weight matrix")?;
        let rows: Vec<&[u8]> = source.rows().collect();
        let at_once = (CHUNK / stride.max(1)).clamp(1, rows.len().max(1));
        let of_task = (TASK_WEIGHTS / inputs.max(1)).max(1);
        let (mut codes, mut scales) = (vec![0; at_once * stride], vec![0.0; at_once * groups]);
        let mut scale_bytes = Vec::with_capacity(offsets_at - scales_at);
        for (batch, rows) in rows.chunks(at_once).enumerate() {
            let (codes, scales) = (&mut codes[..rows.len() * stride], &mut scales[..rows.len() * groups]);
            // Each task locks only its own piece, so no task waits.
            let pieces: Vec<_> = rows
                .chunks(of_task)
                .zip(codes.chunks_mut((of_task * stride).max(1)))
                .zip(scales.chunks_mut((of_task * groups).max(1)))
                .map(Mutex::new)
                .collect();
            threads.run(pieces.len(), &|task| {
                let ((rows, codes), scales) =
                    &mut *pieces[task].lock().unwrap_or_else(PoisonError::into_inner);
                let to = codes.chunks_mut(stride.max(1)).zip(scales.chunks_mut(groups.max(1)));
                rows.iter().zip(to).for_each(|(row, (codes, scales))| source.quantise(row, codes, scales));
            });
            drop(pieces);
            loader.load(&data, batch * at_once * stride, iter::once(&*codes))?;
            scales.iter().for_each(|scale| layout.put(*scale, &mut scale_bytes));
        }
        scale_bytes.resize(offsets_at - scales_at, 0);
        loader.load(&data, scales_at, iter::once(&scale_bytes[..]))?;
        Ok(Self { outputs, inputs, is_pair, dtype: WeightType::Bf16, codes: Some(layout), data })
    }
}

fn without_size() -> DeviceError {
    DeviceError::Misuse("a matrix of codes without a size".to_owned())
}
