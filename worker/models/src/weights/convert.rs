//! Conversion of weights in host memory: transposition, and conversion to another element type,
//! also from quantised elements.

use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use tutti_kernels::{Device, DeviceError, HostMatrix, WeightType};

use super::{Window, quantised::Layout};

/// Number of elements per task. A task takes far longer than handing it to another thread.
const TASK_ELEMENTS: usize = 1 << 18;

/// Copies `from` to consecutive rows of elements of type `to`, on the device's threads. With `transposed`, the columns
/// of `from` become the rows.
pub(super) fn copy<D: Device>(
    device: &mut D,
    from: HostMatrix<'_>,
    to: WeightType,
    transposed: bool,
) -> Result<Vec<u8>, DeviceError> {
    let (rows, columns) = if transposed { (from.columns, from.rows) } else { (from.rows, from.columns) };
    let mut bytes = vec![0; rows * columns * to.bytes()];
    let row_bytes = columns * to.bytes();
    fill(device, &mut bytes, row_bytes * (TASK_ELEMENTS / columns.max(1)).max(1), &|first, out| {
        for (index, out) in out.chunks_exact_mut(row_bytes.max(1)).enumerate() {
            let row = first / row_bytes.max(1) + index;
            for (column, out) in out.chunks_exact_mut(to.bytes()).enumerate() {
                let (row, column) = if transposed { (column, row) } else { (row, column) };
                let size = from.dtype.bytes();
                let element = &from.bytes[(row * from.stride + column) * size..][..size];
                if from.dtype == to {
                    out.copy_from_slice(element)
                } else {
                    store(load(element, from.dtype), to, out)
                }
            }
        }
    })?;
    Ok(bytes)
}

/// Dequantises a window of a matrix to consecutive rows of elements of type `to`, on the device's threads. Codes and
/// scales are read a few rows at a time.
pub(super) fn dequantise<D: Device>(
    device: &mut D,
    layout: &dyn Layout,
    window: &Window,
    to: WeightType,
) -> Result<Vec<u8>, DeviceError> {
    let mut bytes = vec![0; window.elements() * to.bytes()];
    let row_bytes = (window.columns.len() * to.bytes()).max(1);
    let rows = (TASK_ELEMENTS / window.columns.len().max(1)).max(1);
    fill(device, &mut bytes, row_bytes * rows, &|first, out| {
        let first = window.rows.start + first / row_bytes;
        let rows = first..first + out.len() / row_bytes;
        layout.read(rows, window.columns.clone()).dequantise(to, out);
    })?;
    Ok(bytes)
}

/// Divides `bytes` into pieces of `piece` bytes, of which the last may be shorter. Calls `write` for each piece on the
/// device's threads, with the index of the piece's first byte.
pub(super) fn fill<D: Device>(
    device: &mut D,
    bytes: &mut [u8],
    piece: usize,
    write: &(dyn Fn(usize, &mut [u8]) + Sync),
) -> Result<(), DeviceError> {
    // Each task locks only its own piece, so no task waits.
    let pieces: Vec<_> = bytes.chunks_mut(piece.max(1)).map(Mutex::new).collect();
    device.host_tasks(pieces.len(), &|task| {
        write(task * piece.max(1), &mut pieces[task].lock().unwrap_or_else(PoisonError::into_inner));
    })
}

/// Converts little-endian elements to f32 and appends them to `out`.
pub(crate) fn widen(bytes: &[u8], dtype: WeightType, out: &mut Vec<f32>) {
    out.extend(bytes.chunks_exact(dtype.bytes()).map(|element| load(element, dtype)));
}

/// Reads one element.
fn load(bytes: &[u8], dtype: WeightType) -> f32 {
    match (dtype, bytes) {
        (WeightType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (WeightType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (WeightType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        _ => f32::NAN,
    }
}

/// Writes one element, rounded to the nearest, ties to even.
pub(crate) fn store(value: f32, dtype: WeightType, out: &mut [u8]) {
    match dtype {
        WeightType::F32 => out.copy_from_slice(&value.to_le_bytes()),
        WeightType::F16 => out.copy_from_slice(&f16::from_f32(value).to_le_bytes()),
        WeightType::Bf16 => out.copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
    }
}
