//! Quantised matrices as a device holds them: codes, scales and offsets of a window, in one of few forms.

use std::{
    borrow::Cow,
    ops::Range,
    sync::{Mutex, PoisonError},
};

use tutti_kernels::{Device, DeviceError, GroupOffsets, OffsetKind, QuantizedRows, QuantizedType, ScaleType};

use super::{Element, GroupScales, Layout, Offsets, Quantised};
use crate::weights::Window;

/// Number of elements per task. A task takes far longer than handing it to another thread.
const TASK_ELEMENTS: usize = 1 << 18;
/// The zero point of integers of four bits without offsets.
const CENTRE: u8 = 8;
/// Numbers of inputs that share a scale on a device, and so the group sizes that it holds without repeating scales.
const DEVICE_GROUPS: [usize; 4] = [128, 64, 32, 16];

/// The form in which a device holds a matrix of a layout. The layout alone determines it, so that matrices of a layout
/// can be fused, and so that their size is known before they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldForm {
    pub element: QuantizedType,
    pub offsets: OffsetKind,
    pub scales: ScaleType,
    /// Number of columns that share a scale.
    pub group: usize,
}

/// A window of a matrix in a [`HeldForm`].
pub(in crate::weights) struct HeldRows<'a> {
    form: HeldForm,
    codes: Cow<'a, [u8]>,
    /// Bytes from the start of a row's codes to the start of the next.
    stride: usize,
    rows: usize,
    columns: usize,
    scales: Vec<f32>,
    zero_points: Vec<u8>,
    minima: Vec<f32>,
}

impl HeldForm {
    /// Returns the form for a matrix of this many columns; `None` if devices do not hold groups of this size.
    pub fn of_columns(self, columns: usize) -> Option<Self> {
        let least = DEVICE_GROUPS[DEVICE_GROUPS.len() - 1];
        (columns > 0 && (self.group.is_multiple_of(least) || self.group >= columns)).then_some(self)
    }

    /// Returns a form that holds matrices of both forms exactly; `None` if there is none.
    pub fn fused(self, other: Self) -> Option<Self> {
        let element = match (self.element, other.element) {
            (one, same) if one == same => one,
            (QuantizedType::Int4, QuantizedType::Int8) | (QuantizedType::Int8, QuantizedType::Int4) => {
                QuantizedType::Int8
            }
            _ => return None,
        };
        let offsets = match (self.offsets, other.offsets) {
            (one, same) if one == same => one,
            (OffsetKind::None, kind) | (kind, OffsetKind::None) => kind,
            _ => return None,
        };
        let is_f16 = |form: Self| form.scales == ScaleType::F16;
        // A minimum that stands for a zero point may be out of the range of f16.
        let keeps_f16 = self.offsets == other.offsets || offsets != OffsetKind::Minima;
        let scales = if is_f16(self) && is_f16(other) && keeps_f16 { ScaleType::F16 } else { ScaleType::F32 };
        Some(Self { element, offsets, scales, group: self.group.min(other.group) })
    }

    /// Bytes of a matrix on a device: without padding, and with one scale for whole rows, which a CPU repeats.
    pub fn bytes(self, rows: usize, columns: usize) -> u64 {
        let holds = |group: &usize| self.group >= columns || self.group.is_multiple_of(*group);
        let group = DEVICE_GROUPS.into_iter().find(holds).unwrap_or(self.group);
        let of_group = self.scales.bytes()
            + match self.offsets {
                OffsetKind::None => 0,
                OffsetKind::ZeroPoints => 1,
                OffsetKind::Minima => self.scales.bytes(),
            };
        let groups = if self.group >= columns { 1 } else { columns.div_ceil(group) };
        let of_row = (columns * self.element.bits()).div_ceil(8) + groups * of_group;
        (of_row as u64).saturating_mul(rows as u64)
    }
}

impl<'a> HeldRows<'a> {
    /// Reads a window of a matrix in a form that holds it, on the device's threads. Codes that the file stores in this
    /// form are not copied.
    pub fn read<D: Device>(
        device: &mut D,
        layout: &'a dyn Layout,
        window: &Window,
        form: HeldForm,
    ) -> Result<Self, DeviceError> {
        let (rows, columns) = (window.rows.len(), window.columns.len());
        let own = layout.form().unwrap_or(form);
        let form = HeldForm { group: own.group, ..form };
        let is_whole_byte = (window.columns.start * form.element.bits()).is_multiple_of(8);
        let stored = layout.stored_codes().filter(|_| own.element == form.element && is_whole_byte);
        let row_bytes = (columns * form.element.bits()).div_ceil(8);
        let (mut codes, stride) = match stored {
            None => (Cow::Owned(vec![0; rows * row_bytes]), row_bytes),
            Some(stored) => {
                let first =
                    window.rows.start * stored.stride + window.columns.start * form.element.bits() / 8;
                let len = rows.checked_sub(1).map_or(0, |gaps| gaps * stored.stride + row_bytes);
                (Cow::Borrowed(&stored.bytes[first..first + len]), stored.stride)
            }
        };
        let groups = columns.div_ceil(form.group).max(1);
        let count = |kind: OffsetKind| if form.offsets == kind { rows * groups } else { 0 };
        let mut scales = vec![0.0; rows * groups];
        let mut zero_points = vec![0; count(OffsetKind::ZeroPoints)];
        let mut minima = vec![0.0; count(OffsetKind::Minima)];

        let at_once = (TASK_ELEMENTS / columns.max(1)).max(1);
        // Each task locks only its own pieces, so no task waits.
        let pieces = Pieces {
            codes: match &mut codes {
                Cow::Owned(codes) => locked(codes, at_once * row_bytes),
                Cow::Borrowed(_) => Vec::new(),
            },
            scales: locked(&mut scales, at_once * groups),
            zero_points: locked(&mut zero_points, at_once * groups),
            minima: locked(&mut minima, at_once * groups),
        };
        device.host_tasks(rows.div_ceil(at_once), &|task| {
            let first = window.rows.start + task * at_once;
            let of_task = first..window.rows.end.min(first + at_once);
            pieces.read(layout, task, (of_task, window.columns.clone()), form, row_bytes);
        })?;
        Ok(Self { form, codes, stride, rows, columns, scales, zero_points, minima })
    }

    /// True if nothing here is in the file's mapped pages, so that they may be released.
    pub fn is_copied(&self) -> bool {
        matches!(self.codes, Cow::Owned(_))
    }

    pub fn view(&self) -> QuantizedRows<'_> {
        let Self { form, ref codes, stride, rows, columns, ref scales, .. } = *self;
        QuantizedRows {
            codes,
            element: form.element,
            rows,
            columns,
            stride,
            group: form.group,
            rows_per_scale: 1,
            scales,
            scale_type: form.scales,
            offsets: match form.offsets {
                OffsetKind::None => GroupOffsets::None,
                OffsetKind::ZeroPoints => GroupOffsets::ZeroPoints(&self.zero_points),
                OffsetKind::Minima => GroupOffsets::Minima(&self.minima),
            },
        }
    }
}

/// The parts of a window by the rows of tasks. Those that the form does not have are empty.
struct Pieces<'b> {
    codes: Vec<Mutex<&'b mut [u8]>>,
    scales: Vec<Mutex<&'b mut [f32]>>,
    zero_points: Vec<Mutex<&'b mut [u8]>>,
    minima: Vec<Mutex<&'b mut [f32]>>,
}

fn locked<T>(all: &mut [T], piece: usize) -> Vec<Mutex<&mut [T]>> {
    all.chunks_mut(piece.max(1)).map(Mutex::new).collect()
}

/// Copies to a task's piece, if the form has such pieces.
fn put<T: Copy>(pieces: &[Mutex<&mut [T]>], task: usize, from: impl FnOnce() -> Vec<T>) {
    if let Some(piece) = pieces.get(task) {
        piece.lock().unwrap_or_else(PoisonError::into_inner).copy_from_slice(&from());
    }
}

impl Pieces<'_> {
    /// Reads the rows and columns of a task.
    fn read(
        &self,
        layout: &dyn Layout,
        task: usize,
        (rows, columns): (Range<usize>, Range<usize>),
        form: HeldForm,
        row_bytes: usize,
    ) {
        let scales = if self.codes.is_empty() {
            layout.read_scales(rows, columns)
        } else {
            let width = columns.len();
            let Quantised { element, mut codes, scales } = layout.read(rows, columns);
            let is_centred = element == Element::Int4 && matches!(scales.offsets, Offsets::None);
            if form.element == QuantizedType::Int8 && is_centred {
                codes.iter_mut().for_each(|code| *code = code.wrapping_sub(CENTRE));
            }
            put(&self.codes, task, || match form.element.bits() {
                8 => codes,
                _ => nibbles(&codes, width, row_bytes),
            });
            scales
        };
        let GroupScales { scales, offsets, .. } = scales;
        // Codes that keep the zero point 8 have it in the form of the offsets.
        let centre = if form.element == QuantizedType::Int4 { CENTRE } else { 0 };
        put(&self.zero_points, task, || match &offsets {
            Offsets::ZeroPoints(zero_points) => zero_points.clone(),
            Offsets::None | Offsets::Minima(_) => vec![centre; scales.len()],
        });
        put(&self.minima, task, || match &offsets {
            Offsets::Minima(minima) => minima.clone(),
            Offsets::None | Offsets::ZeroPoints(_) => {
                scales.iter().map(|scale| scale * f32::from(centre)).collect()
            }
        });
        put(&self.scales, task, || scales);
    }
}

/// Packs codes of four bits into rows of `row_bytes` bytes. The first of two codes is in the low bits.
fn nibbles(codes: &[u8], width: usize, row_bytes: usize) -> Vec<u8> {
    let mut packed = Vec::with_capacity(codes.len() / width.max(1) * row_bytes);
    for row in codes.chunks_exact(width.max(1)) {
        let (pairs, last) = row.as_chunks::<2>();
        packed.extend(pairs.iter().map(|[low, high]| low & 15 | high << 4));
        packed.extend(last.iter().map(|code| code & 15));
    }
    packed
}
