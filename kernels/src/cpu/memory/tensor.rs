//! Activations and weight vectors.

use crate::DeviceError;
use crate::cpu::memory::Buffer;

/// Activations, `[rows, width]` in f32. The first [`Tensor::live`] rows hold values; the remaining rows are undefined.
pub struct Tensor {
    /// Maximum number of rows.
    capacity: usize,
    width: usize,
    /// Number of rows that the last operation wrote or kept.
    live: usize,
    data: Buffer<f32>,
}

impl Tensor {
    pub(in crate::cpu) fn zeroed(capacity: usize, width: usize) -> Result<Self, DeviceError> {
        let data = Buffer::zeroed(capacity.checked_mul(width), "an activation buffer")?;
        Ok(Self { capacity, width, live: 0, data })
    }

    /// Maximum number of rows.
    pub(in crate::cpu) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Number of elements per row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Number of rows that hold values.
    pub fn live(&self) -> usize {
        self.live
    }

    /// The values of the live rows, row by row.
    pub fn values(&self) -> &[f32] {
        &self.data[..self.live * self.width]
    }

    /// Replaces the contents with `rows`, an input from the host.
    pub fn fill(&mut self, rows: &[f32]) -> Result<(), DeviceError> {
        if self.width == 0 || !rows.len().is_multiple_of(self.width) {
            return Err(DeviceError::Misuse(format!("{} values for rows of {}", rows.len(), self.width)));
        }
        self.written(rows.len() / self.width, self.width)?.copy_from_slice(rows);
        Ok(())
    }

    /// Overwrites the live rows from index `first` on with `rows`.
    pub(in crate::cpu) fn overwrite(&mut self, first: usize, rows: &[f32]) -> Result<(), DeviceError> {
        let (width, live) = (self.width, self.live);
        let start = first.saturating_mul(width);
        match self.values_mut().get_mut(start..start.saturating_add(rows.len())) {
            Some(values) if width > 0 && rows.len().is_multiple_of(width) => {
                values.copy_from_slice(rows);
                Ok(())
            }
            _ => {
                let count = rows.len();
                Err(DeviceError::Misuse(format!(
                    "{count} values from row {first} on into {live} rows of {width}"
                )))
            }
        }
    }

    /// The values of the live rows; an error unless the rows are `width` wide.
    pub(in crate::cpu) fn read(&self, width: usize) -> Result<&[f32], DeviceError> {
        self.check_width(width)?;
        Ok(self.values())
    }

    /// The values of the live rows, for an update in place; an error unless there are `rows` rows of `width`.
    pub(in crate::cpu) fn change(&mut self, rows: usize, width: usize) -> Result<&mut [f32], DeviceError> {
        self.check_width(width)?;
        if self.live != rows {
            return Err(DeviceError::Misuse(format!("{} rows added to {}", rows, self.live)));
        }
        Ok(&mut self.data[..rows * width])
    }

    /// The values of the live rows, for an update in place.
    pub(in crate::cpu) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.data[..self.live * self.width]
    }

    /// Keeps only the live rows whose indices are in `rows`, and moves them to the front. `rows` must ascend.
    /// Afterwards `padded` rows are live. Rows after the kept ones are undefined.
    pub(in crate::cpu) fn keep(&mut self, rows: &[usize], padded: usize) -> Result<(), DeviceError> {
        let (width, live) = (self.width, self.live);
        let ascending = rows.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || rows.last().is_some_and(|&last| last >= live) {
            return Err(DeviceError::Misuse(format!("rows {rows:?} kept of {live}, which must ascend")));
        }
        if padded < rows.len() || padded > live {
            return Err(DeviceError::Misuse(format!("{padded} rows to keep {} of {live}", rows.len())));
        }
        // Entry i of an ascending list of indices is at least i, so no row overwrites a row that has not moved yet.
        for (to, &from) in rows.iter().enumerate() {
            self.data.copy_within(from * width..(from + 1) * width, to * width);
        }
        self.live = padded;
        Ok(())
    }

    /// Sets the number of live rows to `rows`, and returns these rows for the caller to write.
    pub(in crate::cpu) fn written(&mut self, rows: usize, width: usize) -> Result<&mut [f32], DeviceError> {
        self.check_width(width)?;
        if rows > self.capacity {
            let capacity = self.capacity;
            return Err(DeviceError::Misuse(format!("{rows} rows into a tensor with room for {capacity}")));
        }
        self.live = rows;
        Ok(&mut self.data[..rows * width])
    }

    fn check_width(&self, width: usize) -> Result<(), DeviceError> {
        if self.width == width {
            return Ok(());
        }
        Err(DeviceError::Misuse(format!("a tensor {} wide where {width} is wanted", self.width)))
    }
}

/// A norm's weight or a bias.
pub struct Vector(pub(in crate::cpu) Buffer<f32>);

impl Vector {
    pub(in crate::cpu) fn copy_of(values: &[f32]) -> Result<Self, DeviceError> {
        let mut data = Buffer::zeroed(values.len(), "a weight vector")?;
        data.copy_from_slice(values);
        Ok(Self(data))
    }

    /// The elements.
    pub(in crate::cpu) fn values(&self) -> &[f32] {
        &self.0
    }

    /// The elements; an error unless there are `len`.
    pub(in crate::cpu) fn read(&self, len: usize) -> Result<&[f32], DeviceError> {
        if self.0.len() == len {
            return Ok(&self.0);
        }
        Err(DeviceError::Misuse(format!("a vector of {} where {len} are wanted", self.0.len())))
    }
}
